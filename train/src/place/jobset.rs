//! Pods of a Kubernetes JobSet, or of one indexed Job.
//!
//! Kubernetes itself sets `JOB_COMPLETION_INDEX` alone. A JobSet has the rest as annotations of its pods
//! (<https://jobset.sigs.k8s.io/docs/concepts/>), which a manifest passes on as variables; see
//! `configs/k8s/`.

use super::error::PlaceError;
use super::job::is_name;
use super::node;
use super::vars::{Named, Vars};
use super::{Finding, Role, Source};

pub(super) const NAMES: &[&str] = &[
    "JOB_COMPLETION_INDEX",
    "WORLD_SIZE",
    "NNODES",
    "JOBSET_NAME",
    "REPLICATED_JOB_NAME",
    "JOBSET_COORDINATOR",
    RESTARTS,
    "PET_NPROC_PER_NODE",
    "MASTER_ADDR",
    "MASTER_PORT",
];

/// Who may tell the number of pods.
pub(super) const NODES: &[&str] = &["WORLD_SIZE", "NNODES"];

/// How often the JobSet was started again.
pub(super) const RESTARTS: &str = "JOBSET_RESTART_ATTEMPT";

pub(super) fn read(vars: &Vars) -> Result<Finding, PlaceError> {
    if !vars.has("JOB_COMPLETION_INDEX") {
        return Ok(Finding::Passed("JOB_COMPLETION_INDEX is not set".to_owned()));
    }
    if !applies(vars) {
        let why = "an indexed Job without a sign that its pods belong together; set WORLD_SIZE to \
                   their number if they do";
        return Ok(Finding::Passed(why.to_owned()));
    }
    let node = node::node_of(Source::JobSet, vars)?;
    let why = "JOB_COMPLETION_INDEX is the rank of a node, which starts its own ranks";
    Ok(Finding::Taken(Role::Node(node), why.to_owned()))
}

/// Whether this is a pod of a group. An indexed Job may as well be many single runs.
pub(super) fn applies(vars: &Vars) -> bool {
    let signs = ["WORLD_SIZE", "NNODES", "MASTER_ADDR", "JOBSET_NAME", "JOBSET_COORDINATOR"];
    vars.has("JOB_COMPLETION_INDEX") && signs.iter().any(|name| vars.has(name))
}

/// The JobSet's name, which is the job's.
pub(super) fn name(vars: &Vars) -> Option<String> {
    let name = (vars.0)("JOBSET_NAME").filter(|name| is_name(name))?;
    Some(name.trim().to_owned())
}

/// Host name of the first pod: what the JobSet names as its coordinator, or the name that the first
/// pod has by the JobSet's rules: `<jobset>-<replicated job>-<job>-<pod>.<jobset>`.
pub(super) fn coordinator(vars: &Vars) -> Result<Option<String>, PlaceError> {
    if let Some(host) = vars.host(&["JOBSET_COORDINATOR"])? {
        return Ok(Some(host));
    }
    match (vars.text("JOBSET_NAME")?, vars.text("REPLICATED_JOB_NAME")?) {
        (Some(set), Some(job)) => {
            let value = format!("{set}-{job}-0-0.{set}");
            Named { name: "JOBSET_NAME", value }.host().map(Some)
        }
        _ => Ok(None),
    }
}
