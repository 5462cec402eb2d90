//! What the user decides about sharding, resolved.

use std::time::Duration;

use kiln_collectives::DType;
use serde::{Deserialize, Serialize};

use crate::mesh::Strategy;

/// When gathered weights are freed after forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Reshard {
    /// As the strategy says; outer parts that backward needs at once are kept.
    #[default]
    Default,
    /// Every part, right after its forward.
    Always,
    /// None: weights stay until their backward.
    Never,
}

/// What is computed again in backward instead of kept from forward.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Recompute {
    /// Nothing: activations are kept.
    #[default]
    None,
    /// A block keeps its input only and runs again in backward (Chen et al., 2016).
    Block,
}

/// The resolved sharding policy of a run; equal on every rank.
#[derive(Clone, Debug, PartialEq)]
pub struct Policy {
    /// How state is spread.
    pub strategy: Strategy,
    /// When weights are freed after forward.
    pub reshard: Reshard,
    /// What runs again in backward.
    pub recompute: Recompute,
    /// Dtype of gathered weights and of computation. Masters and moments are always f32.
    pub compute_dtype: DType,
    /// Dtype in which gradients are summed over ranks. Accumulation is always f32.
    pub reduce_dtype: DType,
    /// How long to wait for the other ranks in one collective before giving up.
    pub timeout: Duration,
}

impl Default for Policy {
    fn default() -> Self {
        Policy {
            strategy: Strategy::FullShard,
            reshard: Reshard::Default,
            recompute: Recompute::None,
            compute_dtype: DType::F32,
            reduce_dtype: DType::F32,
            timeout: Duration::from_secs(600),
        }
    }
}

impl Policy {
    /// Whether a part is freed after its forward. `keep` says that backward needs the part right
    /// away (or that forward needs it again).
    pub(crate) fn reshards_after_forward(&self, keep: bool) -> bool {
        match self.reshard {
            Reshard::Always => true,
            Reshard::Never => false,
            Reshard::Default => self.strategy.reshards_after_forward() && !keep,
        }
    }
}
