//! The ranks of a command: threads of this process, or processes, of which this is one.

use std::sync::Arc;

use kiln_collectives::Communicator;
use kiln_collectives::tcp::Arrivals;
use kiln_shard::ranks::{run_rank, run_ranks};

use super::ranks::{World, agree, join};
use crate::config::{Backend, Config};
use crate::device::{ResolvedDevice, ranks_sharing_cores, threads_per_rank};
use crate::error::Result;
use crate::place::RankEnv;

/// The ranks of a command.
pub(crate) enum Ranks<'a> {
    /// Threads of this process.
    Threads,
    /// Processes, of which this is one and has met the others.
    Processes(World, &'a RankEnv),
}

impl<'a> Ranks<'a> {
    /// Meets the other processes, if ranks are processes.
    ///
    /// # Errors
    ///
    /// As for [`join`].
    pub(crate) fn join(config: &Config, place: Option<&'a RankEnv>) -> Result<Self> {
        Ok(match place {
            None => Ranks::Threads,
            Some(place) => Ranks::Processes(join(place, &config.comm, None, &Arrivals::default())?, place),
        })
    }

    /// [`Ranks::join`], which makes sure that all were started alike, as `told` says, and that their devices,
    /// of which this process has `device`, go together.
    ///
    /// # Errors
    ///
    /// As for [`join`], and if ranks differ.
    pub(crate) fn meet(
        config: &Config,
        place: Option<&'a RankEnv>,
        told: &str,
        device: &ResolvedDevice,
    ) -> Result<Self> {
        let ranks = Self::join(config, place)?;
        if let Ranks::Processes(met, _) = &ranks {
            ranks.run(config, |world| {
                agree(&*world, told, config.comm.timeout())?;
                match config.device.backend {
                    Backend::Cpu => Ok(()),
                    _ => met.settle_on(device, &config.comm),
                }
            })?;
        } else {
            device.warn_of_idle_gpus();
        }
        Ok(ranks)
    }

    /// Runs `body` on every rank, and returns what it came to on the first rank of this process.
    ///
    /// # Errors
    ///
    /// What `body` returns, or if the ranks lose each other.
    pub(crate) fn run<T: Send>(
        &self,
        config: &Config,
        body: impl Fn(Arc<dyn Communicator>) -> Result<T> + Sync,
    ) -> Result<T> {
        match self {
            Ranks::Threads => {
                let ranks = config.train.ranks;
                let threads = threads_per_rank(&config.device, ranks);
                Ok(run_ranks(ranks, threads, body)?.swap_remove(0))
            }
            Ranks::Processes(met, place) => {
                let threads = threads_per_rank(&config.device, ranks_sharing_cores(place));
                // As a rank of a run that failed: the others are not waited for.
                Ok(run_rank(met.communicator(), threads, body).inspect_err(|_| met.give_up())?)
            }
        }
    }
}
