//! The section that describes the model.

use kiln_model::{AttentionBias, FeedForwardKind, ModelConfig, RopeScaling};
use serde::{Deserialize, Serialize};

/// `[model]`: a preset, single sizes, or a preset with single sizes changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSection {
    /// One of [`kiln_model::PRESETS`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<String>,
    /// Token ids the model knows; the tokenizer's vocabulary if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<usize>,
    /// Width of the residual stream.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub d_model: Option<usize>,
    /// Number of blocks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub layers: Option<usize>,
    /// Query heads.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub heads: Option<usize>,
    /// Key and value heads; as many as `heads` if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub kv_heads: Option<usize>,
    /// Width of one head; `d_model / heads` if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Width of the feed-forward layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub d_ff: Option<usize>,
    /// Whether the head reuses the embedding; true if left out.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tie_embeddings: Option<bool>,
    /// Kind of feed-forward layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feed_forward: Option<FeedForwardKind>,
    /// Which projections of attention have a bias: `none`, `qkv` or `all`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_bias: Option<AttentionBias>,
    /// Whether the projections of the feed-forward layer have a bias.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub feed_forward_bias: Option<bool>,
    /// Whether queries and keys are normalised per head.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_norm: Option<bool>,
    /// Probability of dropping an element.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dropout: Option<f64>,
    /// Base of the rotary frequencies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_theta: Option<f64>,
    /// Stretching of the rotary frequencies.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Epsilon of RMSNorm.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub norm_eps: Option<f64>,
    /// Standard deviation of the initial weights.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub init_std: Option<f64>,
}

impl ModelSection {
    /// The shape that the section describes, with `vocab_size` where it names none. `Err` names
    /// what is missing or unknown.
    pub fn resolve(&self, vocab_size: Option<usize>) -> Result<ModelConfig, String> {
        let base = match &self.preset {
            None => None,
            Some(name) => Some(ModelConfig::preset(name).ok_or_else(|| {
                format!(
                    "model.preset = \"{name}\" is not known: use one of {}",
                    kiln_model::PRESETS.join(", ")
                )
            })?),
        };
        let size = |key: &str, given: Option<usize>, preset: fn(&ModelConfig) -> usize| {
            given
                .or(base.as_ref().map(preset))
                .ok_or_else(|| format!("model.{key} is missing: set it, or start from a model.preset"))
        };
        let heads = size("heads", self.heads, |m| m.heads)?;
        let defaults = base.clone().or_else(|| ModelConfig::preset("10m"));
        let Some(defaults) = defaults else {
            return Err("the built-in preset 10m is gone".to_owned());
        };
        Ok(ModelConfig {
            vocab_size: self
                .vocab_size
                .or(vocab_size)
                .or(base.as_ref().map(|m| m.vocab_size))
                .ok_or("model.vocab_size is missing: set it, or name prepared data in data.path")?,
            d_model: size("d_model", self.d_model, |m| m.d_model)?,
            layers: size("layers", self.layers, |m| m.layers)?,
            heads,
            kv_heads: self.kv_heads.or(base.as_ref().map(|m| m.kv_heads)).unwrap_or(heads),
            head_dim: self.head_dim.or(base.as_ref().and_then(|m| m.head_dim)),
            d_ff: size("d_ff", self.d_ff, |m| m.d_ff)?,
            tie_embeddings: self.tie_embeddings.unwrap_or(base.as_ref().is_none_or(|m| m.tie_embeddings)),
            feed_forward: self.feed_forward.unwrap_or(defaults.feed_forward),
            attention_bias: self.attention_bias.unwrap_or(defaults.attention_bias),
            feed_forward_bias: self.feed_forward_bias.unwrap_or(defaults.feed_forward_bias),
            qk_norm: self.qk_norm.unwrap_or(defaults.qk_norm),
            dropout: self.dropout.unwrap_or(defaults.dropout),
            rope_theta: self.rope_theta.unwrap_or(defaults.rope_theta),
            rope_scaling: self.rope_scaling.or(defaults.rope_scaling),
            norm_eps: self.norm_eps.unwrap_or(defaults.norm_eps),
            init_std: self.init_std.unwrap_or(defaults.init_std),
        })
    }

    /// The section that describes `model` completely.
    pub fn from_model(model: &ModelConfig) -> Self {
        ModelSection {
            preset: None,
            vocab_size: Some(model.vocab_size),
            d_model: Some(model.d_model),
            layers: Some(model.layers),
            heads: Some(model.heads),
            kv_heads: Some(model.kv_heads),
            head_dim: model.head_dim,
            d_ff: Some(model.d_ff),
            tie_embeddings: Some(model.tie_embeddings),
            feed_forward: Some(model.feed_forward),
            attention_bias: Some(model.attention_bias),
            feed_forward_bias: Some(model.feed_forward_bias),
            qk_norm: Some(model.qk_norm),
            dropout: Some(model.dropout),
            rope_theta: Some(model.rope_theta),
            rope_scaling: model.rope_scaling,
            norm_eps: Some(model.norm_eps),
            init_std: Some(model.init_std),
        }
    }
}
