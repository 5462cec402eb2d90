//! The shape of a decoder and its presets.

mod lora;
mod moe;

pub use lora::LoraConfig;
pub use moe::{BalanceOver, MoeConfig};

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Biases of the projections of attention.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum AttentionBias {
    /// None, as in Llama.
    #[default]
    None,
    /// Query, key and value, as in Qwen2.
    Qkv,
    /// Query, key, value and output.
    All,
}

/// How the rotary frequencies are stretched for contexts longer than the original training context.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(tag = "kind", rename_all = "snake_case", deny_unknown_fields)]
pub enum RopeScaling {
    /// Divides all frequencies by `factor` (Chen et al., 2023).
    Linear {
        /// At least 1.
        factor: f64,
    },
    /// Divides low frequencies by `factor`, keeps high ones, and blends those in between (Llama 3.1).
    Llama3 {
        /// At least 1.
        factor: f64,
        /// Frequencies of wavelengths above `original_context / low_freq_factor` are divided by `factor`.
        low_freq_factor: f64,
        /// Frequencies of wavelengths below `original_context / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context length of the original training, in tokens.
        original_context: usize,
    },
}

impl RopeScaling {
    /// Checks that the parameters of the stretching are in range.
    fn validate(self) -> Result<(), ModelConfigError> {
        let factor_in_range =
            |factor| in_range("rope_scaling.factor", factor, factor >= 1.0, "at least 1, and finite");
        match self {
            RopeScaling::Linear { factor } => factor_in_range(factor),
            RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context,
            } => {
                factor_in_range(factor)?;
                in_range("rope_scaling.low_freq_factor", low, low > 0.0, "positive and finite")?;
                let range = "above rope_scaling.low_freq_factor, and finite";
                in_range("rope_scaling.high_freq_factor", high, high > low, range)?;
                at_least_one("rope_scaling.original_context", original_context)
            }
        }
    }
}

/// Fails unless `value` is finite and `valid`.
fn in_range(key: &'static str, value: f64, valid: bool, range: &'static str) -> Result<(), ModelConfigError> {
    let valid = valid && value.is_finite();
    if valid { Ok(()) } else { Err(ModelConfigError::OutOfRange { key, value, range }) }
}

/// Fails if a size is 0.
fn at_least_one(key: &'static str, value: usize) -> Result<(), ModelConfigError> {
    if value > 0 { Ok(()) } else { Err(ModelConfigError::Zero { key }) }
}

/// Fails if a size is greater than `most`.
fn at_most(key: &'static str, value: usize, most: usize) -> Result<(), ModelConfigError> {
    if value <= most { Ok(()) } else { Err(ModelConfigError::TooLarge { key, value, most }) }
}

/// The shape of a Llama-style decoder.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ModelConfig {
    /// Number of token ids.
    pub vocab_size: usize,
    /// Width of the residual stream.
    pub d_model: usize,
    /// Number of decoder blocks.
    pub layers: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads (grouped-query attention, Ainslie et al., 2023); must divide `heads`.
    pub kv_heads: usize,
    /// Width of one head; `d_model / heads` if not set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<usize>,
    /// Width inside the feed-forward layer.
    pub d_ff: usize,
    /// If true, the head reuses the embedding matrix.
    pub tie_embeddings: bool,
    /// Name of the block. Not set means Llama's block: attention, then a feed-forward layer. Otherwise
    /// [`PARALLEL_RESIDUAL`], or a block added by the program; see [`Layers::block`](crate::layers::Layers::block).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub block: Option<String>,
    /// Name of a layer of the head that only objectives run; see
    /// [`Layers::head_layer`](crate::layers::Layers::head_layer).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub head_layer: Option<String>,
    /// Name of the attention layer.
    #[serde(default = "default_attention", skip_serializing_if = "is_default_attention")]
    pub attention: String,
    /// Name of the feed-forward layer.
    #[serde(default = "default_feed_forward")]
    pub feed_forward: String,
    /// The experts of the feed-forward layer [`MOE`]: required for this layer, and an error for any other layer.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub moe: Option<MoeConfig>,
    /// Settings of layers added by the program; see [`LayerInit::extra`](crate::layers::LayerInit::extra).
    #[serde(default, skip_serializing_if = "serde_json::Map::is_empty")]
    pub extra: serde_json::Map<String, serde_json::Value>,
    /// Maximum number of positions that a position attends to, including itself: the position and those right before
    /// it (sliding-window attention, Beltagy et al., 2020). Not set means full attention to all earlier positions.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window: Option<usize>,
    /// Selects which blocks have the window, one letter per block: `w` for the window, `f` for full attention. The
    /// pattern repeats over the blocks, as in `wf` (Gemma 2) and `wwwwwf` (Gemma 3). Not set means all blocks
    /// (Mistral).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub window_pattern: Option<String>,
    /// Biases of the projections of attention.
    #[serde(default)]
    pub attention_bias: AttentionBias,
    /// If true, the projections of the feed-forward layer have a bias.
    #[serde(default)]
    pub feed_forward_bias: bool,
    /// Low-rank adapters of the blocks' linear maps.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub lora: Option<LoraConfig>,
    /// If true, queries and keys are normalised per head before they are rotated, as in Qwen3.
    #[serde(default)]
    pub qk_norm: bool,
    /// Bound `c` of the logits, which become `c · tanh(logits / c)` (Gemma 2). Not set means no bound.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub logit_softcap: Option<f64>,
    /// Probability of dropping an element after the embedding, attention and feed-forward.
    #[serde(default)]
    pub dropout: f64,
    /// Base of the rotary frequencies (Su et al., 2021).
    #[serde(default = "default_rope_theta")]
    pub rope_theta: f64,
    /// Stretching of the rotary frequencies.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rope_scaling: Option<RopeScaling>,
    /// Value added to the mean square in RMSNorm.
    #[serde(default = "default_norm_eps")]
    pub norm_eps: f64,
    /// Standard deviation of the initial weights. For the two projections that write to the residual stream,
    /// it is divided by `sqrt(2 * layers)` (GPT-2).
    #[serde(default = "default_init_std")]
    pub init_std: f64,
}

/// The letter of a block with a window in [`ModelConfig::window_pattern`].
const WINDOWED: u8 = b'w';
const FULL: u8 = b'f';

/// The attention layer of Llama, the default.
pub const FULL_ATTENTION: &str = "full";

/// The feed-forward layer of Llama, the default.
pub const SWIGLU: &str = "swiglu";

/// The block of GPT-J and PaLM, whose attention and feed-forward layers read the same input.
pub const PARALLEL_RESIDUAL: &str = "parallel_residual";

/// The mixture-of-experts feed-forward layer.
pub const MOE: &str = "moe";

fn default_attention() -> String {
    FULL_ATTENTION.to_owned()
}

fn is_default_attention(attention: &str) -> bool {
    attention == FULL_ATTENTION
}

fn default_feed_forward() -> String {
    SWIGLU.to_owned()
}

fn default_rope_theta() -> f64 {
    10_000.0
}

fn default_norm_eps() -> f64 {
    1e-5
}

fn default_init_std() -> f64 {
    0.02
}

/// The reason why a [`ModelConfig`] is invalid.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum ModelConfigError {
    /// A size is zero.
    #[error("model.{key} = 0: must be at least 1")]
    Zero {
        /// Key in the `[model]` section.
        key: &'static str,
    },
    /// A size is too large for any model.
    #[error("model.{key} = {value}: must be at most {most}")]
    TooLarge {
        /// Key in the `[model]` section.
        key: &'static str,
        /// The size.
        value: usize,
        /// Largest permitted value.
        most: usize,
    },
    /// One size does not divide another.
    #[error(
        "model.{whole} = {whole_value} is not divisible by model.{part} = {part_value} (remainder {}): change \
         one of the two",
        whole_value % part_value
    )]
    Indivisible {
        /// Key of the size that must be divisible.
        whole: &'static str,
        /// The size that must be divisible.
        whole_value: usize,
        /// Key of the divisor.
        part: &'static str,
        /// The divisor.
        part_value: usize,
    },
    /// The width of a head is odd, so its elements cannot form rotary pairs.
    #[error("{what} = {head_dim} is odd: rotary embeddings turn pairs, so the head width must be even")]
    OddHead {
        /// The keys that determine the width.
        what: &'static str,
        /// Width of one head.
        head_dim: usize,
    },
    /// The window pattern is invalid, or it is set without a window.
    #[error("model.window_pattern = \"{pattern}\": {problem}")]
    WindowPattern {
        /// The pattern.
        pattern: String,
        /// The fault in the pattern.
        problem: &'static str,
    },
    /// A value is outside its range.
    #[error("model.{key} = {value}: must be {range}")]
    OutOfRange {
        /// Key in the `[model]` section.
        key: &'static str,
        /// The offending value.
        value: f64,
        /// Permitted values.
        range: &'static str,
    },
    /// A setting of the adapters is outside its range.
    #[error("lora.{key} = {value}: must be {range}")]
    Lora {
        /// Key in the section `[lora]`.
        key: &'static str,
        /// The offending value.
        value: String,
        /// Permitted values.
        range: &'static str,
    },
    /// The model has experts, but their number and sizes are not set.
    #[error("model.feed_forward = \"moe\" needs the section [model.moe] with the sizes of the experts")]
    NoExperts,
    /// The sizes of experts are set, but the model has a different feed-forward layer.
    #[error("[model.moe] is set, but model.feed_forward is \"{feed_forward}\": set it to \"moe\"")]
    UnusedExperts {
        /// The feed-forward layer.
        feed_forward: String,
    },
}

/// Names of the presets, smallest first.
pub const PRESETS: [&str; 5] = ["10m", "90m", "300m", "1b", "7b"];

/// Maximum number of blocks of a model.
pub const MAX_LAYERS: usize = 4096;

/// Maximum width, vocabulary or number of heads. Products of sizes up to these bounds, such as the number of
/// parameters of a model, fit into a `usize`.
pub const MAX_SIZE: usize = 10_000_000;

impl ModelConfig {
    /// Returns the preset called `name`, or `None`; [`PRESETS`] lists the names.
    pub fn preset(name: &str) -> Option<Self> {
        // vocab, d_model, layers, heads, kv_heads, d_ff, tied
        let (vocab_size, d_model, layers, heads, kv_heads, d_ff, tie_embeddings) = match name {
            "10m" => (4_096, 256, 10, 4, 4, 688, true),
            "90m" => (32_000, 640, 14, 10, 10, 1_728, true),
            "300m" => (32_000, 1_024, 21, 16, 16, 2_816, true),
            "1b" => (32_000, 2_048, 22, 32, 4, 5_632, false),
            "7b" => (32_000, 4_096, 32, 32, 32, 11_008, false),
            _ => return None,
        };
        Some(ModelConfig {
            vocab_size,
            d_model,
            layers,
            heads,
            kv_heads,
            head_dim: None,
            d_ff,
            tie_embeddings,
            block: None,
            head_layer: None,
            attention: default_attention(),
            feed_forward: default_feed_forward(),
            moe: None,
            extra: serde_json::Map::new(),
            lora: None,
            window: None,
            window_pattern: None,
            attention_bias: AttentionBias::default(),
            feed_forward_bias: false,
            qk_norm: false,
            logit_softcap: None,
            dropout: 0.0,
            rope_theta: default_rope_theta(),
            rope_scaling: None,
            norm_eps: default_norm_eps(),
            init_std: default_init_std(),
        })
    }

    /// Returns the width of one head.
    pub fn head_dim(&self) -> usize {
        self.head_dim.unwrap_or_else(|| self.d_model / self.heads)
    }

    /// Returns the maximum number of positions that a position attends to in block `index`: the position and those
    /// right before it. `None` for full attention.
    pub fn window_of(&self, index: usize) -> Option<usize> {
        let pattern = self.window_pattern.as_deref().unwrap_or_default().as_bytes();
        let is_full = !pattern.is_empty() && pattern[index % pattern.len()] == FULL;
        self.window.filter(|_| !is_full)
    }

    /// Returns the shortest pattern in which block `index` has a window if `windowed[index]`; `None` if all blocks
    /// have one.
    pub fn window_pattern_of(windowed: &[bool]) -> Option<String> {
        let repeats = |length: &usize| windowed.iter().zip(&windowed[*length..]).all(|(a, b)| a == b);
        let shortest = (1..windowed.len()).find(repeats).unwrap_or(windowed.len());
        let letter = |windowed: &bool| char::from(if *windowed { WINDOWED } else { FULL });
        let pattern = windowed[..shortest].iter().map(letter).collect::<String>();
        pattern.as_bytes().contains(&FULL).then_some(pattern)
    }

    /// Returns the standard deviation of the projections that write to the residual stream.
    pub fn residual_std(&self) -> f64 {
        self.init_std / (2.0 * self.layers as f64).sqrt()
    }

    /// Checks that the configuration describes a valid model.
    pub fn validate(&self) -> Result<(), ModelConfigError> {
        let mut sizes = vec![
            ("vocab_size", self.vocab_size),
            ("d_model", self.d_model),
            ("layers", self.layers),
            ("heads", self.heads),
            ("kv_heads", self.kv_heads),
            ("d_ff", self.d_ff),
        ];
        sizes.extend(self.head_dim.map(|head_dim| ("head_dim", head_dim)));
        for (key, value) in sizes {
            at_least_one(key, value)?;
            at_most(key, value, if key == "layers" { MAX_LAYERS } else { MAX_SIZE })?;
        }
        at_most("heads x head_dim", self.heads.saturating_mul(self.head_dim()), MAX_SIZE)?;
        let mut divisions = vec![("heads", self.heads, "kv_heads", self.kv_heads)];
        if self.head_dim.is_none() {
            divisions.insert(0, ("d_model", self.d_model, "heads", self.heads));
        }
        for (whole, whole_value, part, part_value) in divisions {
            if !whole_value.is_multiple_of(part_value) {
                return Err(ModelConfigError::Indivisible { whole, whole_value, part, part_value });
            }
        }
        if !self.head_dim().is_multiple_of(2) {
            let what = self.head_dim.map_or("model.d_model / model.heads", |_| "model.head_dim");
            return Err(ModelConfigError::OddHead { what, head_dim: self.head_dim() });
        }
        self.validate_window()?;
        self.rope_scaling.map_or(Ok(()), RopeScaling::validate)?;
        match (&self.moe, self.feed_forward == MOE) {
            (Some(moe), true) => moe.validate(self.layers)?,
            (None, true) => return Err(ModelConfigError::NoExperts),
            (Some(_), false) => {
                let feed_forward = self.feed_forward.clone();
                return Err(ModelConfigError::UnusedExperts { feed_forward });
            }
            (None, false) => {}
        }
        if let Some(lora) = &self.lora {
            lora.validate()?;
        }
        let ModelConfig { dropout, rope_theta, norm_eps, init_std, .. } = *self;
        if let Some(cap) = self.logit_softcap {
            in_range("logit_softcap", cap, cap > 0.0, "positive and finite")?;
        }
        in_range("dropout", dropout, (0.0..1.0).contains(&dropout), "in [0, 1)")?;
        in_range("rope_theta", rope_theta, rope_theta > 0.0, "positive and finite")?;
        in_range("norm_eps", norm_eps, norm_eps > 0.0, "positive and finite")?;
        in_range("init_std", init_std, init_std >= 0.0, "zero or more, and finite")
    }

    fn validate_window(&self) -> Result<(), ModelConfigError> {
        if let Some(window) = self.window {
            at_least_one("window", window)?;
            at_most("window", window, MAX_SIZE)?;
        }
        let Some(pattern) = &self.window_pattern else { return Ok(()) };
        let problem = if self.window.is_none() {
            "needs a window: set model.window"
        } else if pattern.bytes().any(|letter| ![WINDOWED, FULL].contains(&letter)) {
            "may only contain w (a block with the window) and f (full attention)"
        } else if !pattern.as_bytes().contains(&WINDOWED) {
            "must contain a w: otherwise no block has the window"
        } else if pattern.len() > self.layers {
            "must have at most one letter per block (model.layers)"
        } else {
            return Ok(());
        };
        Err(ModelConfigError::WindowPattern { pattern: pattern.clone(), problem })
    }
}
