//! Which job a process belongs to, over its restarts.

use super::jobset;
use super::vars::Vars;

/// A job as those know it who start it again. Also a process that trains by itself has one, if a scheduler
/// has started it.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Job {
    /// Its name: the same for all of its processes, and whenever it is started again. `None` if it has none
    /// of its own.
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

    /// This job, where its launcher knows it by `name` and has started it again `restarts` times. Launchers
    /// that count the scheduler's restarts as well, and those that do not, come to the same.
    pub(super) fn launched(self, name: Option<&str>, restarts: u64) -> Self {
        Job {
            name: self.name.or_else(|| name.map(str::to_owned)),
            restarts: self.restarts.max(restarts),
        }
    }
}

/// Whether a scheduler's name of a job is one.
pub(super) fn is_name(text: &str) -> bool {
    !text.trim().is_empty() && text.len() <= 253
}
