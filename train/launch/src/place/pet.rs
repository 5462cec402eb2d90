//! `PET_*`: the variables from which torchrun also reads its arguments, as set by Kubeflow.

use super::error::EnvError;
use super::node;
use super::role::{Finding, Role, Source};
use super::vars::Vars;

pub(super) const NAMES: &[&str] = &[
    "PET_NNODES",
    "PET_NPROC_PER_NODE",
    "PET_NODE_RANK",
    "PET_MASTER_ADDR",
    "PET_MASTER_PORT",
    "PET_RDZV_ENDPOINT",
    "PET_RDZV_ID",
    "PET_STANDALONE",
    "PET_MAX_RESTARTS",
];

/// Variables that describe the nodes of the job.
const ABOUT_NODES: &[&str] =
    &["PET_NNODES", "PET_NODE_RANK", "PET_MASTER_ADDR", "PET_RDZV_ENDPOINT", "PET_STANDALONE"];

/// A variable of every other source that has not been asked yet.
const OTHERS: &[&str] = &["SLURM_STEP_ID", "SLURM_STEPID", "OMPI_COMM_WORLD_RANK", "PMI_RANK", "PMIX_RANK"];

pub(super) fn read(vars: &Vars) -> Result<Finding, EnvError> {
    let set = |names: &[&'static str]| names.iter().copied().find(|name| vars.has(name));
    let why = match (set(ABOUT_NODES), set(&["PET_NPROC_PER_NODE"])) {
        (Some(name), _) => {
            format!("{name} describes the nodes; this process starts its node's ranks")
        }
        (None, Some(name)) => {
            let jobset = super::jobset::applies(vars).then_some("JOB_COMPLETION_INDEX");
            if let Some(other) = set(OTHERS).or(jobset) {
                return Ok(Finding::Passed(format!(
                    "{name} alone says nothing about the nodes, and {other} is set"
                )));
            }
            format!("{name} is set; this process starts as many ranks")
        }
        (None, None) => return Ok(Finding::Passed("no PET_ variable about nodes".to_owned())),
    };
    let node = node::node_of(Source::Pet, vars)?;
    Ok(Finding::Taken(Role::Node(node), why))
}
