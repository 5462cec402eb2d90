use kiln_model::{AttentionBias, FULL_ATTENTION, ModelConfig, MoeConfig, RopeScaling};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use toml::{Table, Value};

/// `[model]`: a preset, individual sizes, or a preset with some sizes changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields, default)]
pub struct ModelSection {
    /// A built-in shape, which the other keys modify: `10m`, `90m`, `300m`, `1b` or `7b`.
    pub preset: Option<String>,
    /// Number of token ids that the model knows; by default, the size of the tokenizer's vocabulary.
    pub vocab_size: Option<usize>,
    /// Width of the residual stream.
    pub d_model: Option<usize>,
    /// Number of blocks.
    pub layers: Option<usize>,
    /// Number of query heads.
    pub heads: Option<usize>,
    /// Number of key and value heads; by default, the same as `heads`.
    pub kv_heads: Option<usize>,
    /// Width of one head; `d_model / heads` by default.
    pub head_dim: Option<usize>,
    /// Width of the feed-forward layer.
    pub d_ff: Option<usize>,
    /// Reuse the embedding as the head; true by default.
    pub tie_embeddings: Option<bool>,
    /// Name of the block, if it is not Llama's: `parallel_residual`, or a block that a program adds.
    pub block: Option<String>,
    /// Name of a layer of the head that a program adds, and that only its objective runs, such as an extra head.
    pub head_layer: Option<String>,
    /// Name of the attention layer: `full`, or a layer that a program adds.
    pub attention: Option<String>,
    /// Name of the feed-forward layer: `swiglu`, `geglu`, `squared_relu`, `moe`, or a layer that a program
    /// adds.
    pub feed_forward: Option<String>,
    /// Maximum number of positions that a position attends to; by default, all earlier positions.
    pub window: Option<usize>,
    /// Pattern of the blocks that use the window (`w`) or full attention (`f`), such as `wwwwwf`; repeated over
    /// the blocks. By default, all blocks use the window.
    pub window_pattern: Option<String>,
    /// The experts of the feed-forward layer `moe`, as in `{ experts = 8, experts_per_token = 2, expert_d_ff =
    /// 256 }`.
    pub moe: Option<MoeConfig>,
    /// The projections of attention that have a bias.
    pub attention_bias: Option<AttentionBias>,
    /// Give the projections of the feed-forward layer a bias.
    pub feed_forward_bias: Option<bool>,
    /// Normalise queries and keys per head.
    pub qk_norm: Option<bool>,
    /// Bound of the logits, as in Gemma 2; unbounded by default.
    pub logit_softcap: Option<f64>,
    /// Probability of dropping an element.
    pub dropout: Option<f64>,
    /// Base of the rotary frequencies.
    pub rope_theta: Option<f64>,
    /// Scaling of the rotary frequencies.
    pub rope_scaling: Option<RopeScaling>,
    /// Epsilon of RMSNorm.
    pub norm_eps: Option<f64>,
    /// Standard deviation of the initial weights.
    pub init_std: Option<f64>,
    /// Settings of layers that a program adds.
    pub extra: Option<serde_json::Map<String, serde_json::Value>>,
    /// Longest sequence, in tokens, that the model supports: the limit of `kiln generate` and `kiln eval`, and
    /// `max_position_embeddings` of an export. By default that of `init.from`, or else `data.seq_len`.
    pub context_length: Option<usize>,
}

impl ModelSection {
    /// Returns the model, with `vocab_size` if the section sets none. The error names the missing or unknown key.
    pub fn resolve(&self, vocab_size: Option<usize>) -> Result<ModelConfig, String> {
        self.resolve_from(None, vocab_size)
    }

    /// Like [`ModelSection::resolve`], but unset keys come from `weights`, the model of the initial weights.
    pub fn resolve_from(
        &self,
        weights: Option<&ModelConfig>,
        vocab_size: Option<usize>,
    ) -> Result<ModelConfig, String> {
        let preset = match &self.preset {
            None => None,
            Some(name) => Some(ModelConfig::preset(name).ok_or_else(|| {
                let known = kiln_model::PRESETS.join(", ");
                format!("model.preset = \"{name}\" is unknown: use one of {known}")
            })?),
        };
        // Later tables replace the keys of earlier ones; keys set in none have the defaults of `ModelConfig`.
        let table = |section: &ModelSection| Table::try_from(section).map_err(|error| error.to_string());
        let mut model = Table::new();
        for base in weights.into_iter().chain(&preset) {
            model.extend(table(&ModelSection::from_model(base))?);
        }
        let vocab_size = weights.map(|weights| weights.vocab_size).or(vocab_size);
        model.extend(vocab_size.map(|size| ("vocab_size".to_owned(), Value::from(size as i64))));
        model.extend(table(self)?);
        model.remove("preset");
        model.remove("context_length");
        for key in ["heads", "vocab_size", "d_model", "layers", "d_ff"] {
            let remedy = match key {
                "vocab_size" => "name prepared data in data.path",
                _ => "start from a model.preset",
            };
            if !model.contains_key(key) {
                return Err(format!("model.{key} is missing: set it, or {remedy}"));
            }
        }
        let heads = model["heads"].clone();
        model.entry("kv_heads").or_insert(heads);
        model.entry("tie_embeddings").or_insert(Value::Boolean(true));
        let mut model: ModelConfig = model.try_into().map_err(|error: toml::de::Error| error.to_string())?;
        // The section replaces `[model.moe]` as a whole, except for this key, which the initial weights keep if it is
        // unset.
        if let (Some(moe), Some(of_weights)) =
            (&mut model.moe, weights.and_then(|weights| weights.moe.as_ref()))
        {
            moe.router_aux_loss_over = moe.router_aux_loss_over.or(of_weights.router_aux_loss_over);
        }
        Ok(model)
    }

    /// Returns the section that describes `model` completely.
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
            block: model.block.clone(),
            head_layer: model.head_layer.clone(),
            attention: (model.attention != FULL_ATTENTION).then(|| model.attention.clone()),
            feed_forward: Some(model.feed_forward.clone()),
            window: model.window,
            window_pattern: model.window_pattern.clone(),
            moe: model.moe.clone(),
            attention_bias: Some(model.attention_bias),
            feed_forward_bias: Some(model.feed_forward_bias),
            qk_norm: Some(model.qk_norm),
            logit_softcap: model.logit_softcap,
            dropout: Some(model.dropout),
            rope_theta: Some(model.rope_theta),
            rope_scaling: model.rope_scaling,
            norm_eps: Some(model.norm_eps),
            init_std: Some(model.init_std),
            extra: (!model.extra.is_empty()).then(|| model.extra.clone()),
            context_length: None,
        }
    }
}
