//! Which job a process belongs to, over its restarts.

use super::jobset;
use super::vars::{Vars, is_name};

/// A job as those know it who start it again. A process that trains by itself has one if a scheduler started
/// it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Its name: the same for all of its processes, and when it is started again. `None` if it has none.
    pub name: Option<String>,
    /// How often it was started again, after a failure or out of a queue.
    pub restarts: u64,
}

impl Job {
    /// The job that the scheduler knows: its name is the same after a requeue, which no launcher inside
    /// the job can promise of its own.
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

    /// This job, where whoever starts a launcher of ours has called what it launches `id`: inside one job of
    /// a scheduler there may be several launches, and each goes on with its own run.
    pub(super) fn with_id(self, id: Option<String>) -> Self {
        let name = match (&self.name, id) {
            (Some(job), Some(id)) if *job == id || is_inside(job, &id) => Some(id),
            (Some(job), Some(id)) => Some(format!("{job}{INSIDE}{id}")),
            (None, id) => id,
            (Some(job), None) => Some(job.clone()),
        };
        Job { name, ..self }
    }

    /// This job, where its launcher knows it by `name` and has started it again `restarts` times. Launchers
    /// that count the scheduler's restarts as well, and those that do not, come to the same. Other launchers'
    /// names are often random, and not the same after a requeue; ours says that it is part of the
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

/// Stands between the name of a scheduler's job and that of a launch inside it.
const INSIDE: char = '/';

/// Whether `name` is that of a launch inside the scheduler's job `job`.
fn is_inside(job: &str, name: &str) -> bool {
    name.strip_prefix(job).is_some_and(|rest| rest.starts_with(INSIDE))
}
