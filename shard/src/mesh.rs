//! Strategies, and the arrangement of ranks for them.

use std::fmt;
use std::str::FromStr;

use schemars::JsonSchema;
use serde::de::{self, Deserializer};
use serde::{Deserialize, Serialize, Serializer};

/// How parameters, gradients and optimizer state are distributed over ranks. Names are in capitals, as in
/// `FULL_SHARD`; parsing ignores case and accepts hyphens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, JsonSchema)]
#[schemars(rename_all = "SCREAMING_SNAKE_CASE")]
pub enum Strategy {
    /// Shard everything over all ranks; free weights after their forward (ZeRO-3).
    #[default]
    FullShard,
    /// Shard everything between steps; keep weights gathered from forward to backward (ZeRO-2).
    ShardGradOp,
    /// Replicate everything; all-reduce gradients (DDP).
    NoShard,
    /// `FULL_SHARD` inside a group of ranks, replicated across groups (HSDP).
    HybridShard,
    /// `SHARD_GRAD_OP` inside a group of ranks, replicated across groups.
    HybridShardGradOp,
}

impl Strategy {
    /// Every strategy, in the order in which tables list them.
    pub const ALL: [Strategy; 5] = [
        Strategy::FullShard,
        Strategy::ShardGradOp,
        Strategy::NoShard,
        Strategy::HybridShard,
        Strategy::HybridShardGradOp,
    ];

    /// The names of the strategies, in the order of [`Strategy::ALL`].
    const NAMES: [&str; 5] =
        ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP"];

    /// Returns whether the strategy has a separate replica axis.
    pub fn is_hybrid(self) -> bool {
        matches!(self, Strategy::HybridShard | Strategy::HybridShardGradOp)
    }

    /// Returns whether a block's weights are freed after its forward by default.
    pub(crate) fn reshards_after_forward(self) -> bool {
        matches!(self, Strategy::FullShard | Strategy::HybridShard)
    }
}

impl fmt::Display for Strategy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(Strategy::NAMES[*self as usize])
    }
}

/// The error for a string that names no strategy.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("use one of {}", Strategy::NAMES.join(", "))]
pub struct UnknownStrategy;

impl FromStr for Strategy {
    type Err = UnknownStrategy;

    fn from_str(text: &str) -> Result<Self, UnknownStrategy> {
        let name = text.replace('-', "_").to_ascii_uppercase();
        let index = Strategy::NAMES.iter().position(|known| *known == name);
        index.map(|index| Strategy::ALL[index]).ok_or(UnknownStrategy)
    }
}

impl Serialize for Strategy {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

impl<'de> Deserialize<'de> for Strategy {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        let text = String::deserialize(deserializer)?;
        text.parse().map_err(|_| de::Error::unknown_variant(&text, &Strategy::NAMES))
    }
}

/// The reason why a mesh is invalid.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum MeshError {
    /// There are no ranks.
    #[error("the number of ranks is 0: start at least 1")]
    Empty,
    /// A hybrid strategy without the size of its groups.
    #[error(
        "{strategy} needs shard.shard_size, the number of ranks that share one copy of the model (here: a \
         divisor of {world_size})"
    )]
    MissingShardSize {
        /// The strategy.
        strategy: Strategy,
        /// Total number of ranks.
        world_size: usize,
    },
    /// The group size does not divide the number of ranks.
    #[error(
        "shard.shard_size = {shard_size} does not divide the {world_size} ranks: {world_size} / \
         {shard_size} leaves {}; use a divisor of {world_size}",
        world_size % (*shard_size).max(1)
    )]
    Indivisible {
        /// Number of ranks per shard group.
        shard_size: usize,
        /// Total number of ranks.
        world_size: usize,
    },
    /// The group size contradicts the strategy.
    #[error(
        "shard.shard_size = {shard_size} contradicts {strategy}, which always uses {expected} here: leave \
         shard.shard_size out, or use HYBRID_SHARD"
    )]
    Contradiction {
        /// The strategy.
        strategy: Strategy,
        /// Requested size.
        shard_size: usize,
        /// The only size the strategy allows.
        expected: usize,
    },
    /// Machines cannot be the groups of a hybrid strategy, because they have different numbers of ranks.
    #[error(
        "{strategy} takes one group of shards per machine, but the machines have different numbers of \
         ranks ({}): start as many ranks on each, or set shard.shard_size to a divisor of {}",
        list_machines(nodes),
        nodes.len()
    )]
    UnevenNodes {
        /// The strategy.
        strategy: Strategy,
        /// Machine of each rank.
        nodes: Vec<usize>,
    },
    /// Machines cannot be the groups of a hybrid strategy, because the ranks of a machine are not consecutive.
    #[error(
        "{strategy} takes one group of shards per machine, but the ranks of a machine are not consecutive \
         ({}): number the ranks machine by machine, or set shard.shard_size to a divisor of {}",
        list_machines(nodes),
        nodes.len()
    )]
    InterleavedNodes {
        /// The strategy.
        strategy: Strategy,
        /// Machine of each rank.
        nodes: Vec<usize>,
    },
}

/// Lists machines and their ranks, such as `machine 0: ranks 0-3; machine 1: ranks 4-5, 7`.
fn list_machines(nodes: &[usize]) -> String {
    let machines = nodes.iter().max().map_or(0, |last| last + 1);
    let parts: Vec<_> = (0..machines)
        .map(|machine| {
            let of_machine = |rank: &usize| nodes[*rank] == machine;
            let ranks: Vec<_> = (0..nodes.len()).filter(of_machine).collect();
            let runs: Vec<_> = ranks
                .chunk_by(|a, b| a + 1 == *b)
                .map(|run| match run {
                    [first, .., last] => format!("{first}-{last}"),
                    run => run.iter().map(usize::to_string).collect(),
                })
                .collect();
            let word = if ranks.len() == 1 { "rank" } else { "ranks" };
            format!("machine {machine}: {word} {}", runs.join(", "))
        })
        .collect();
    parts.join("; ")
}

/// Ranks arranged as a matrix, `arange(world).view(replicate, shard)`. The ranks of one row hold the shards of one
/// copy of the model; the ranks of one column hold the same shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mesh {
    replicate: usize,
    shard: usize,
}

impl Mesh {
    /// Arranges `world_size` ranks for `strategy`. `shard_size` is the length of a row and needed only by the
    /// hybrid strategies.
    pub fn new(strategy: Strategy, world_size: usize, shard_size: Option<usize>) -> Result<Self, MeshError> {
        if world_size == 0 {
            return Err(MeshError::Empty);
        }
        let shard = match (strategy.is_hybrid(), shard_size) {
            (true, None) => return Err(MeshError::MissingShardSize { strategy, world_size }),
            (true, Some(shard_size)) => {
                if shard_size == 0 || !world_size.is_multiple_of(shard_size) {
                    return Err(MeshError::Indivisible { shard_size, world_size });
                }
                shard_size
            }
            (false, given) => {
                let expected = if strategy == Strategy::NoShard { 1 } else { world_size };
                if let Some(shard_size) = given.filter(|size| *size != expected) {
                    return Err(MeshError::Contradiction { strategy, shard_size, expected });
                }
                expected
            }
        };
        Ok(Mesh { replicate: world_size / shard, shard })
    }

    /// Returns the size of a shard group if every machine is one group, which keeps gathers inside machines: the
    /// number of ranks per machine. `nodes` contains the machine of each rank, as numbered by
    /// [`Communicator::nodes`](kiln_collectives::Communicator::nodes).
    ///
    /// # Errors
    ///
    /// If machines have different numbers of ranks, or the ranks of a machine are not consecutive.
    pub fn shard_size_of_nodes(strategy: Strategy, nodes: &[usize]) -> Result<usize, MeshError> {
        let size = nodes.iter().filter(|node| **node == nodes[0]).count();
        let machines = nodes.iter().max().map_or(0, |last| last + 1);
        if (0..machines).any(|node| nodes.iter().filter(|other| **other == node).count() != size) {
            return Err(MeshError::UnevenNodes { strategy, nodes: nodes.to_vec() });
        }
        if nodes.chunks(size.max(1)).any(|group| group.iter().any(|node| *node != group[0])) {
            return Err(MeshError::InterleavedNodes { strategy, nodes: nodes.to_vec() });
        }
        if size == 0 { Err(MeshError::Empty) } else { Ok(size) }
    }

    /// Returns the total number of ranks.
    pub fn world_size(&self) -> usize {
        self.replicate * self.shard
    }

    /// Returns the number of ranks that share one copy of the model.
    pub fn shard_size(&self) -> usize {
        self.shard
    }

    /// Returns the number of copies of the model.
    pub fn replicate_size(&self) -> usize {
        self.replicate
    }

    /// Returns the index of the copy of the model that `rank` belongs to.
    pub fn replicate_index(&self, rank: usize) -> usize {
        rank / self.shard
    }

    /// Returns the index of the shard that `rank` holds.
    pub fn shard_index(&self, rank: usize) -> usize {
        rank % self.shard
    }
}

impl fmt::Display for Mesh {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "replicate {} x shard {}", self.replicate, self.shard)
    }
}
