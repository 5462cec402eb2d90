//! Converts `config.json` to the shape of Kiln's decoder, and back.
//!
//! Keys and defaults are those of transformers 4 and 5. Unsupported keys that change the results are errors; keys that
//! do not affect the results are ignored.

use std::path::Path;

use kiln_model::{
    AttentionBias, BalanceOver, FULL_ATTENTION, MAX_LAYERS, MOE, ModelConfig, MoeConfig, RopeScaling, SWIGLU,
};
use serde_json::{Value, json};

use super::keys::Keys;
use super::{CONFIG_FILE, TokenIds};
use crate::CheckpointError;
use crate::error::Result;

const ARCHITECTURES: &str = "LlamaForCausalLM, MistralForCausalLM, Qwen2ForCausalLM, Qwen3ForCausalLM and \
                             Qwen3MoeForCausalLM";

/// Keys for the number of experts of a Qwen3-MoE: the older name, then the newer one.
const EXPERT_COUNTS: [&str; 2] = ["num_experts", "num_local_experts"];

const MAX_CONTEXT: usize = 1 << 40;

/// The content of a `config.json`.
#[derive(Clone, Debug, PartialEq)]
pub struct FolderConfig {
    /// The shape of the decoder.
    pub model: ModelConfig,
    /// The longest sequence, in tokens, that the model supports.
    pub context_length: usize,
}

/// Architectures that are variations of one decoder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Llama,
    Mistral,
    Qwen2,
    Qwen3,
    Qwen3Moe,
}

impl Family {
    const ALL: [Family; 5] = [Family::Llama, Family::Mistral, Family::Qwen2, Family::Qwen3, Family::Qwen3Moe];

    fn names(self) -> (&'static str, &'static str) {
        match self {
            Family::Llama => ("LlamaForCausalLM", "llama"),
            Family::Mistral => ("MistralForCausalLM", "mistral"),
            Family::Qwen2 => ("Qwen2ForCausalLM", "qwen2"),
            Family::Qwen3 => ("Qwen3ForCausalLM", "qwen3"),
            Family::Qwen3Moe => ("Qwen3MoeForCausalLM", "qwen3_moe"),
        }
    }

    fn of(keys: &Keys) -> Result<Self> {
        let mut all = Family::ALL.into_iter();
        if let Some(names) = keys.texts("architectures")? {
            let family = all.find(|family| names == [family.names().0]);
            return family.ok_or_else(|| keys.unsupported("architectures", ARCHITECTURES));
        }
        let name = keys
            .text("model_type")?
            .ok_or_else(|| keys.problem("architectures", "is missing, so the model type is unknown"))?;
        let family = all.find(|family| name == family.names().1);
        family.ok_or_else(|| keys.unsupported("model_type", ARCHITECTURES))
    }
}

impl FolderConfig {
    /// Reads `config.json` of `folder`. Fails if a key is missing, invalid or not supported by Kiln's decoder.
    pub fn read(folder: &Path) -> Result<Self> {
        let path = folder.join(CONFIG_FILE);
        let keys = Keys::read(&path)?;
        let family = Family::of(&keys)?;
        let context_length = keys.size("max_position_embeddings")?.unwrap_or(match family {
            Family::Llama => 2_048,
            Family::Mistral => 131_072,
            Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => 32_768,
        });
        refuse_other_models(&keys, family)?;
        let size = |key: &str| keys.needed(key, keys.size(key));
        let heads = size("num_attention_heads")?;
        let kv_heads = keys.size("num_key_value_heads")?.unwrap_or(match family {
            Family::Llama => heads,
            _ if keys.is_null("num_key_value_heads") => heads,
            Family::Mistral => 8,
            Family::Qwen2 | Family::Qwen3 => 32,
            Family::Qwen3Moe => 4,
        });
        let (d_model, layers) = (size("hidden_size")?, size("num_hidden_layers")?);
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
            vocab_size: size("vocab_size")?,
            d_model,
            layers,
            heads,
            kv_heads,
            // Keep a width of 0, which the validation of the sizes reports.
            head_dim: head_dim.filter(|width| *width == 0 || width.checked_mul(heads) != Some(d_model)),
            d_ff: size("intermediate_size")?,
            tie_embeddings: keys.flag("tie_word_embeddings")?,
            block: None,
            head_layer: None,
            attention: FULL_ATTENTION.to_owned(),
            feed_forward: if moe.is_some() { MOE.to_owned() } else { SWIGLU.to_owned() },
            moe,
            extra: Default::default(),
            lora: None,
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
        model.validate().map_err(|source| CheckpointError::Shape { path, source })?;
        match context_length {
            0 => Err(keys.problem("max_position_embeddings", "is 0: must be at least 1")),
            1..=MAX_CONTEXT => Ok(FolderConfig { model, context_length }),
            _ => {
                let problem = format!("is {context_length}: longer than any model supports");
                Err(keys.problem("max_position_embeddings", problem))
            }
        }
    }
}

fn refuse_other_models(keys: &Keys, family: Family) -> Result<()> {
    if keys.text("hidden_act")?.is_some_and(|name| name != "silu") {
        return Err(keys.unsupported("hidden_act", "silu"));
    }
    if keys.size("pretraining_tp")?.is_some_and(|parts| parts > 1) {
        return Err(keys.unsupported("pretraining_tp", "1"));
    }
    if keys.get("quantization_config").is_some() {
        let supported = "weights in f32, bf16 or f16: get the model without quantisation";
        return Err(keys.unsupported("quantization_config", supported));
    }
    for (key, causal) in [("is_causal", true), ("use_bidirectional_attention", false)] {
        if keys.get(key).is_some() && keys.flag(key)? != causal {
            return Err(keys.unsupported(key, "causal attention"));
        }
    }
    for key in ["num_local_experts", "num_experts", "n_routed_experts"] {
        let may_have = family == Family::Qwen3Moe && EXPERT_COUNTS.contains(&key);
        if !may_have && keys.size(key)?.is_some_and(|experts| experts > 0) {
            return Err(keys.unsupported(key, "experts of Qwen3MoeForCausalLM, and models without experts"));
        }
    }
    Ok(())
}

fn experts(keys: &Keys, layers: usize) -> Result<MoeConfig> {
    // Check before creating a list of layers.
    if layers > MAX_LAYERS {
        return Err(keys.problem("num_hidden_layers", format!("is {layers}: must be at most {MAX_LAYERS}")));
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

/// Returns the attention window and the pattern of blocks that use it; both are `None` if no block does. As in
/// transformers, the `sliding_window` positions include the current one.
fn windows(keys: &Keys, family: Family, layers: usize) -> Result<(Option<usize>, Option<String>)> {
    let has_window = match family {
        Family::Llama => false,
        Family::Mistral => true,
        Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe => keys.flag("use_sliding_window")?,
    };
    if has_window && family == Family::Qwen3Moe {
        return Err(keys.unsupported("use_sliding_window", "attention to the whole sequence"));
    }
    let window = match has_window && !keys.is_null("sliding_window") {
        true => Some(keys.size("sliding_window")?.unwrap_or(4_096)),
        false => None,
    };
    if window == Some(0) {
        return Err(keys.problem("sliding_window", "is 0: must be at least 1"));
    }
    let windowed: Vec<_> = match keys.texts("layer_types")? {
        Some(types) if types.len() != layers => {
            let problem = format!("has {} layers, and num_hidden_layers is {layers}", types.len());
            return Err(keys.problem("layer_types", problem));
        }
        Some(types) => {
            let is_windowed = |layer: &String| match layer.as_str() {
                "full_attention" => Ok(false),
                "sliding_attention" => Ok(true),
                _ => Err(keys.unsupported("layer_types", "full_attention and sliding_attention")),
            };
            types.iter().map(is_windowed).collect::<Result<_>>()?
        }
        None => {
            let full = match family {
                Family::Llama | Family::Mistral | Family::Qwen3Moe => 0,
                Family::Qwen2 | Family::Qwen3 => keys.size("max_window_layers")?.unwrap_or(28),
            };
            (0..layers.min(MAX_LAYERS)).map(|index| window.is_some() && index >= full).collect()
        }
    };
    if windowed.contains(&true) && window.is_none() {
        return Err(keys.unsupported("layer_types", "only full_attention if there is no sliding_window"));
    }
    if family == Family::Mistral && window.is_some() && windowed.contains(&false) {
        return Err(keys.unsupported("layer_types", "one window for all layers"));
    }
    match window.filter(|_| windowed.contains(&true)) {
        None => Ok((None, None)),
        Some(window) => Ok((Some(window), ModelConfig::window_pattern_of(&windowed))),
    }
}

/// Returns the base and scaling of the rotary frequencies, from `rope_scaling` and `rope_theta`, or else from the newer
/// `rope_parameters`. As in transformers, the older keys take precedence.
fn rope(keys: &Keys, context: usize) -> Result<(f64, Option<RopeScaling>)> {
    let rope = match keys.object("rope_scaling")?.filter(|scaling| !scaling.map.is_empty()) {
        Some(scaling) => Some(scaling),
        None => keys.object("rope_parameters")?,
    };
    let outer = keys.number("rope_theta")?;
    for keys in [Some(keys), rope.as_ref()].into_iter().flatten() {
        if keys.number("partial_rotary_factor")?.is_some_and(|factor| factor != 1.0) {
            return Err(keys.unsupported("partial_rotary_factor", "rotary embeddings of whole heads"));
        }
    }
    let Some(rope) = rope else { return Ok((outer.unwrap_or(10_000.0), None)) };
    if rope.get("full_attention").is_some() || rope.get("sliding_attention").is_some() {
        let supported = "one rotary embedding for all layers";
        return Err(keys.unsupported("rope_parameters", supported));
    }
    let theta = rope.number("rope_theta")?.or(outer).unwrap_or(10_000.0);
    let number = |key: &str| rope.needed(key, rope.number(key));
    let key = if rope.get("rope_type").is_some() { "rope_type" } else { "type" };
    let scaling = match rope.text(key)?.as_deref() {
        None | Some("default") => None,
        Some("linear") => Some(RopeScaling::Linear { factor: number("factor")? }),
        Some("llama3") => {
            const ORIGINAL: &str = "original_max_position_embeddings";
            let original_context = match keys.size(ORIGINAL)? {
                Some(outer) => outer,
                None => rope.size(ORIGINAL)?.unwrap_or(context),
            };
            Some(RopeScaling::Llama3 {
                factor: number("factor")?,
                low_freq_factor: number("low_freq_factor")?,
                high_freq_factor: number("high_freq_factor")?,
                original_context,
            })
        }
        Some(_) => return Err(rope.unsupported(key, "default, linear and llama3")),
    };
    Ok((theta, scaling))
}

/// Returns a `config.json` for `model`. `dtype`: PyTorch's name for the weights' type.
pub(crate) fn to_json(
    model: &ModelConfig,
    context_length: usize,
    tokens: &TokenIds,
    dtype: &str,
    folder: &Path,
) -> Result<Value> {
    let family = family_of(model, folder)?;
    let (architecture, model_type) = family.names();
    let mut config = json!({
        "architectures": [architecture],
        "model_type": model_type,
        "vocab_size": model.vocab_size,
        "hidden_size": model.d_model,
        "intermediate_size": model.d_ff,
        "num_hidden_layers": model.layers,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim(),
        "hidden_act": "silu",
        "max_position_embeddings": context_length,
        "initializer_range": model.init_std,
        "rms_norm_eps": model.norm_eps,
        "tie_word_embeddings": model.tie_embeddings,
        "attention_dropout": 0.0,
        "use_cache": true,
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_theta": model.rope_theta,
    });
    tokens.set_keys(&mut config);
    let mut set = |key: &str, value: Value| config[key] = value;
    if matches!(family, Family::Llama | Family::Qwen3 | Family::Qwen3Moe) {
        set("attention_bias", json!(model.attention_bias == AttentionBias::All));
    }
    if family == Family::Llama {
        set("mlp_bias", json!(model.feed_forward_bias));
        set("pretraining_tp", json!(1));
    } else {
        set("sliding_window", json!(model.window));
    }
    if matches!(family, Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe) {
        let windowed: Vec<_> = (0..model.layers).map(|index| model.window_of(index).is_some()).collect();
        let name = |windowed: &bool| if *windowed { "sliding_attention" } else { "full_attention" };
        set("use_sliding_window", json!(model.window.is_some()));
        set("layer_types", windowed.iter().map(name).collect());
        // Older versions only support full attention below this index and windows from there on.
        let full = windowed.iter().take_while(|windowed| !**windowed).count();
        if !windowed[full..].contains(&false) {
            set("max_window_layers", json!(full));
        }
    }
    if let Some(moe) = &model.moe {
        EXPERT_COUNTS.into_iter().for_each(|key| set(key, json!(moe.experts)));
        set("num_experts_per_tok", json!(moe.experts_per_token));
        set("moe_intermediate_size", json!(moe.expert_d_ff));
        set("norm_topk_prob", json!(moe.norm_topk_prob));
        set("router_aux_loss_coef", json!(moe.router_aux_loss_coef));
        set("output_router_logits", json!(false));
        set("decoder_sparse_step", json!(1));
        set("mlp_only_layers", json!(moe.dense_layers));
    }
    // Older versions read `rope_theta` and `rope_scaling`. Newer ones read `rope_parameters` without `rope_scaling`.
    let (scaling, mut parameters) = match model.rope_scaling {
        None => (Value::Null, json!({"rope_type": "default"})),
        // Some older versions accept only these two keys.
        Some(RopeScaling::Linear { factor }) => {
            (json!({"type": "linear", "factor": factor}), json!({"rope_type": "linear", "factor": factor}))
        }
        Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
            let scaling = json!({
                "rope_type": "llama3",
                "factor": factor,
                "low_freq_factor": low_freq_factor,
                "high_freq_factor": high_freq_factor,
                "original_max_position_embeddings": original_context,
            });
            (scaling.clone(), scaling)
        }
    };
    parameters["rope_theta"] = json!(model.rope_theta);
    set("rope_scaling", scaling);
    set("rope_parameters", parameters);
    Ok(config)
}

/// Reports whether a Hugging Face architecture has every feature of `model`, so that it can be exported.
pub fn has_architecture(model: &ModelConfig) -> bool {
    family_of(model, Path::new("")).is_ok()
}

fn family_of(model: &ModelConfig, folder: &Path) -> Result<Family> {
    let feed_forward = &model.feed_forward;
    let features = [
        model.block.as_ref().map(|block| format!("block {block}")),
        (model.attention != FULL_ATTENTION).then(|| format!("attention {}", model.attention)),
        (feed_forward != SWIGLU && feed_forward != MOE).then(|| format!("feed_forward {feed_forward}")),
        model.logit_softcap.map(|cap| format!("logit_softcap {cap}")),
    ];
    let mut features: Vec<_> = features.into_iter().flatten().collect();
    let has_shared_expert = model.moe.as_ref().is_some_and(|moe| moe.shared_expert_d_ff.is_some());
    let has_expert_bias = model.moe.as_ref().is_some_and(|moe| moe.expert_bias);
    let ModelConfig { qk_norm, attention_bias: bias, feed_forward_bias, .. } = *model;
    let (has_window, has_experts) = (model.window.is_some(), model.moe.is_some());
    let is_windowed = |index| model.window_of(index).is_some();
    let is_qwen3 = qk_norm && bias != AttentionBias::Qkv && !feed_forward_bias;
    let family = if !features.is_empty() || has_shared_expert || has_expert_bias {
        None
    } else if has_experts {
        (is_qwen3 && !has_window).then_some(Family::Qwen3Moe)
    } else if qk_norm {
        is_qwen3.then_some(Family::Qwen3)
    } else if bias == AttentionBias::Qkv {
        (!feed_forward_bias).then_some(Family::Qwen2)
    } else if has_window {
        let is_plain = bias == AttentionBias::None && !feed_forward_bias;
        (is_plain && (0..model.layers).all(is_windowed)).then_some(Family::Mistral)
    } else {
        Some(Family::Llama)
    };
    family.ok_or_else(|| {
        let others = [
            (qk_norm, "qk_norm"),
            (bias == AttentionBias::Qkv, "attention_bias qkv"),
            (bias == AttentionBias::All, "attention_bias all"),
            (feed_forward_bias, "feed_forward_bias"),
            (has_window, "window"),
            (model.window_pattern.is_some(), "window_pattern"),
            (has_experts, "feed_forward moe"),
            (has_experts && !qk_norm, "no qk_norm"),
            (has_shared_expert, "moe.shared_expert_d_ff"),
            (has_expert_bias, "moe.expert_bias"),
        ];
        features.extend(others.into_iter().filter(|(has, _)| *has).map(|(_, name)| name.to_owned()));
        let features = features.join(" together with ");
        CheckpointError::NoArchitecture { path: folder.to_owned(), features }
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn read(text: &str) -> Result<FolderConfig> {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(CONFIG_FILE), text).unwrap();
        FolderConfig::read(folder.path())
    }

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
        assert!(message.contains("is 9000000000000000000: longer than any model supports"), "{message}");
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

    #[test]
    fn windows_are_read_in_every_notation() {
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
            assert!(message.contains("full_attention and sliding_attention"), "{message}");
            let unused = format!(r#""model_type": "{family}", "sliding_window": 8, "max_window_layers": 0"#);
            assert_eq!(windows(2, &unused), (None, None));
            assert_eq!(windows(2, &unused.replace("8", "null")), (None, None));
        }
        let zero = config(2, r#""model_type": "mistral", "sliding_window": 0"#).unwrap_err().to_string();
        assert!(zero.contains("sliding_window is 0: must be at least 1"), "{zero}");
    }

    #[test]
    fn rope_is_read_in_every_spelling() {
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

    fn written(model: &ModelConfig) -> Value {
        to_json(model, 99, &TokenIds::default(), "float32", Path::new("x")).unwrap()
    }

    #[test]
    fn every_exported_shape_is_read_back() {
        let plain = ModelConfig::preset("1b").unwrap();
        let llama3 = RopeScaling::Llama3 {
            factor: 32.0,
            low_freq_factor: 1.0,
            high_freq_factor: 4.0,
            original_context: 8192,
        };
        let with = |change: &dyn Fn(&mut ModelConfig)| {
            let mut model = plain.clone();
            change(&mut model);
            model
        };
        for (architecture, model) in [
            ("LlamaForCausalLM", plain.clone()),
            ("LlamaForCausalLM", with(&|m| m.tie_embeddings = true)),
            ("LlamaForCausalLM", with(&|m| m.head_dim = Some(16))),
            ("LlamaForCausalLM", with(&|m| m.attention_bias = AttentionBias::All)),
            ("LlamaForCausalLM", with(&|m| m.feed_forward_bias = true)),
            ("LlamaForCausalLM", with(&|m| m.rope_scaling = Some(llama3))),
            ("LlamaForCausalLM", with(&|m| m.rope_scaling = Some(RopeScaling::Linear { factor: 2.0 }))),
            ("Qwen2ForCausalLM", with(&|m| m.attention_bias = AttentionBias::Qkv)),
            ("Qwen3ForCausalLM", with(&|m| m.qk_norm = true)),
            ("MistralForCausalLM", with(&|m| m.window = Some(8))),
            ("Qwen2ForCausalLM", with(&|m| (m.window, m.attention_bias) = (Some(8), AttentionBias::Qkv))),
            (
                "Qwen3ForCausalLM",
                with(&|m| {
                    m.qk_norm = true;
                    (m.window, m.window_pattern) = (Some(8), Some("wwwwwf".to_owned()));
                }),
            ),
            (
                "Qwen3ForCausalLM",
                with(&|m| {
                    m.qk_norm = true;
                    m.attention_bias = AttentionBias::All;
                    m.rope_theta = 1e6;
                    m.norm_eps = 1e-6;
                }),
            ),
        ] {
            let json = written(&model);
            assert_eq!(json["architectures"], json!([architecture]));
            let read = read(&json.to_string()).unwrap();
            assert_eq!(read, FolderConfig { model, context_length: 99 }, "{json}");
        }
    }

    #[test]
    fn features_without_an_architecture_are_refused() {
        let refuse = |expected: &str, change: &dyn Fn(&mut ModelConfig)| {
            let mut model = ModelConfig::preset("10m").unwrap();
            change(&mut model);
            let refused = to_json(&model, 9, &TokenIds::default(), "float32", Path::new("run"));
            let message = refused.unwrap_err().to_string();
            assert!(message.contains(expected), "{message}");
        };
        let (qkv, all) = (AttentionBias::Qkv, AttentionBias::All);
        refuse("qk_norm together with attention_bias qkv,", &|m| (m.qk_norm, m.attention_bias) = (true, qkv));
        refuse("attention_bias qkv together with feed_forward_bias", &|m| {
            (m.feed_forward_bias, m.attention_bias) = (true, qkv);
        });
        refuse("qk_norm together with feed_forward_bias", &|m| {
            (m.qk_norm, m.feed_forward_bias) = (true, true)
        });
        refuse("logit_softcap 30", &|m| m.logit_softcap = Some(30.0));
        refuse("has window together with window_pattern", &|m| {
            (m.window, m.window_pattern) = (Some(8), Some("wf".to_owned()));
        });
        refuse("attention_bias all together with window", &|m| (m.window, m.attention_bias) = (Some(8), all));
        refuse("has block parallel_residual", &|m| m.block = Some(kiln_model::PARALLEL_RESIDUAL.to_owned()));
    }
}
