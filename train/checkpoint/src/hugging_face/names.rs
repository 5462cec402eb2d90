//! Names of weights in the Hugging Face layout.
//!
//! Linear maps are `[d_in, d_out]` in Kiln and `[d_out, d_in]` in PyTorch, so their matrices are transposed. Both
//! rotate element `j` of a head with element `j + head_dim / 2`, so queries and keys need no permutation.

#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) struct HuggingFaceName {
    pub(crate) name: String,
    /// True if the matrix in the file is transposed.
    pub(crate) transposed: bool,
}

/// Kiln's name of the embedding, which is also the head of a tied model.
const EMBEDDING: &str = "embed_tokens.weight";
pub(super) const EMBEDDING_THERE: &str = "model.embed_tokens.weight";
pub(super) const HEAD: &str = "lm_head.weight";

/// Returns the names of the weight `kiln` in the Hugging Face layout: one, or one per expert in order.
pub(crate) fn hugging_face_names(kiln: &str, shape: &[usize]) -> Option<Vec<HuggingFaceName>> {
    let stacked = kiln.rsplit_once(EXPERTS).filter(|(_, projection)| PROJECTIONS.contains(projection));
    let (Some((ffn, projection)), [experts, _, _]) = (stacked, shape) else {
        return hugging_face_name(kiln).map(|name| vec![name]);
    };
    let of_expert = |expert: usize| {
        let mut there = hugging_face_name(&format!("{ffn}.{projection}.weight"))?;
        there.name = there.name.replace(".mlp.", &format!(".mlp.experts.{expert}."));
        Some(there)
    };
    (0..*experts).map(of_expert).collect()
}

/// Separates the layer and the projection in the name of a weight that stacks all experts.
const EXPERTS: &str = ".experts.";

const PROJECTIONS: [&str; 3] = ["gate_proj", "up_proj", "down_proj"];

fn hugging_face_name(kiln: &str) -> Option<HuggingFaceName> {
    let plain = |name: String| Some(HuggingFaceName { name, transposed: false });
    match kiln {
        EMBEDDING | "norm.weight" => return plain(format!("model.{kiln}")),
        HEAD => return Some(HuggingFaceName { name: kiln.to_owned(), transposed: true }),
        _ => {}
    }
    let (layer, inner) = kiln.strip_prefix("layers.")?.split_once('.')?;
    // Accepts only the form that `to_string` writes: `layers.01` is not a layer.
    if layer.parse::<usize>().ok()?.to_string() != layer {
        return None;
    }
    let (module, parameter) = inner.rsplit_once('.')?;
    let module = match module {
        "attention_norm" => "input_layernorm",
        "ffn_norm" => "post_attention_layernorm",
        "attention.q_proj" => "self_attn.q_proj",
        "attention.k_proj" => "self_attn.k_proj",
        "attention.v_proj" => "self_attn.v_proj",
        "attention.o_proj" => "self_attn.o_proj",
        "attention.q_norm" => "self_attn.q_norm",
        "attention.k_norm" => "self_attn.k_norm",
        "ffn.gate_proj" => "mlp.gate_proj",
        "ffn.up_proj" => "mlp.up_proj",
        "ffn.down_proj" => "mlp.down_proj",
        "ffn.router" => "mlp.gate",
        _ => return None,
    };
    let has_bias = module.ends_with("_proj");
    let is_map = has_bias || module == "mlp.gate";
    let known = parameter == "weight" || (has_bias && parameter == "bias");
    known.then(|| HuggingFaceName {
        name: format!("model.layers.{layer}.{module}.{parameter}"),
        transposed: is_map && parameter == "weight",
    })
}

/// Returns the name in PEFT's layout of the parameter `kiln` of an adapter.
pub(crate) fn adapter_name(kiln: &str) -> Option<HuggingFaceName> {
    let (map, part) = kiln.rsplit_once(".lora.")?;
    let part = match part {
        "a" => "lora_A",
        "b" => "lora_B",
        _ => return None,
    };
    let map = hugging_face_name(&format!("{map}.weight"))?.name;
    let map = map.strip_suffix(".weight")?;
    Some(HuggingFaceName { name: format!("base_model.model.{map}.{part}.weight"), transposed: true })
}

/// Reports whether the tensor `name` is a table that can be computed, found in older files, instead of a weight.
pub(super) fn is_buffer(name: &str) -> bool {
    name.ends_with(".rotary_emb.inv_freq")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_matrices_of_maps_are_transposed() {
        for (kiln, expected, transposed) in [
            ("embed_tokens.weight", "model.embed_tokens.weight", false),
            ("norm.weight", "model.norm.weight", false),
            ("lm_head.weight", "lm_head.weight", true),
            ("layers.0.attention_norm.weight", "model.layers.0.input_layernorm.weight", false),
            ("layers.7.ffn_norm.weight", "model.layers.7.post_attention_layernorm.weight", false),
            ("layers.12.attention.o_proj.weight", "model.layers.12.self_attn.o_proj.weight", true),
            ("layers.1.attention.q_proj.bias", "model.layers.1.self_attn.q_proj.bias", false),
            ("layers.1.attention.k_norm.weight", "model.layers.1.self_attn.k_norm.weight", false),
            ("layers.3.ffn.down_proj.weight", "model.layers.3.mlp.down_proj.weight", true),
            ("layers.3.ffn.router.weight", "model.layers.3.mlp.gate.weight", true),
        ] {
            let found = hugging_face_names(kiln, &[4, 3]).unwrap();
            assert_eq!(found, [HuggingFaceName { name: expected.to_owned(), transposed }], "{kiln}");
        }
    }

    #[test]
    fn each_expert_has_a_name() {
        let found = hugging_face_names("layers.5.ffn.experts.up_proj", &[2, 3, 4]).unwrap();
        let expected = [0, 1].map(|expert| HuggingFaceName {
            name: format!("model.layers.5.mlp.experts.{expert}.up_proj.weight"),
            transposed: true,
        });
        assert_eq!(found, expected);
    }

    #[test]
    fn other_weights_have_no_name() {
        for name in [
            "",
            "norm.bias",
            "layers.0.attention_norm.bias",
            "layers.x.ffn_norm.weight",
            "layers.01.ffn_norm.weight",
            "layers.0.ffn.router.bias",
            "layers.0.ffn.experts.router",
            "layers.0.ffn.experts.gate_proj",
            "layers.0.ffn.experts.gate_proj.weight",
            "layers.x.ffn.experts.gate_proj",
            "layers.0.ffn.shared_expert.gate_proj.weight",
            "layers.0.ffn.weight",
            "layers.0.weight",
            "layers.0",
        ] {
            assert_eq!(hugging_face_names(name, &[4, 3]), None, "{name}");
        }
    }
}
