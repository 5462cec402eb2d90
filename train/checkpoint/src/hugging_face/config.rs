//! Conversion of `config.json` to the shape of Kiln's decoder.
//!
//! Keys have the same meaning as in transformers, versions 4 and 5, and the same defaults. Keys that change
//! the results and have no counterpart here are refused; keys that do not affect the results are ignored.

use std::path::Path;

use kiln_model::{
    AttentionBias, BalanceOver, FULL_ATTENTION, MAX_LAYERS, MOE, ModelConfig, MoeConfig, RopeScaling, SWIGLU,
};

use super::keys::Keys;
use super::{CONFIG_FILE, HuggingFaceError};

const ARCHITECTURES: &str = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and \
                             Qwen3MoeForCausalLM are";

/// The number of experts of a Qwen3-MoE, in files of older and of newer versions.
pub(super) const EXPERT_COUNTS: [&str; 2] = ["num_experts", "num_local_experts"];

/// Maximum length of the sequences of any model.
const MAX_CONTEXT: usize = 1 << 40;

/// The contents of a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderConfig {
    /// The shape of the decoder.
    pub model: ModelConfig,
    /// The longest sequence, in tokens, that the model supports.
    pub context_length: usize,
}

/// Architectures that are one decoder with variations.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
}

/// The properties of a family, other than its shape.
pub(super) struct FamilyFacts {
    /// Its name in `architectures`.
    pub(super) architecture: &'static str,
    /// Its name in `model_type`.
    pub(super) model_type: &'static str,
    /// Default of `max_position_embeddings`.
    default_context: usize,
    /// Default of `num_key_value_heads`, if not the number of heads. Null always means the number of heads.
    default_kv_heads: Option<usize>,
}

impl Family {
    const ALL: [Family; 5] = [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3, Family::Qwen3Moe];

    pub(super) fn facts(self) -> FamilyFacts {
        let (architecture, model_type, default_context, default_kv_heads) = match self {
            Family::Llama => ("LlamaForCausalLM", "llama", 2_048, None),
            Family::Mistral => ("MistralForCausalLM", "mistral", 131_072, Some(8)),
            Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2", 32_768, Some(32)),
            Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3", 32_768, Some(32)),
            Family::Qwen3Moe => ("Qwen3MoeForCausalLM", "qwen3_moe", 32_768, Some(4)),
        };
        FamilyFacts { architecture, model_type, default_context, default_kv_heads }
    }

    fn of(keys: &Keys) -> Result<Self, HuggingFaceError> {
        if let Some(architectures) = keys.texts("architectures")? {
            let known = |family: &Family| architectures == [family.facts().architecture];
            return Family::ALL
                .into_iter()
                .find(known)
                .ok_or_else(|| keys.unsupported("architectures", ARCHITECTURES));
        }
        let model_type = keys.text("model_type")?.ok_or_else(|| {
            keys.problem("architectures", "is missing, so it is not known which model this is")
        })?;
        Family::ALL
            .into_iter()
            .find(|family| family.facts().model_type == model_type)
            .ok_or_else(|| keys.unsupported("model_type", ARCHITECTURES))
    }
}

impl FolderConfig {
    /// Reads `config.json` of `folder`.
    ///
    /// # Errors
    ///
    /// If the file is missing or is not JSON, if a key is missing, has the wrong type, or requires a feature
    /// that Kiln's decoder does not have, and if the sizes are invalid.
    pub fn read(folder: &Path) -> Result<Self, HuggingFaceError> {
        let path = folder.join(CONFIG_FILE);
        let keys = Keys::read(&path)?;
        let family = Family::of(&keys)?;
        let context_length = keys.size("max_position_embeddings")?.unwrap_or(family.facts().default_context);
        refuse_other_models(&keys, family)?;
        let heads = keys.needed("num_attention_heads")?;
        let kv_heads = match keys.size("num_key_value_heads")? {
            Some(kv_heads) => kv_heads,
            None if keys.is_null("num_key_value_heads") => heads,
            None => family.facts().default_kv_heads.unwrap_or(heads),
        };
        let (d_model, layers) = (keys.needed("hidden_size")?, keys.needed("num_hidden_layers")?);
        let head_dim = match (keys.size("head_dim")?, family) {
            (None, Family::Qwen3) => Some(128),
            (head_dim, _) => head_dim,
        };
        let moe = match family {
            Family::Qwen3Moe => Some(experts(&keys, layers)?),
            _ => None,
        };
        let all = |biased: bool| if biased { AttentionBias::All } else { AttentionBias::None };
        let (rope_theta, rope_scaling) = rope(&keys, context_length)?;
        let (window, window_pattern) = windows(&keys, family, layers)?;
        let model = ModelConfig {
            vocab_size: keys.needed("vocab_size")?,
            d_model,
            layers,
            heads,
            kv_heads,
            // A width of 0 is kept, so that the check below names it.
            head_dim: head_dim.filter(|width| *width == 0 || width.checked_mul(heads) != Some(d_model)),
            d_ff: keys.needed("intermediate_size")?,
            tie_embeddings: keys.flag("tie_word_embeddings")?,
            block: None,
            attention: FULL_ATTENTION.to_owned(),
            feed_forward: if moe.is_some() { MOE.to_owned() } else { SWIGLU.to_owned() },
            moe,
            extra: Default::default(),
            window,
            window_pattern,
            attention_bias: match family {
                Family::Llama | Family::Qwen3 | Family::Qwen3Moe => all(keys.flag("attention_bias")?),
                Family::Mistral => AttentionBias::None,
                Family::Qwen2 => AttentionBias::Qkv,
            },
            feed_forward_bias: family == Family::Llama && keys.flag("mlp_bias")?,
            qk_norm: matches!(family, Family::Qwen3 | Family::Qwen3Moe),
            logit_softcap: None,
            dropout: 0.0,
            rope_theta,
            rope_scaling,
            norm_eps: keys.number("rms_norm_eps")?.unwrap_or(1e-6),
            init_std: keys.number("initializer_range")?.unwrap_or(0.02),
        };
        let shape = |source| HuggingFaceError::Shape { path, source };
        model.validate().map_err(shape)?;
        if context_length == 0 {
            return Err(keys.problem("max_position_embeddings", "is 0: must be at least 1"));
        }
        if context_length > MAX_CONTEXT {
            let problem = format!("is {context_length}: no model reads as much");
            return Err(keys.problem("max_position_embeddings", &problem));
        }
        Ok(FolderConfig { model, context_length })
    }
}

/// Refuses settings that make a different model of the same sizes.
fn refuse_other_models(keys: &Keys, family: Family) -> Result<(), HuggingFaceError> {
    if keys.text("hidden_act")?.is_some_and(|name| name != "silu") {
        return Err(keys.unsupported("hidden_act", "silu is"));
    }
    if keys.size("pretraining_tp")?.is_some_and(|parts| parts > 1) {
        return Err(keys.unsupported("pretraining_tp", "1 is"));
    }
    if keys.get("quantization_config").is_some() {
        let supported = "weights in f32, bf16 or f16 are; get the model without quantisation";
        return Err(keys.unsupported("quantization_config", supported));
    }
    for (key, causal) in [("is_causal", true), ("use_bidirectional_attention", false)] {
        if keys.get(key).is_some() && keys.flag(key)? != causal {
            return Err(keys.unsupported(key, "causal attention is"));
        }
    }
    for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
        let may_have = family == Family::Qwen3Moe && EXPERT_COUNTS.contains(&key);
        if !may_have && keys.size(key)?.is_some_and(|experts| experts > 0) {
            return Err(
                keys.unsupported(key, "experts of Qwen3MoeForCausalLM, and models without experts, are")
            );
        }
    }
    Ok(())
}

/// Returns the experts of a Qwen3-MoE with this many layers, with transformers' defaults.
fn experts(keys: &Keys, layers: usize) -> Result<MoeConfig, HuggingFaceError> {
    // Checked again with the other sizes; here before a list of layers is created.
    if layers > MAX_LAYERS {
        return Err(keys.problem("num_hidden_layers", &format!("is {layers}: must be at most {MAX_LAYERS}")));
    }
    let step = keys.size("decoder_sparse_step")?.unwrap_or(1);
    if step == 0 {
        return Err(keys.problem("decoder_sparse_step", "is 0: must be at least 1"));
    }
    let dense = keys.sizes("mlp_only_layers")?;
    let is_dense = |index: &usize| dense.contains(index) || !(index + 1).is_multiple_of(step);
    Ok(MoeConfig {
        experts: match keys.size(EXPERT_COUNTS[0])? {
            Some(experts) => experts,
            None => keys.size(EXPERT_COUNTS[1])?.unwrap_or(128),
        },
        experts_per_token: keys.size("num_experts_per_tok")?.unwrap_or(8),
        expert_d_ff: keys.size("moe_intermediate_size")?.unwrap_or(768),
        shared_expert_d_ff: None,
        norm_topk_prob: keys.flag("norm_topk_prob")?,
        router_aux_loss_coef: keys.number("router_aux_loss_coef")?.unwrap_or(0.001),
        router_aux_loss_over: Some(BalanceOver::AllLayers),
        expert_bias: false,
        dense_layers: (0..layers).filter(is_dense).collect(),
    })
}

/// Returns the window of attention, and the blocks that have it; `None` if no block has one. A position
/// attends to itself and to the `sliding_window − 1` positions before it, as in transformers. A window longer
/// than the context counts too: a run may train on longer sequences.
fn windows(
    keys: &Keys,
    family: Family,
    layers: usize,
) -> Result<(Option<usize>, Option<String>), HuggingFaceError> {
    let size = || match keys.size("sliding_window") {
        Ok(None) if !keys.is_null("sliding_window") => Ok(Some(4_096)),
        size => size,
    };
    let window = match family {
        Family::Llama => None,
        Family::Mistral => size()?,
        Family::Qwen2 | Family::Qwen3 if keys.flag("use_sliding_window")? => size()?,
        Family::Qwen2 | Family::Qwen3 => None,
        Family::Qwen3Moe if keys.flag("use_sliding_window")? => {
            return Err(keys.unsupported("use_sliding_window", "attention to the whole sequence is"));
        }
        Family::Qwen3Moe => None,
    };
    if window == Some(0) {
        return Err(keys.problem("sliding_window", "is 0: must be at least 1"));
    }
    let windowed = match keys.texts("layer_types")? {
        Some(types) => windowed_blocks(keys, &types, layers)?,
        None => {
            let full = match family {
                Family::Llama | Family::Mistral | Family::Qwen3Moe => 0,
                Family::Qwen2 | Family::Qwen3 => keys.size("max_window_layers")?.unwrap_or(28),
            };
            // More layers than permitted are refused with the other sizes.
            (0..layers.min(MAX_LAYERS)).map(|index| window.is_some() && index >= full).collect()
        }
    };
    if windowed.contains(&true) && window.is_none() {
        return Err(keys.unsupported("layer_types", "full_attention is, where there is no sliding_window"));
    }
    if family == Family::Mistral && window.is_some() && windowed.contains(&false) {
        return Err(keys.unsupported("layer_types", "the same window in all layers is"));
    }
    match window.filter(|_| windowed.contains(&true)) {
        None => Ok((None, None)),
        Some(window) => Ok((Some(window), ModelConfig::window_pattern_of(&windowed))),
    }
}

/// Returns which blocks have a window, according to `layer_types`.
fn windowed_blocks(keys: &Keys, types: &[String], layers: usize) -> Result<Vec<bool>, HuggingFaceError> {
    if types.len() != layers {
        let problem = format!("has {} layers, and num_hidden_layers is {layers}", types.len());
        return Err(keys.problem("layer_types", &problem));
    }
    let windowed = types.iter().map(|layer| match layer.as_str() {
        "full_attention" => Ok(false),
        "sliding_attention" => Ok(true),
        _ => Err(keys.unsupported("layer_types", "full_attention and sliding_attention are")),
    });
    windowed.collect()
}

/// Returns the base and stretching of the rotary frequencies, from `rope_scaling` and `rope_theta`, or from
/// `rope_parameters` in newer files. If both are present, the older keys win, as in transformers.
fn rope(keys: &Keys, context: usize) -> Result<(f64, Option<RopeScaling>), HuggingFaceError> {
    let scaling = keys.object("rope_scaling")?.filter(|scaling| !scaling.is_empty());
    let rope = match scaling {
        Some(scaling) => Some(scaling),
        None => keys.object("rope_parameters")?,
    };
    let outer = keys.number("rope_theta")?;
    let supported = "rotary embeddings of whole heads are";
    if keys.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(keys.unsupported("partial_rotary_factor", supported));
    }
    let Some(rope) = rope else { return Ok((outer.unwrap_or(10_000.0), None)) };
    if rope.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
        return Err(rope.unsupported("partial_rotary_factor", supported));
    }
    if rope.get("full_attention").is_some() || rope.get("sliding_attention").is_some() {
        let supported = "the same rotary embedding in all layers is";
        return Err(keys.unsupported("rope_parameters", supported));
    }
    let theta = rope.number("rope_theta")?.or(outer).unwrap_or(10_000.0);
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match rope.text(key)?.as_deref() {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: rope.needed_number("factor")? }),
        Some("llama3") => {
            const ORIGINAL: &str = "original_max_position_embeddings";
            let original = match keys.size(ORIGINAL)? {
                Some(outer) => outer,
                None => rope.size(ORIGINAL)?.unwrap_or(context),
            };
            Some(RopeScaling::Llama3 {
                factor: rope.needed_number("factor")?,
                low_freq_factor: rope.needed_number("low_freq_factor")?,
                high_freq_factor: rope.needed_number("high_freq_factor")?,
                original_context: original,
            })
        }
        Some(_) => return Err(rope.unsupported(key, "default, linear and llama3 are")),
    };
    Ok((theta, scaling))
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Parses a folder's configuration with this text.
    pub fn read(text: &str) -> Result<FolderConfig, HuggingFaceError> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(CONFIG_FILE), text).unwrap();
        FolderConfig::read(folder.path())
    }

    /// Absent keys have the defaults of each architecture.
    #[test]
    fn defaults_are_those_of_the_architecture() {
        let sizes = r#""vocab_size": 8, "hidden_size": 64, "num_hidden_layers": 1,
            "num_attention_heads": 32, "intermediate_size": 4"#;
        let config = |rest: &str| read(&format!("{{{sizes}, {rest}}}"));
        let llama = config(r#""model_type": "llama""#).unwrap();
        assert_eq!((llama.model.kv_heads, llama.context_length), (32, 2048));
        assert_eq!((llama.model.norm_eps, llama.model.rope_theta), (1e-6, 1e4));
        assert_eq!((llama.model.head_dim, llama.model.tie_embeddings), (None, false));
        let mistral = r#""architectures": ["MistralForCausalLM"], "sliding_window": "#;
        let whole = config(&format!("{mistral}null")).unwrap();
        assert_eq!((whole.model.kv_heads, whole.context_length), (8, 131_072));
        assert_eq!(whole.model.window, None);
        let beyond = config(&format!("{mistral}131072")).unwrap();
        assert_eq!((beyond.model.window, beyond.context_length), (Some(131_072), 131_072));
        let absent = config(r#""model_type": "mistral""#).unwrap();
        assert_eq!(absent, config(&format!("{mistral}4096")).unwrap());
        assert_eq!((absent.model.window, absent.model.window_pattern), (Some(4096), None));
        let message = config(r#""model_type": "llama", "max_position_embeddings": 9e18"#);
        assert!(message.is_err(), "not a whole number");
        let endless = r#""model_type": "llama", "max_position_embeddings": 9000000000000000000"#;
        let message = config(endless).unwrap_err().to_string();
        assert!(message.contains("is 9000000000000000000: no model reads as much"), "{message}");
        let null = config(r#""model_type": "mistral", "sliding_window": null, "num_key_value_heads": null"#);
        assert_eq!(null.unwrap().model.kv_heads, 32);
        let qwen2 = config(r#""model_type": "qwen2", "sliding_window": 4096"#).unwrap();
        assert_eq!(qwen2.model.attention_bias, AttentionBias::Qkv);
        assert_eq!((qwen2.model.kv_heads, qwen2.context_length), (32, 32_768));
        let qwen3 = config(r#""model_type": "qwen3", "head_dim": 2"#).unwrap();
        assert_eq!((qwen3.model.qk_norm, qwen3.model.head_dim), (true, None));
        let qwen3 = config(r#""model_type": "qwen3""#).unwrap();
        assert_eq!(qwen3.model.head_dim, Some(128));
    }

    /// Windows in every notation: in every layer, in every layer after the first ones, and layer by layer.
    #[test]
    fn windows_of_layers() {
        let config = |layers: usize, rest: &str| {
            let sizes = r#""vocab_size": 8, "hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 2,
                "intermediate_size": 4, "max_position_embeddings": 100"#;
            read(&format!("{{{sizes}, \"num_hidden_layers\": {layers}, {rest}}}"))
        };
        let windows = |layers: usize, rest: &str| {
            let model = config(layers, rest).unwrap().model;
            (model.window, model.window_pattern)
        };
        let pattern = |pattern: &str| (Some(8), Some(pattern.to_owned()));
        let mistral = r#""model_type": "mistral", "sliding_window": 8"#;
        assert_eq!(windows(3, mistral), (Some(8), None));
        for family in ["qwen2", "qwen3"] {
            let used =
                format!(r#""model_type": "{family}", "use_sliding_window": true, "sliding_window": 8"#);
            // 28 layers with full attention, unless the file says otherwise.
            assert_eq!(windows(3, &used), (None, None));
            assert_eq!(windows(30, &used), pattern(&format!("{}ww", "f".repeat(28))));
            let first = |first| format!("{used}, \"max_window_layers\": {first}");
            assert_eq!(windows(4, &first(2)), pattern("ffww"));
            assert_eq!(windows(4, &first(0)), (Some(8), None));
            assert_eq!(windows(4, &first(4)), (None, None));
            let (w, f) = (r#""sliding_attention""#, r#""full_attention""#);
            let types = |types: &[&str]| format!("{used}, \"layer_types\": [{}]", types.join(", "));
            assert_eq!(windows(5, &types(&[w, f, w, f, w])), pattern("wf"));
            assert_eq!(windows(4, &types(&[f, w, w, f])), pattern("fww"));
            assert_eq!(windows(2, &types(&[w, w])), (Some(8), None));
            assert_eq!(windows(2, &types(&[f, f])), (None, None));
            let message = config(3, &types(&[w, f])).unwrap_err().to_string();
            assert!(message.contains("layer_types has 2 layers, and num_hidden_layers is 3"), "{message}");
            let message = config(1, &types(&[r#""chunked_attention""#])).unwrap_err().to_string();
            assert!(message.contains("full_attention and sliding_attention are"), "{message}");
            let unused = format!(r#""model_type": "{family}", "sliding_window": 8, "max_window_layers": 0"#);
            assert_eq!(windows(2, &unused), (None, None));
            assert_eq!(windows(2, &unused.replace("8", "null")), (None, None));
        }
        let zero = config(2, r#""model_type": "mistral", "sliding_window": 0"#).unwrap_err().to_string();
        assert!(zero.contains("sliding_window is 0: must be at least 1"), "{zero}");
    }

    /// Rotary settings of older and newer files.
    #[test]
    fn rope_in_every_spelling() {
        let sizes = r#""model_type": "llama", "vocab_size": 8, "hidden_size": 64,
            "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 4"#;
        let rope = |rest: &str| {
            let model = read(&format!("{{{sizes}, {rest}}}")).unwrap().model;
            (model.rope_theta, model.rope_scaling)
        };
        let linear = Some(RopeScaling::Linear { factor: 2.0 });
        assert_eq!(rope(r#""rope_theta": 5"#), (5.0, None));
        assert_eq!(rope(r#""rope_theta": 5, "rope_scaling": null"#), (5.0, None));
        assert_eq!(rope(r#""rope_parameters": {"rope_theta": 5.0, "rope_type": "default"}"#).0, 5.0);
        assert_eq!(rope(r#""rope_scaling": {"type": "linear", "factor": 2}"#), (1e4, linear));
        assert_eq!(
            rope(r#""rope_theta": 7, "rope_scaling": {"rope_type": "linear", "factor": 2.0}"#),
            (7.0, linear)
        );
        assert_eq!(
            rope(r#""rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 3.0}"#),
            (3.0, linear)
        );
        let llama3 = r#"{"rope_type": "llama3", "factor": 8, "low_freq_factor": 1,
            "high_freq_factor": 4, "original_max_position_embeddings": 64}"#;
        let (theta, scaling) = rope(&format!(r#""rope_theta": 5e5, "rope_scaling": {llama3}"#));
        let expected = RopeScaling::Llama3 {
            factor: 8.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 64,
        };
        assert_eq!((theta, scaling), (5e5, Some(expected)));
    }
}
