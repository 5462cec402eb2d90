//! Checks of the process that runs a job: it must be the whole job, or know which rank of the job it is.

use std::sync::Arc;

use super::RunOptions;
use crate::error::{Result, TrainError};
use crate::process::{self, launcher};
use kiln_launch::place::{self, Flags, Job, Role};

impl RunOptions {
    /// Returns options for a process that may be one of several: calls [`process::start`], and reads the place
    /// of this process from its environment, as `kiln train` does.
    ///
    /// # Errors
    ///
    /// If environment variables contradict each other, if `KILN_LOG` is not a level, or if this process was
    /// started once per node instead of once per rank.
    pub fn from_environment() -> Result<RunOptions> {
        let stop = process::start().map_err(|error| TrainError::usage(error.to_string()))?;
        let (place, job) = match place::find_here(&Flags::default())? {
            Role::Alone(job) => (None, job),
            Role::Rank(place) => (Some(place), Job::default()),
            Role::Node(node) if node.nodes == 1 => (None, node.job),
            Role::Node(node) => {
                return Err(TrainError::usage(format!(
                    "{} has started one process per node, and this program needs one per rank: start as \
                     many as each node has ranks, for example with srun --ntasks-per-node or torchrun \
                     --nproc-per-node",
                    node.source
                )));
            }
        };
        Ok(RunOptions { place, job, stop, ..RunOptions::default() })
    }
}

/// Fails if this process is one rank of several and `options` do not say which: every rank would start the
/// whole job. First warns about setup that the process lacks.
pub(super) fn check(options: &RunOptions) -> Result<()> {
    // A caller that keeps a clone of the stop flag sets the flag itself.
    process::tell_what_is_missing(Arc::strong_count(&options.stop) > 1);
    // Checked before any work is done.
    launcher::grace()?;
    if options.place.is_some() || options.alone {
        return Ok(());
    }
    let (who, count, what) = match place::find_here(&Flags::default())? {
        Role::Rank(place) if place.world_size > 1 => (place.source, place.world_size, "ranks"),
        Role::Node(node) if node.nodes > 1 => (node.source, node.nodes, "nodes"),
        _ => return Ok(()),
    };
    Err(TrainError::usage(format!(
        "{who} has started this process as one of {count} {what}, and each of them would start the whole \
         job: set RunOptions::place, as RunOptions::from_environment does, or RunOptions::alone if this \
         process is to train by itself"
    )))
}
