//! A rank's numbers with the names they came under, and whether they fit together.

use super::error::EnvError;
use super::job::Job;
use super::role::{Master, RankEnv, Source};
use super::vars::{DEFAULT_PORT, Vars, is_loopback};

/// A number and the variable or flag that says so.
pub(super) type Number = (&'static str, usize);

/// What a launcher says of this start of its ranks.
pub(super) struct Start {
    /// Its name for them, the same on every rank.
    pub(super) name: Option<String>,
    /// How often it has started them again.
    pub(super) restarts: u64,
}

/// Numbers of a rank as its launcher gave them.
pub(super) struct Ranks {
    pub(super) rank: Number,
    pub(super) world_size: Number,
    pub(super) local_rank: Number,
    pub(super) local_world_size: Number,
}

impl Ranks {
    /// Fails unless the numbers can all be true.
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

    /// The node if ranks are dealt out node by node; `None` if they are not.
    pub(super) fn node_by_block(&self) -> Option<usize> {
        let size = self.local_world_size.1.max(1);
        (self.rank.1 % size == self.local_rank.1).then_some(self.rank.1 / size)
    }

    /// Whether all ranks of the job are on this node.
    pub(super) fn one_node(&self) -> bool {
        self.local_world_size.1 == self.world_size.1
    }

    /// The place of this rank.
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

/// Name of a start that has none; torchrun's.
const NO_NAME: &str = "none";

/// Fails unless a rank is below the size it is counted in.
pub(super) fn below(index: Number, size: Number, why: &str) -> Result<(), EnvError> {
    if index.1 < size.1 {
        return Ok(());
    }
    let problem = format!("{why}, so {} must be below {}", index.0, size.0);
    Err(EnvError::contradiction(&[index, size], problem))
}

/// Where ranks meet that may be on several machines: `MASTER_ADDR:MASTER_PORT`, or on one machine
/// the loopback address; `port` where no port is named.
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

/// Whether the ranks surely share a machine, going by where they meet.
pub(super) fn meets_on_loopback(vars: &Vars) -> Result<bool, EnvError> {
    Ok(vars.host(&["MASTER_ADDR"])?.is_none_or(|host| is_loopback(&host)))
}
