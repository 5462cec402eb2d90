//! The user's decisions about sharding, with defaults filled in.

use std::fmt;
use std::num::NonZeroUsize;
use std::time::Duration;

use kiln_collectives::DType;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use crate::mesh::Strategy;

/// The modules whose gathered weights are freed after forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Reshard {
    /// The strategy decides, except for modules whose own options keep their weights gathered.
    #[default]
    Default,
    /// Weights of every module are freed right after its forward.
    Always,
    /// Weights of every module stay until its backward.
    Never,
}

/// How the gradients of a step's micro-batches are summed. The two variants round differently.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Accumulate {
    /// As shards: every micro-batch is reduced, and a rank adds its shard to the sum (FSDP2's default).
    #[default]
    Sharded,
    /// As whole gradients on every rank, which are reduced once per step (FSDP2's
    /// `set_requires_gradient_sync(False)`). This sends fewer bytes, but each rank keeps 4 bytes per parameter from
    /// one micro-batch to the next.
    Unsharded,
}

/// Formats the value as in a configuration.
impl fmt::Display for Accumulate {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Accumulate::Sharded => "sharded",
            Accumulate::Unsharded => "unsharded",
        })
    }
}

impl Accumulate {
    /// Returns the default for `strategy`: `Sharded`, except for `NO_SHARD`, where a shard is the whole gradient anyway.
    pub fn from_strategy(strategy: Strategy) -> Self {
        match strategy {
            Strategy::NoShard => Accumulate::Unsharded,
            _ => Accumulate::Sharded,
        }
    }
}

/// Which activations are recomputed in backward instead of being saved in forward. All values give the same bits.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: all activations are saved.
    #[default]
    None,
    /// Results of operations that are cheap to repeat: norms, activation functions, rotary embeddings of normalised
    /// heads. Results of matrix products and of attention are saved (as in torchtitan's selective activation
    /// checkpointing).
    Selective,
    /// All: a block saves only its input and runs again in backward (Chen et al., 2016).
    Block,
    /// Blocks 0, N, 2 N and so on run again, as under `Block`; the others save their activations.
    Every(NonZeroUsize),
}

/// Formats the value as in a configuration.
impl fmt::Display for Recompute {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Recompute::None => f.pad("none"),
            Recompute::Selective => f.pad("selective"),
            Recompute::Block => f.pad("block"),
            Recompute::Every(blocks) => f.pad(&format!("{{every={blocks}}}")),
        }
    }
}

impl Recompute {
    /// Returns true if the block with this index runs again in backward.
    pub fn repeats(self, block: usize) -> bool {
        match self {
            Recompute::None | Recompute::Selective => false,
            Recompute::Block => true,
            Recompute::Every(blocks) => block.is_multiple_of(blocks.get()),
        }
    }
}

/// The resolved sharding policy of a run; equal on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// The sharding strategy.
    pub strategy: Strategy,
    /// The modules whose weights are freed after forward.
    pub reshard: Reshard,
    /// The parts of a model that are computed again in backward.
    pub recompute: Recompute,
    /// How the gradients of micro-batches are summed.
    pub accumulate: Accumulate,
    /// Dtype of gathered weights and of computation. Masters and the optimizer's slots are always f32.
    pub compute_dtype: DType,
    /// Dtype in which gradients are summed over ranks. Accumulation is always f32.
    pub reduce_dtype: DType,
    /// `true` if master weights and the optimizer's slots are in host memory although a GPU computes
    /// (ZeRO-Offload, Ren et al., 2021). The GPU keeps a copy of this rank's weights in the compute dtype.
    /// Reduced gradients move to the host during backward, and the host performs the update. No effect if the
    /// host computes.
    pub offload: bool,
    /// Maximum time to wait for the other ranks in one collective.
    pub timeout: Duration,
    /// `true` if a single rank calls its communicator to gather and reduce, as one of several ranks would, if the
    /// strategy shards. A single rank has nothing to gather, so this only costs time. It is for profiling, and for
    /// tests of the order of gathers, reductions and computation. No effect with several ranks.
    pub communicate_alone: bool,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            strategy: Strategy::FullShard,
            reshard: Reshard::Default,
            recompute: Recompute::None,
            accumulate: Accumulate::Sharded,
            compute_dtype: DType::F32,
            reduce_dtype: DType::F32,
            offload: false,
            timeout: Duration::from_secs(600),
            communicate_alone: false,
        }
    }
}

impl Policy {
    /// Returns `true` if `world_size` is one and the single rank uses collectives nevertheless.
    pub fn shards_alone(&self, world_size: usize) -> bool {
        self.communicate_alone && world_size == 1 && self.strategy != Strategy::NoShard
    }

    /// Returns true if a backward reduces gradients: every backward, or only the one of the `last` micro-batch of a
    /// step. A rank that does not `communicate` adds the gradients of all micro-batches in place.
    pub fn reduces(&self, last: bool, communicates: bool) -> bool {
        last || (communicates && self.accumulate == Accumulate::Sharded)
    }

    /// Returns `true` if a module is resharded after its forward. `by_default` is the module's own
    /// [`ShardOptions::reshard_after_forward`](crate::ShardOptions::reshard_after_forward).
    pub fn reshards_after_forward(&self, by_default: bool) -> bool {
        match self.reshard {
            Reshard::Always => true,
            Reshard::Never => false,
            Reshard::Default => self.strategy.reshards_after_forward() && by_default,
        }
    }

    /// Returns `true` if a rank keeps its shard in the compute dtype from step to step, in addition to the f32 master
    /// weights. This happens on a GPU in two cases: if master weights are offloaded, or if the rank `holds_copy`
    /// (gathers from no other rank) and the whole weights stay from forward to backward, so that the shard in the
    /// compute dtype serves as the whole weights. Otherwise, master weights are cast for every gather and the result
    /// is freed afterwards, because keeping it would take 2 bytes per element. `by_default` is as in
    /// [`reshards_after_forward`](Policy::reshards_after_forward).
    pub fn keeps_compute_shard(&self, on_host: bool, holds_copy: bool, by_default: bool) -> bool {
        let stays = self.compute_dtype != DType::F32 && !self.reshards_after_forward(by_default);
        !on_host && (self.offload || (holds_copy && stays))
    }
}
