//! The job of a process, which stays the same over restarts.

use super::jobset;
use super::vars::{Vars, is_name};

/// A job, as known to the scheduler or launcher that restarts it. A process that trains by itself has a job
/// if a scheduler started it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Its name, which is the same for all of its processes and after a restart; `None` if it has none.
    pub name: Option<String>,
    /// Number of restarts, after a failure or from a queue.
    pub restarts: u64,
}

impl Job {
    /// Returns the scheduler's job. Its name is the same after a requeue, which no launcher inside the job
    /// can guarantee for its own names.
    pub(super) fn of_scheduler(vars: &Vars) -> Self {
        let slurm = || {
            let id = (vars.0)("SLURM_JOB_ID").filter(|id| is_name(id))?;
            Some(id.trim().to_owned())
        };
        Job {
            name: slurm().or_else(|| jobset::name(vars)),
            restarts: vars.restarts("SLURM_RESTART_COUNT").max(vars.restarts(jobset::RESTARTS)),
        }
    }

    /// Returns this job for a launch that the user has named `id`: one job of a scheduler may contain several
    /// launches, and each continues its own run.
    pub(super) fn with_id(self, id: Option<String>) -> Self {
        let name = match (&self.name, id) {
            (Some(job), Some(id)) if *job == id || is_inside(job, &id) => Some(id),
            (Some(job), Some(id)) => Some(format!("{job}{INSIDE}{id}")),
            (None, id) => id,
            (Some(job), None) => Some(job.clone()),
        };
        Job { name, ..self }
    }

    /// Returns this job for a launcher that calls it `name` and has restarted it `restarts` times. The result
    /// is the same whether or not the launcher's count includes the scheduler's restarts. Other launchers'
    /// names are often random, and differ after a requeue; Kiln's launcher marks its name as part of the
    /// scheduler's.
    pub(super) fn launched(self, name: Option<&str>, restarts: u64) -> Self {
        let name = name.map(str::to_owned);
        let name = match &self.name {
            Some(job) => name.filter(|name| is_inside(job, name)).or(self.name),
            None => name,
        };
        Job { name, restarts: self.restarts.max(restarts) }
    }
}

/// Separator between the name of a scheduler's job and that of a launch inside it.
const INSIDE: char = '/';

/// Returns whether `name` is that of a launch inside the scheduler's job `job`.
fn is_inside(job: &str, name: &str) -> bool {
    name.strip_prefix(job).is_some_and(|rest| rest.starts_with(INSIDE))
}
