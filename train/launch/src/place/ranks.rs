//! A rank's numbers with the names of their variables, and checks of their consistency.

use super::error::EnvError;
use super::job::Job;
use super::role::{Master, RankEnv, Source};
use super::vars::{DEFAULT_PORT, Vars, is_loopback};

/// A number and the variable or flag that contains it.
pub(super) type Number = (&'static str, usize);

/// A launcher's information about this start of its ranks.
pub(super) struct Start {
    /// Name of this start, the same on every rank.
    pub(super) name: Option<String>,
    /// Number of restarts by the launcher.
    pub(super) restarts: u64,
}

/// Numbers of a rank, as set by its launcher.
pub(super) struct Ranks {
    pub(super) rank: Number,
    pub(super) world_size: Number,
    pub(super) local_rank: Number,
    pub(super) local_world_size: Number,
}

impl Ranks {
    /// Fails if the numbers contradict each other.
    pub(super) fn check(&self) -> Result<(), EnvError> {
        below(self.rank, self.world_size, "ranks are counted from 0")?;
        below(self.local_rank, self.local_world_size, "local ranks are counted from 0")?;
        if self.local_world_size.1 > self.world_size.1 {
            return Err(EnvError::contradiction(
                &[self.local_world_size, self.world_size],
                "a node has no more ranks than the job",
            ));
        }
        if self.local_rank.1 > self.rank.1 {
            return Err(EnvError::contradiction(
                &[self.local_rank, self.rank],
                "a rank is at least its local rank",
            ));
        }
        Ok(())
    }

    /// Returns the node if ranks are distributed node by node, `None` otherwise.
    pub(super) fn node_by_block(&self) -> Option<usize> {
        let size = self.local_world_size.1.max(1);
        (self.rank.1 % size == self.local_rank.1).then_some(self.rank.1 / size)
    }

    /// Returns whether all ranks of the job are on this node.
    pub(super) fn one_node(&self) -> bool {
        self.local_world_size.1 == self.world_size.1
    }

    /// Returns the place of this rank.
    pub(super) fn place(
        &self,
        source: Source,
        node_rank: usize,
        node: Option<String>,
        master: Master,
        start: Start,
        vars: &Vars,
    ) -> Result<RankEnv, EnvError> {
        let launched = start.name.as_deref().filter(|name| *name != NO_NAME);
        Ok(RankEnv {
            source,
            rank: self.rank.1,
            world_size: self.world_size.1,
            local_rank: self.local_rank.1,
            local_world_size: self.local_world_size.1,
            node_rank,
            node: node.unwrap_or_else(|| format!("node{node_rank}")),
            master,
            job: Job::of_scheduler(vars).launched(launched, start.restarts),
            meeting: start.name.unwrap_or_else(|| NO_NAME.to_owned()),
            secret: vars.secret()?,
        })
    }
}

/// torchrun's name of a start without a name.
const NO_NAME: &str = "none";

/// Fails unless an index is less than its size.
pub(super) fn below(index: Number, size: Number, why: &str) -> Result<(), EnvError> {
    if index.1 < size.1 {
        return Ok(());
    }
    let problem = format!("{why}, so {} must be below {}", index.0, size.0);
    Err(EnvError::contradiction(&[index, size], problem))
}

/// Returns the address where the ranks meet: `MASTER_ADDR:MASTER_PORT` if they may be on several machines, or
/// on one machine the loopback address; `port` if no port is set.
pub(super) fn master(vars: &Vars, one_node: bool, port: Option<u16>) -> Result<Master, EnvError> {
    let host = match vars.host(&["MASTER_ADDR"])? {
        Some(host) => host,
        None if one_node => "127.0.0.1".to_owned(),
        None => {
            return Err(EnvError::missing(
                "MASTER_ADDR",
                "the ranks are on several machines; set it to the host name or address of the \
                 machine of rank 0, the same for all ranks",
            ));
        }
    };
    let port = vars.port(&["MASTER_PORT"])?.or(port).unwrap_or(DEFAULT_PORT);
    Ok(Master { host, port, shared_port: false })
}

/// Returns whether the ranks certainly share a machine, judging by the address where they meet.
pub(super) fn meets_on_loopback(vars: &Vars) -> Result<bool, EnvError> {
    Ok(vars.host(&["MASTER_ADDR"])?.is_none_or(|host| is_loopback(&host)))
}
