//! The ranks of a command: threads of this process, or processes including this one.

use std::sync::Arc;

use kiln_collectives::Communicator;
use kiln_collectives::tcp::Arrivals;
use kiln_shard::ranks::{run_rank, run_ranks};

use super::ranks::{World, agree, join};
use crate::error::Result;
use kiln_config::device::{ResolvedDevice, ranks_sharing_cores, threads_per_rank};
use kiln_config::{Backend, Config};
use kiln_launch::place::RankEnv;

/// The ranks of a command.
pub enum Ranks<'a> {
    /// Threads of this process.
    Threads,
    /// Processes; this one is connected to the others.
    Processes(World, &'a RankEnv),
}

impl<'a> Ranks<'a> {
    /// Connects to the other processes, if ranks are processes, and fails as [`join`] does.
    pub fn join(config: &Config, place: Option<&'a RankEnv>) -> Result<Self> {
        Ok(match place {
            None => Ranks::Threads,
            Some(place) => Ranks::Processes(join(place, &config.comm, None, &Arrivals::default())?, place),
        })
    }

    /// Like [`Ranks::join`], but also fails unless all processes have the same `told` and devices that fit together.
    /// `told` describes how a process was started; `device` is that of this process.
    pub fn meet(
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

    /// Returns whether this process has rank 0.
    pub fn has_first(&self) -> bool {
        match self {
            Ranks::Threads => true,
            Ranks::Processes(_, place) => place.rank == 0,
        }
    }

    /// Runs `body` on every rank, and returns its result on the first rank of this process.
    ///
    /// # Errors
    ///
    /// Errors of `body`, or if the ranks lose contact.
    pub fn run<T: Send>(
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
                // A failed rank does not wait for the others.
                Ok(run_rank(met.communicator(), threads, body).inspect_err(|_| met.give_up())?)
            }
        }
    }
}
