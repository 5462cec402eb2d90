//! The shape of a mixture of experts.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

use super::{ModelConfigError, at_least_one, at_most, in_range};

/// The layers over which the loss that balances experts is computed.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum BalanceOver {
    /// Each layer separately; the losses are then averaged (Fedus et al., 2021).
    #[default]
    EachLayer,
    /// All layers together, as if all their tokens were routed by one layer: an imbalance of expert 3 in one layer
    /// may offset that of expert 3 in another. transformers computes the loss of Qwen3-MoE and Mixtral this way
    /// (`load_balancing_loss_func`).
    AllLayers,
}

/// `[model.moe]`: the shape of the feed-forward layer [`MOE`](super::MOE), and the options of its router. Defaults
/// are those of Qwen3-MoE's models; a missing size is 0, which is invalid.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct MoeConfig {
    /// Number of experts per layer.
    pub experts: usize,
    /// Number of experts that process each token: those that the router finds most probable.
    pub experts_per_token: usize,
    /// Width inside an expert; `moe_intermediate_size` in transformers.
    pub expert_d_ff: usize,
    /// Width inside the shared expert, which processes every token (DeepSeekMoE, Dai et al., 2024). Not set
    /// means no shared expert.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared_expert_d_ff: Option<usize>,
    /// If true, the probabilities of a token's experts are divided by their sum.
    pub norm_topk_prob: bool,
    /// Weight of the loss that balances the experts; 0 for none. See [`Moe`](crate::layers::Moe).
    pub router_aux_loss_coef: f64,
    /// The layers over which that loss balances the experts. By default, the setting of the weights that a run starts
    /// from, or else each layer separately.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_aux_loss_over: Option<BalanceOver>,
    /// If true, experts have a bias that balances them without a loss (Wang et al., 2024; DeepSeek-V3). See
    /// [`Moe`](crate::layers::Moe).
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub expert_bias: bool,
    /// Blocks, counted from 0, whose feed-forward layer is a dense SwiGLU of width `d_ff`.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub dense_layers: Vec<usize>,
}

impl Default for MoeConfig {
    fn default() -> Self {
        MoeConfig {
            experts: 0,
            experts_per_token: 0,
            expert_d_ff: 0,
            shared_expert_d_ff: None,
            norm_topk_prob: true,
            router_aux_loss_coef: 0.001,
            router_aux_loss_over: None,
            expert_bias: false,
            dense_layers: Vec::new(),
        }
    }
}

impl MoeConfig {
    /// Returns whether block `index` has experts.
    pub fn has_experts(&self, index: usize) -> bool {
        !self.dense_layers.contains(&index)
    }

    /// Returns the number of blocks with experts among the first `layers` blocks.
    pub fn layers_with_experts(&self, layers: usize) -> usize {
        (0..layers).filter(|index| self.has_experts(*index)).count()
    }

    /// Checks that these experts are valid in a model of `layers` blocks.
    pub(super) fn validate(&self, layers: usize) -> Result<(), ModelConfigError> {
        let sizes = [
            ("moe.experts", self.experts, MAX_EXPERTS),
            ("moe.experts_per_token", self.experts_per_token, self.experts),
            ("moe.expert_d_ff", self.expert_d_ff, super::MAX_SIZE),
        ];
        let shared = self.shared_expert_d_ff.map(|width| ("moe.shared_expert_d_ff", width, super::MAX_SIZE));
        for (key, value, most) in sizes.into_iter().chain(shared) {
            at_least_one(key, value)?;
            at_most(key, value, most)?;
        }
        for &index in &self.dense_layers {
            at_most("moe.dense_layers", index, layers.saturating_sub(1))?;
        }
        let weight = self.router_aux_loss_coef;
        in_range("moe.router_aux_loss_coef", weight, weight >= 0.0, "zero or more, and finite")
    }
}

/// Maximum number of experts of a layer.
const MAX_EXPERTS: usize = 65_536;
