//! Conversion of the shape of Kiln's decoder to a `config.json`.

use std::path::Path;

use kiln_model::{AttentionBias, FULL_ATTENTION, MOE, ModelConfig, RopeScaling, SWIGLU};
use serde_json::{Value, json};

use super::HuggingFaceError;
use super::config::{EXPERT_COUNTS, Family};
use super::tokens::{TokenIds, end_value};

/// Returns a `config.json` for `model`, which older and newer versions of transformers read alike. `dtype` is
/// PyTorch's name of the weights' type; `folder` is the model's folder, for messages.
///
/// # Errors
///
/// If no architecture has all features of the model.
pub fn to_json(
    model: &ModelConfig,
    context_length: usize,
    tokens: &TokenIds,
    dtype: &str,
    folder: &Path,
) -> Result<Value, HuggingFaceError> {
    let family = family_of(model, folder)?;
    let facts = family.facts();
    let mut config = json!({
        "architectures": [facts.architecture],
        "model_type": facts.model_type,
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
        "bos_token_id": tokens.start,
        "eos_token_id": end_value(tokens),
        "pad_token_id": tokens.pad,
        // The newer and the older name.
        "dtype": dtype,
        "torch_dtype": dtype,
        "rope_theta": model.rope_theta,
    });
    let mut set = |key: &str, value: Value| config[key] = value;
    match family {
        Family::Llama => {
            set("attention_bias", json!(model.attention_bias == AttentionBias::All));
            set("mlp_bias", json!(model.feed_forward_bias));
            set("pretraining_tp", json!(1));
        }
        Family::Qwen3 | Family::Qwen3Moe => {
            set("attention_bias", json!(model.attention_bias == AttentionBias::All))
        }
        Family::Mistral | Family::Qwen2 => {}
    }
    if family != Family::Llama {
        set("sliding_window", json!(model.window));
    }
    if matches!(family, Family::Qwen2 | Family::Qwen3 | Family::Qwen3Moe) {
        let windowed: Vec<_> = (0..model.layers).map(|index| model.window_of(index).is_some()).collect();
        let name = |windowed: &bool| if *windowed { "sliding_attention" } else { "full_attention" };
        set("use_sliding_window", json!(model.window.is_some()));
        set("layer_types", windowed.iter().map(name).collect());
        // For older versions: layers before this one have full attention, and the others the window. They
        // cannot express other patterns.
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
    // Older versions read `rope_theta` and `rope_scaling`, newer ones `rope_parameters` if `rope_scaling` is
    // not set.
    let (scaling, parameters) = match model.rope_scaling {
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
    set("rope_scaling", scaling);
    set("rope_parameters", parameters);
    config["rope_parameters"]["rope_theta"] = json!(model.rope_theta);
    Ok(config)
}

/// Returns `true` if an architecture of Hugging Face has every feature of `model`, so that it can be exported.
pub fn has_architecture(model: &ModelConfig) -> bool {
    family_of(model, Path::new("")).is_ok()
}

/// The architecture that has all that `model` has.
fn family_of(model: &ModelConfig, folder: &Path) -> Result<Family, HuggingFaceError> {
    let bias = model.attention_bias;
    let not_theirs: Vec<_> = [
        model.block.as_ref().map(|block| format!("block {block}")),
        (model.attention != FULL_ATTENTION).then(|| format!("attention {}", model.attention)),
        (![SWIGLU, MOE].contains(&model.feed_forward.as_str()))
            .then(|| format!("feed_forward {}", model.feed_forward)),
        model.logit_softcap.map(|cap| format!("logit_softcap {cap}")),
    ]
    .into_iter()
    .flatten()
    .collect();
    let has_shared_expert = model.moe.as_ref().is_some_and(|moe| moe.shared_expert_d_ff.is_some());
    let has_expert_bias = model.moe.as_ref().is_some_and(|moe| moe.expert_bias);
    let family = match (model.qk_norm, bias, model.feed_forward_bias) {
        _ if !not_theirs.is_empty() || has_shared_expert || has_expert_bias => None,
        (true, AttentionBias::None | AttentionBias::All, false)
            if model.moe.is_some() && model.window.is_none() =>
        {
            Some(Family::Qwen3Moe)
        }
        _ if model.moe.is_some() => None,
        (true, AttentionBias::None | AttentionBias::All, false) => Some(Family::Qwen3),
        (false, AttentionBias::Qkv, false) => Some(Family::Qwen2),
        // An architecture with a window in all of its layers.
        (false, AttentionBias::None, false) if model.window.is_some() => {
            (0..model.layers).all(|index| model.window_of(index).is_some()).then_some(Family::Mistral)
        }
        _ if model.window.is_some() => None,
        (false, AttentionBias::None | AttentionBias::All, _) => Some(Family::Llama),
        _ => None,
    };
    family.ok_or_else(|| {
        let features = [
            (model.qk_norm, "qk_norm"),
            (bias == AttentionBias::Qkv, "attention_bias qkv"),
            (bias == AttentionBias::All, "attention_bias all"),
            (model.feed_forward_bias, "feed_forward_bias"),
            (model.window.is_some(), "window"),
            (model.window_pattern.is_some(), "window_pattern"),
            (model.moe.is_some(), "feed_forward moe"),
            (model.moe.is_some() && !model.qk_norm, "no qk_norm"),
            (has_shared_expert, "moe.shared_expert_d_ff"),
            (has_expert_bias, "moe.expert_bias"),
        ];
        let features = features.into_iter().filter(|(has, _)| *has).map(|(_, name)| name.to_owned());
        let features: Vec<_> = not_theirs.into_iter().chain(features).collect();
        HuggingFaceError::NoArchitecture {
            path: folder.to_owned(),
            features: features.join(" together with "),
        }
    })
}

#[cfg(test)]
mod tests {
    use super::super::FolderConfig;
    use super::super::config::tests::read;
    use super::*;

    fn written(model: &ModelConfig) -> Value {
        to_json(model, 99, &TokenIds::default(), "float32", Path::new("x")).unwrap()
    }

    /// Every shape that can be written is read back unchanged.
    #[test]
    fn what_is_written_is_read() {
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
    fn what_no_architecture_has_is_refused() {
        let refuse = |change: &dyn Fn(&mut ModelConfig)| {
            let mut model = ModelConfig::preset("10m").unwrap();
            change(&mut model);
            let path = Path::new("run");
            to_json(&model, 9, &TokenIds::default(), "float32", path).unwrap_err().to_string()
        };
        let message = refuse(&|m| (m.qk_norm, m.attention_bias) = (true, AttentionBias::Qkv));
        assert!(message.contains("qk_norm together with attention_bias qkv,"), "{message}");
        let message = refuse(&|m| {
            (m.feed_forward_bias, m.attention_bias) = (true, AttentionBias::Qkv);
        });
        assert!(message.contains("attention_bias qkv together with feed_forward_bias"));
        let message = refuse(&|m| (m.qk_norm, m.feed_forward_bias) = (true, true));
        assert!(message.contains("qk_norm together with feed_forward_bias"), "{message}");
        let message = refuse(&|m| m.logit_softcap = Some(30.0));
        assert!(message.contains("logit_softcap 30"), "{message}");
        let message = refuse(&|m| (m.window, m.window_pattern) = (Some(8), Some("wf".to_owned())));
        assert!(message.contains("has window together with window_pattern"), "{message}");
        let message = refuse(&|m| (m.window, m.attention_bias) = (Some(8), AttentionBias::All));
        assert!(message.contains("attention_bias all together with window"), "{message}");
        let message = refuse(&|m| m.block = Some(kiln_model::PARALLEL_RESIDUAL.to_owned()));
        assert!(message.contains("has block parallel_residual"), "{message}");
    }
}
