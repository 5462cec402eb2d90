//! Folders in the layout of Hugging Face that cannot be read, and outputs that cannot be written.

use serde_json::{Value as Json, json};

use crate::hugging_face::copy_fixture;
use crate::messages::Messages;
use crate::support::Workspace;

const EXPORT: [&str; 5] = ["export", "--checkpoint", "hf", "--out", "new"];
const IMPORT: [&str; 5] = ["import", "--hf", "hf", "--out", "new"];
const INDEX: &str = "hf/model.safetensors.index.json";
const SHARD: &str = "hf/model-00002-of-00003.safetensors";

fn with_fixture(name: &str) -> Workspace {
    let workspace = Workspace::new();
    copy_fixture(&workspace, name, "hf");
    workspace
}

/// Changes keys of a JSON file; null removes a key.
fn change(workspace: &Workspace, file: &str, changes: &Json) {
    let mut json = workspace.json(file);
    for (key, value) in changes.as_object().unwrap() {
        json.as_object_mut().unwrap().remove(key);
        if !value.is_null() {
            json[key] = value.clone();
        }
    }
    workspace.write(file, json.to_string());
}

/// Puts a tensor into a file, replacing the tensor of the same name; `None` removes it.
fn put(workspace: &Workspace, file: &str, name: &str, tensor: Option<(&str, &[usize])>) {
    let bytes = workspace.read(file);
    let tensors = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let mut entries = serde_json::Map::new();
    let mut data = Vec::new();
    let mut add = |name: &str, dtype: &str, shape: &[usize], bytes: &[u8]| {
        let offsets = [data.len(), data.len() + bytes.len()];
        data.extend_from_slice(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": offsets});
        entries.insert(name.to_owned(), entry);
    };
    for (other, view) in tensors.tensors() {
        if other != name {
            add(&other, &format!("{:?}", view.dtype()), view.shape(), view.data());
        }
    }
    if let Some((dtype, shape)) = tensor {
        let width = if dtype == "F64" { 8 } else { 4 };
        add(name, dtype, shape, &vec![0; shape.iter().product::<usize>() * width]);
    }
    let header = Json::Object(entries).to_string();
    let length = (header.len() as u64).to_le_bytes();
    workspace.write(file, [&length[..], header.as_bytes(), &data].concat());
}

#[test]
fn models_that_are_others_are_refused() {
    let mut messages = Messages::default();
    let mut refused = |title: &str, fixture: &str, changes: Json| {
        let workspace = with_fixture(fixture);
        change(&workspace, "hf/config.json", &changes);
        messages.refused(title, &workspace, &IMPORT);
    };
    let mut llama = |title: &str, changes: Json| refused(title, "llama_gqa", changes);
    llama("another architecture", json!({"architectures": ["GemmaForCausalLM"]}));
    llama("no head", json!({"architectures": ["LlamaModel"]}));
    llama("another type", json!({"architectures": null, "model_type": "gpt2"}));
    llama("neither", json!({"architectures": null, "model_type": null}));
    llama("another activation", json!({"hidden_act": "gelu"}));
    llama("parts of matrices", json!({"pretraining_tp": 2}));
    llama("quantisation", json!({"quantization_config": {"quant_method": "gptq", "bits": 4}}));
    llama("experts", json!({"num_local_experts": 8}));
    let rope = |scaling: Json| json!({"rope_scaling": scaling});
    llama("yarn", rope(json!({"rope_type": "yarn", "factor": 4.0})));
    llama("dynamic, as of old", rope(json!({"type": "dynamic", "factor": 4.0})));
    llama("longrope", json!({"rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4}}));
    llama("linear without a factor", rope(json!({"type": "linear"})));
    llama("no object", rope(json!([1])));
    llama("a part of each head", json!({"partial_rotary_factor": 0.5}));
    llama("layers that differ", json!({"rope_parameters": {"full_attention": {}}}));
    llama("no width", json!({"hidden_size": null}));
    llama("width as text", json!({"hidden_size": "16"}));
    llama("width below zero", json!({"hidden_size": -16}));
    llama("base as text", json!({"rope_parameters": {"rope_theta": "big"}}));
    llama("tied as a number", json!({"tie_word_embeddings": 1}));
    llama("heads that do not divide", json!({"num_key_value_heads": 3}));
    llama("no heads", json!({"num_attention_heads": 0, "num_key_value_heads": 0}));
    llama("attention to later positions", json!({"is_causal": false}));
    llama("the same by another key", json!({"use_bidirectional_attention": true}));
    llama("no context", json!({"max_position_embeddings": 0}));
    let sliding = || json!(["full_attention", "sliding_attention"]);
    refused("sliding layers without a window", "qwen3", json!({"layer_types": sliding()}));
    refused(
        "layers of another kind",
        "qwen3",
        json!({"layer_types": ["full_attention", "chunked_attention"]}),
    );
    refused("a layer too few", "qwen2", json!({"layer_types": ["full_attention"]}));
    refused("layers of Mistral", "mistral", json!({"sliding_window": 32, "layer_types": sliding()}));
    refused("a window of nothing", "mistral", json!({"sliding_window": 0}));
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn weights_that_do_not_fit_are_refused() {
    let mut messages = Messages::default();
    let mut refused = |title: &str, fixture: &str, damage: &dyn Fn(&Workspace)| {
        let workspace = with_fixture(fixture);
        damage(&workspace);
        messages.refused(title, &workspace, &EXPORT);
    };
    const MODEL: &str = "hf/model.safetensors";
    refused("missing tensor", "llama_gqa", &|w| put(w, MODEL, "model.norm.weight", None));
    refused("extra tensor", "llama_gqa", &|w| {
        put(w, MODEL, "model.layers.0.mlp.up_proj.bias", Some(("F32", &[24])));
    });
    refused("another shape", "llama_gqa", &|w| {
        put(w, MODEL, "lm_head.weight", Some(("F32", &[41, 16])));
    });
    refused("not transposed", "llama_gqa", &|w| {
        put(w, MODEL, "model.layers.1.mlp.up_proj.weight", Some(("F32", &[16, 24])));
    });
    refused("another dtype", "llama_gqa", &|w| {
        put(w, MODEL, "model.norm.weight", Some(("F64", &[16])));
    });
    refused("untied without a head", "llama_tied", &|w| {
        change(w, "hf/config.json", &json!({"tie_word_embeddings": false}));
    });
    refused("more layers", "llama_gqa", &|w| {
        change(w, "hf/config.json", &json!({"num_hidden_layers": 3}));
    });
    refused("many more layers", "llama_gqa", &|w| {
        change(w, "hf/config.json", &json!({"num_hidden_layers": 4000}));
    });
    refused("layers beyond all bounds", "llama_gqa", &|w| {
        change(w, "hf/config.json", &json!({"num_hidden_layers": 1_u64 << 40}));
    });
    refused("index to elsewhere", "llama_shards", &|w| {
        w.replace(INDEX, "model-00002-of-00003", "../model-00002-of-00003");
    });
    refused("index to the root", "llama_shards", &|w| {
        w.replace(INDEX, "model-00002-of-00003", "/model-00002-of-00003");
    });
    refused("index to another format", "llama_shards", &|w| {
        w.replace(INDEX, "model-00002-of-00003.safetensors", "model-00002-of-00003.bin");
    });
    refused("index without files", "llama_shards", &|w| w.write(INDEX, "{}"));
    refused("no weights", "llama_gqa", &|w| w.remove(MODEL));
    refused("pickled weights", "llama_gqa", &|w| {
        w.remove(MODEL);
        w.write("hf/pytorch_model.bin", "x");
    });
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn damaged_folders_fail() {
    let mut messages = Messages::default();
    let mut fails = |title: &str, fixture: &str, damage: &dyn Fn(&Workspace)| {
        let workspace = with_fixture(fixture);
        damage(&workspace);
        let before = workspace.tree();
        messages.fails(title, &workspace, &IMPORT);
        assert!(workspace.tree() == before, "{title}");
    };
    fails("truncated shard", "llama_shards", &|w| {
        let bytes = w.read(SHARD);
        w.write(SHARD, &bytes[..bytes.len() - 1]);
    });
    fails("longer shard", "llama_shards", &|w| w.write(SHARD, [w.read(SHARD), vec![0]].concat()));
    fails("empty shard", "llama_shards", &|w| w.write(SHARD, ""));
    fails("missing shard", "llama_shards", &|w| w.remove(SHARD));
    fails("header longer than the file", "llama_shards", &|w| {
        w.write(SHARD, [&u64::MAX.to_le_bytes()[..], b"{}"].concat());
    });
    fails("tensor missing in its shard", "llama_shards", &|w| {
        put(w, SHARD, "model.layers.0.post_attention_layernorm.weight", None);
    });
    fails("tensor in two shards", "llama_shards", &|w| {
        put(w, SHARD, "model.embed_tokens.weight", Some(("F32", &[40, 16])));
    });
    fails("configuration that is not JSON", "llama_gqa", &|w| w.write("hf/config.json", "{"));
    fails("configuration that is not an object", "llama_gqa", &|w| w.write("hf/config.json", "[]"));
    fails("index that is not JSON", "llama_shards", &|w| w.write(INDEX, "x"));
    fails("generation that is not JSON", "llama_gqa", &|w| {
        w.write("hf/generation_config.json", "x");
    });
    insta::assert_snapshot!(messages.finish());
}

#[test]
fn commands_that_cannot_be_are_refused() {
    let mut messages = Messages::default();
    let workspace = with_fixture("llama_gqa");
    workspace.write("taken/notes.txt", "mine");
    std::fs::create_dir(workspace.path("empty")).unwrap();
    let mut refused = |title: &str, arguments: &[&str]| {
        messages.refused(title, &workspace, arguments);
    };
    refused("export into a folder in use", &["export", "--checkpoint", "hf", "--out", "taken"]);
    refused("export into an empty folder", &["export", "--checkpoint", "hf", "--out", "empty"]);
    refused("export over a file", &["export", "--checkpoint", "hf", "--out", "run.toml"]);
    refused("import into a folder in use", &["import", "--hf", "hf", "--out", "taken"]);
    refused("import from nowhere", &["import", "--hf", "none", "--out", "new"]);
    refused("import from a folder of data", &["import", "--hf", "data", "--out", "new"]);
    refused("import from nothing", &["import", "--out", "new"]);
    refused("import twice", &["import", "--hf", "hf", "--repo", "a/b", "--out", "new"]);
    refused("repository without an owner", &["import", "--repo", "gpt2", "--out", "new"]);
    refused("repository elsewhere", &["import", "--repo", "a/../b", "--out", "new"]);
    refused("revision of a folder", &["import", "--hf", "hf", "--revision", "x", "--out", "new"]);
    refused("download into a folder in use", &["import", "--repo", "a/b", "--out", "taken"]);
    refused("export from nowhere", &["export", "--checkpoint", "none", "--out", "new"]);
    refused("no room", &[&EXPORT[..], &["--max-shard-gb", "0"]].concat());
    refused("another dtype", &[&EXPORT[..], &["--dtype", "int8"]].concat());
    let init = ["train", "run.toml", "--out", "new", "--set", "init.from=hf"];
    refused("start from another vocabulary", &init);
    refused("start from another model", &[&init[..], &["--set", "model.vocab_size=257"]].concat());
    insta::assert_snapshot!(messages.finish());
}

#[test]
#[cfg(not(feature = "hub"))]
fn builds_without_the_hub_say_so() {
    let mut messages = Messages::default();
    let import = ["import", "--repo", "a/b", "--revision", "x", "--out", "new"];
    messages.refused("download without the feature", &Workspace::new(), &import);
    insta::assert_snapshot!(messages.finish());
}

/// The message names a value that the dtype cannot hold, and no output remains.
#[test]
fn values_out_of_range_fail() {
    let mut messages = Messages::default();
    let workspace = with_fixture("llama_gqa");
    let file = "hf/model.safetensors";
    let mut bytes = workspace.read(file);
    let end = bytes.len();
    bytes[end - 4..].copy_from_slice(&1e6_f32.to_le_bytes());
    workspace.write(file, bytes);
    let f16 = [&EXPORT[..], &["--dtype", "f16"]].concat();
    messages.fails("too large for f16", &workspace, &f16);
    assert!(!workspace.path("new").exists());
    workspace.succeed(&[&EXPORT[..], &["--dtype", "bf16"]].concat());
    insta::assert_snapshot!(messages.finish());
}

/// A model that fits no architecture is refused before anything is written.
#[test]
fn models_without_an_architecture_are_refused() {
    let mut messages = Messages::default();
    let workspace = with_fixture("llama_gqa");
    workspace.succeed(&IMPORT);
    for (from, to) in [
        ("\"qk_norm\": false", "\"qk_norm\": true"),
        ("\"attention_bias\": \"none\"", "\"attention_bias\": \"qkv\""),
    ] {
        workspace.replace_in_manifest("new", from, to);
    }
    let export = ["export", "--checkpoint", "new", "--out", "out"];
    messages.refused("qk_norm with biases of three", &workspace, &export);
    insta::assert_snapshot!(messages.finish());
}
