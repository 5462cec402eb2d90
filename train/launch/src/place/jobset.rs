//! Pods of a Kubernetes JobSet, or of one indexed Job.
//!
//! Kubernetes itself sets only `JOB_COMPLETION_INDEX`. A JobSet has the rest as annotations of its pods
//! (<https://jobset.sigs.k8s.io/docs/concepts/>), which a manifest passes on as variables; see
//! `configs/k8s/`.

use super::error::EnvError;
use super::vars::{Named, Vars, is_name};

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

/// Variables with the number of pods.
pub(super) const NODES: &[&str] = &["WORLD_SIZE", "NNODES"];

/// Variable with the number of restarts of the JobSet.
pub(super) const RESTARTS: &str = "JOBSET_RESTART_ATTEMPT";

/// Returns whether this is a pod of a group. An indexed Job may also be many single runs.
pub(super) fn applies(vars: &Vars) -> bool {
    let signs = ["WORLD_SIZE", "NNODES", "MASTER_ADDR", "JOBSET_NAME", "JOBSET_COORDINATOR"];
    vars.has("JOB_COMPLETION_INDEX") && signs.iter().any(|name| vars.has(name))
}

/// Returns the JobSet's name, which is the job's name.
pub(super) fn name(vars: &Vars) -> Option<String> {
    let name = (vars.0)("JOBSET_NAME").filter(|name| is_name(name))?;
    Some(name.trim().to_owned())
}

/// Returns the host name of the first pod: the JobSet's coordinator, or the first pod's name according to the
/// JobSet's rules: `<jobset>-<replicated job>-<job>-<pod>.<jobset>`.
pub(super) fn coordinator(vars: &Vars) -> Result<Option<String>, EnvError> {
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
