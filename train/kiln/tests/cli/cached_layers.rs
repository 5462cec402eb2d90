//! Your own programs whose layers keep a state or a latent in the cache of `generate`:
//! `train/kiln/examples/gated_linear_attention.rs` and `train/kiln/examples/latent_attention.rs`.

#[allow(dead_code, reason = "a program")]
#[path = "../../examples/gated_linear_attention.rs"]
mod gated_linear_attention;
#[allow(dead_code, reason = "a program")]
#[path = "../../examples/latent_attention.rs"]
mod latent_attention;

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_model::{Decoder, Key, KeyValueCache, Layers, ModelConfig, decoder};

use self::gated_linear_attention::GatedLinearAttention;
use self::latent_attention::LatentAttention;
use crate::support::{Workspace, example, tokenizer};

const PROGRAMS: [(&str, [&str; 2]); 2] = [
    ("gated_linear_attention", ["--set", "model.attention=gated_linear"]),
    ("latent_attention", ["--set", "model.attention=latent"]),
];

fn succeed(workspace: &Workspace, program: &str, arguments: &[&str]) -> String {
    let ended = workspace.run(&example(program), arguments);
    assert_eq!(ended.code, Some(0), "{program} {arguments:?}: {ended:?}");
    ended.stdout
}

#[test]
fn strategies_and_resumed_runs_have_equal_losses() {
    for (program, layer) in PROGRAMS {
        let workspace = Workspace::new();
        let train = |out: &str, more: &[&str]| {
            let arguments = ["train", "run.toml", "--ranks", "2", "--out", out];
            succeed(&workspace, program, &[&arguments[..], &layer, more].concat());
            workspace.steps(out)
        };
        let full = train("full", &["--set", "checkpoint.every=2"]);
        let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
        assert_eq!(train("none", &none), full, "{program}");
        assert_eq!(train("again", &["--resume", "full/checkpoints/fsdp_cpt2"]), full[2..], "{program}");
        let launch = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--out", "processes"];
        succeed(&workspace, program, &[&launch[..], &layer].concat());
        assert_eq!(workspace.steps("processes"), full, "{program}");
        let recompute = ["--set", "shard.recompute=block"];
        assert_eq!(train("recompute", &recompute), full, "{program}");
    }
}

/// Text generated token by token equals text whose every token is computed with an empty cache.
#[test]
fn a_cache_changes_no_token() {
    for (program, layer) in PROGRAMS {
        let workspace = Workspace::new();
        let ids = tokenizer().encode(&"abcdefg".repeat(250)).expect("ids");
        let ids: Vec<u16> = ids.into_iter().map(|id| u16::try_from(id).expect("a small id")).collect();
        workspace.write_data("data", &ids);
        workspace.config("run.toml", &[("train.steps", "60"), ("optim.lr", "3e-2")]);
        succeed(&workspace, program, &[&["train", "run.toml", "--out", "run"][..], &layer].concat());
        let generate = |prompt: &str, tokens: &str| {
            let arguments = ["generate", "--checkpoint", "run", "--temperature", "0", "--max-tokens", tokens];
            let text = succeed(&workspace, program, &[&arguments[..], &["--prompt", prompt]].concat());
            text.trim_end().to_owned()
        };
        let whole = generate("abc", "5");
        let mut text = "abc".to_owned();
        for _ in 0..5 {
            text = generate(&text, "1");
        }
        assert_eq!(text, whole, "{program}");
        assert_eq!(whole, "abcdefga", "{program}");
    }
}

#[test]
fn cached_passes_have_the_logits_of_a_whole_pass() {
    let layers = Layers::default()
        .attention("gated_linear", GatedLinearAttention::new)
        .attention("latent", LatentAttention::new);
    for name in ["gated_linear", "latent"] {
        let config = ModelConfig {
            vocab_size: 50,
            d_model: 32,
            layers: 2,
            heads: 4,
            d_ff: 24,
            // Large enough for attention to matter.
            init_std: 0.3,
            attention: name.to_owned(),
            ..ModelConfig::preset("10m").expect("a preset")
        };
        let model = Decoder::new(&layers, &config, Key::new(5), &Device::flex()).expect("a model");
        for chunks in [&[1; 12][..], &[7, 1, 1, 5, 2, 16, 1], &[250, 1, 48, 1]] {
            assert_chunks_match(name, &model, chunks);
        }
    }
}

/// Asserts that the logits after each of `chunks` match the logits of one pass over the whole sequence, relative to
/// the largest logit.
fn assert_chunks_match(name: &str, model: &Decoder, chunks: &[usize]) {
    let (batch, seq) = (2, chunks.iter().sum());
    let ids: Vec<i32> = (0..(batch * seq) as u64).map(|i| (Key::new(1).at(i) % 50) as i32).collect();
    let tokens = Tensor::<2, Int>::from_data(TensorData::new(ids, [batch, seq]), &Device::flex());
    let whole = decoder::logits(model, tokens.clone());
    let cache = KeyValueCache::new(seq);
    for chunk in chunks {
        let new = tokens.clone().narrow(1, cache.len(), *chunk);
        let logits = decoder::next_logits(model, new, &cache).expect("room");
        let expected = whole.clone().narrow(1, cache.len() - 1, 1).squeeze_dim::<2>(1);
        let largest = expected.clone().abs().max().into_scalar::<f32>();
        let difference = (logits - expected).abs().max().into_scalar::<f32>();
        assert!(difference <= 1e-5 * largest, "{name} after {}: {difference} of {largest}", cache.len());
    }
}
