//! The values that your own program, `train/kiln/examples/own_metric.rs`, and the configuration add to
//! `metrics.jsonl`.

use serde_json::Value as Json;

use crate::support::{Workspace, example};

fn number(line: &Json, key: &str) -> f64 {
    line[key].as_f64().unwrap_or_else(|| panic!("{key} in {line}"))
}

/// Fails unless the values of the logged steps agree within 1e-4, the effect of a different order of sums.
fn assert_same(actual: &[Json], expected: &[Json]) {
    assert_eq!(actual.len(), expected.len());
    for (actual, expected) in actual.iter().zip(expected) {
        let (actual, expected) = (actual.as_object().expect("a line"), expected.as_object().expect("a line"));
        let keys = |line: &serde_json::Map<String, Json>| line.keys().cloned().collect::<Vec<_>>();
        assert_eq!(keys(actual), keys(expected));
        for (key, expected) in expected {
            if key.ends_with("_s") || ["mfu", "tflops", "peak_bytes"].contains(&key.as_str()) {
                continue;
            }
            let (actual, expected) = (actual[key].as_f64().expect(key), expected.as_f64().expect(key));
            assert!((actual - expected).abs() <= 1e-4 * expected.abs(), "{key}: {actual}, {expected}");
        }
    }
}

#[test]
fn metrics_of_a_program_are_logged_under_every_strategy() {
    let workspace = Workspace::new();
    let program = example("own_metric");
    let train = |out: &str, more: &[&str]| {
        let arguments = ["train", "run.toml", "--out", out, "--set", "model.feed_forward=watched"];
        let ended = workspace.run(&program, &[&arguments[..], more].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        workspace.metrics(out)
    };
    let expected = train("one", &["--ranks", "1"]);
    let first = &expected[0];
    assert!((number(first, "perplexity") / number(first, "loss").exp() - 1.0).abs() < 1e-12);
    assert!(number(first, "weight_norm") > number(first, "largest_embedding"));
    let active = [0, 1].map(|layer| number(first, &format!("layers.{layer}.ffn.active")));
    assert!(active.iter().all(|share| (0.2..0.8).contains(share)), "{active:?}");
    assert!((number(first, "layers.mean.ffn.active") - (active[0] + active[1]) / 2.0).abs() < 1e-12);
    assert!(first.get("cross_entropy").is_none() && first.get("grad_norm.embed").is_none());

    assert_same(&train("full", &["--ranks", "2"]), &expected);
    let again = ["--ranks", "4", "--set", "shard.recompute=block", "--set", "shard.strategy=NO_SHARD"];
    assert_same(&train("again", &again), &expected);
    // Steps that are not logged record nothing; the other steps are unchanged.
    let mut few = expected.clone();
    few.remove(1);
    assert_same(&train("few", &["--ranks", "1", "--set", "log.every=3"])[..], &few);
}

#[test]
fn a_program_with_metrics_has_every_command() {
    let workspace = Workspace::new();
    let succeed = |arguments: &[&str]| {
        let ended = workspace.run(&example("own_metric"), arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
    };
    let train = |out: &str, more: &[&str]| {
        let arguments =
            ["train", "run.toml", "--ranks", "2", "--out", out, "--set", "model.feed_forward=watched"];
        succeed(&[&arguments[..], more].concat());
        workspace.steps(out)
    };
    let full = train("full", &["--set", "checkpoint.every=2"]);
    let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
    assert_eq!(train("none", &none), full);
    assert_eq!(train("again", &["--resume", "full/checkpoints/fsdp_cpt2"]), full[2..]);
    succeed(&["eval", "--checkpoint", "full", "--ranks", "2"]);
    succeed(&["generate", "--checkpoint", "full", "--prompt", "a", "--max-tokens", "4"]);
    succeed(&["inspect", "full", "--verify"]);
}

#[test]
fn activations_gradients_and_the_z_loss_are_logged() {
    let workspace = Workspace::new();
    let train = |out: &str, more: &[&str]| {
        workspace.succeed(&[&["train", "run.toml", "--out", out][..], more].concat());
        workspace.metrics(out)
    };
    let plain = train("plain", &[]);
    let logged = train("logged", &["--set", "log.activations=true", "--set", "log.gradients=true"]);
    assert_eq!(workspace.steps("logged"), workspace.steps("plain"), "logging changes nothing");
    assert!(plain[0].as_object().expect("a line").keys().all(|key| !key.contains('.')));
    for line in logged.iter().filter(|line| line.get("loss").is_some()) {
        let modules = ["embed", "layers.0", "layers.1", "head"];
        let norms = modules.iter().filter_map(|module| line.get(format!("grad_norm.{module}"))?.as_f64());
        let norm = norms.map(|norm| norm * norm).sum::<f64>().sqrt();
        assert!((norm / number(line, "grad_norm") - 1.0).abs() < 1e-6, "{line}");
        for module in ["embed", "layers.0", "layers.1"] {
            assert!(number(line, &format!("activation_rms.{module}")) > 0.0);
        }
    }
    let z_loss = train("z-loss", &["--set", "train.z_loss=0.01"]);
    let line = &z_loss[0];
    let sum = number(line, "cross_entropy") + number(line, "losses.z_loss");
    assert!((sum - number(line, "loss")).abs() < 1e-12, "{line}");
    // The logits of a new model are near 0.
    let expected = 0.01 * (crate::support::VOCAB as f64).ln().powi(2);
    assert!((number(line, "losses.z_loss") / expected - 1.0).abs() < 0.05, "{line}");
    assert!((number(line, "cross_entropy") / number(&plain[0], "loss") - 1.0).abs() < 1e-6, "{line}");
}

#[test]
fn a_model_with_capped_logits_has_every_command_and_no_hugging_face_name() {
    let workspace = Workspace::new();
    let cap = ["--set", "model.logit_softcap=5.0"];
    workspace.succeed(&[&["train", "run.toml", "--out", "run"][..], &cap].concat());
    let said = workspace.succeed(&["eval", "--checkpoint", "run"]);
    assert!(said.contains("loss"), "{said}");
    workspace.succeed(&["generate", "--checkpoint", "run", "--prompt", "a", "--max-tokens", "4"]);
    let refused = workspace.kiln(&["export", "--checkpoint", "run", "--out", "exported"]);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    assert!(refused.stderr.contains("logit_softcap 5"), "{refused:?}");
    let change = ["--set", "init.from=run", "--set", "model.logit_softcap=6.0"];
    let other = workspace.kiln(&[&["train", "run.toml", "--out", "other"][..], &change].concat());
    assert!(other.stderr.contains("model.logit_softcap is 5 there and 6 here"), "{other:?}");
}

/// A step of the stock run whose batch is the small one has the norm that the loop measures, and measuring changes
/// nothing.
#[test]
fn gradient_noise_is_measured_between_the_steps_of_the_stock_run() {
    let workspace = Workspace::new();
    let program = example("gradient_noise");
    let train = |out: &str, before: &[&str], more: &[&str]| {
        let run = ["train", "run.toml", "--out", out, "--set", "experiment.small_batch=4"];
        let ended = workspace.run(&program, &[before, &run, more].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let mut lines = workspace.metrics(out);
        lines.retain(|line| line.get("loss").is_some());
        let values = |line: &Json| {
            ["loss", "grad_norm", "small_grad_norm", "noise_scale"].map(|key| number(line, key).to_bits())
        };
        (lines.iter().map(values).collect::<Vec<_>>(), lines)
    };
    let (full, lines) = train("full", &[], &["--set", "checkpoint.every=2"]);
    workspace.succeed(&["train", "run.toml", "--out", "stock"]);
    assert_eq!(workspace.steps("full"), workspace.steps("stock"));
    workspace.succeed(&["train", "run.toml", "--out", "small", "--set", "train.global_batch=4"]);
    assert_eq!(number(&lines[0], "small_grad_norm"), workspace.steps("small")[0].2);
    for line in &lines {
        let [squared, variance] = ["gradient_squared", "gradient_variance"].map(|key| number(line, key));
        for (norm, samples) in [("grad_norm", 8.0), ("small_grad_norm", 4.0)] {
            let expected = number(line, norm).powi(2);
            let sum = squared + variance / samples;
            assert!((sum - expected).abs() < 1e-9 * expected, "{norm}: {sum} {expected}");
        }
    }

    let none = ["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"];
    assert_eq!(train("none", &[], &none).0, full);
    assert_eq!(train("grad_op", &[], &["--set", "shard.strategy=SHARD_GRAD_OP"]).0, full);
    assert_eq!(train("processes", &["launch", "--nproc-per-node", "2", "--"], &[]).0, full);
    assert_eq!(train("again", &[], &["--resume", "full/checkpoints/fsdp_cpt2"]).0, full[2..]);
    // Steps that are not logged are not measured.
    let (few, _) = train("few", &[], &["--set", "log.every=3"]);
    assert_eq!(few, [full[0], full[2], full[3]]);
}

#[test]
fn gradient_noise_needs_a_smaller_batch() {
    let workspace = Workspace::new();
    let run = ["train", "run.toml", "--out", "run", "--set", "experiment.small_batch=8"];
    let ended = workspace.run(&example("gradient_noise"), &run);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("must be smaller than train.global_batch"), "{ended:?}");
}
