//! A run with the same losses as the same run in PyTorch.
//!
//! `fixtures/reference_run/torch.json` is PyTorch's curve for the `config.toml` next to it, from the same
//! initial weights and the same tokens; `fixtures/reference_run_moe` has the same with experts.
//! `benches/peers/reference_run.py` wrote both.

use serde_json::Value as Json;

use crate::support::Workspace;

/// A configuration, and PyTorch's curve.
struct Reference {
    config: &'static str,
    torch: &'static str,
}

const DENSE: Reference = Reference {
    config: include_str!("../fixtures/reference_run/config.toml"),
    torch: include_str!("../fixtures/reference_run/torch.json"),
};

const EXPERTS: Reference = Reference {
    config: include_str!("../fixtures/reference_run_moe/config.toml"),
    torch: include_str!("../fixtures/reference_run_moe/torch.json"),
};
/// The dense run with `optim.kind = "muon"`.
const MUON: Reference =
    Reference { torch: include_str!("../fixtures/reference_run/torch_muon.json"), ..DENSE };

/// Largest relative difference of a loss. A different order of sums changes it by about 1e-6.
const LOSS_BOUND: f64 = 1e-4;

/// Largest relative difference of a gradient norm, which depends on a few large gradients. A different order
/// of sums changes it by about 1e-4 towards the end.
const NORM_BOUND: f64 = 1e-3;

#[test]
fn two_ranks_with_full_shard_train_as_pytorch_does() {
    assert_trains_as_pytorch(DENSE, 2, "FULL_SHARD", &[]);
}

/// One rank takes two micro-batches per step.
#[test]
fn one_rank_without_shards_trains_as_pytorch_does() {
    assert_trains_as_pytorch(DENSE, 1, "NO_SHARD", &[]);
}

/// The reference is `torch.optim.Muon`, computed in f32.
#[test]
fn muon_trains_as_pytorchs_does() {
    for (ranks, strategy) in [(2, "FULL_SHARD"), (1, "NO_SHARD")] {
        assert_trains_as_pytorch(MUON, ranks, strategy, &["--set", "optim.kind=muon"]);
    }
}

/// The two ranks' micro-batches, over each of which the experts are balanced, equal the micro-batches of one rank.
#[test]
fn experts_train_as_in_pytorch() {
    assert_trains_as_pytorch(EXPERTS, 2, "FULL_SHARD", &[]);
    assert_trains_as_pytorch(EXPERTS, 1, "NO_SHARD", &[]);
}

fn assert_trains_as_pytorch(reference: Reference, ranks: usize, strategy: &str, more: &[&str]) {
    let workspace = Workspace::new();
    workspace.write("reference.toml", reference.config);
    let (ranks, strategy) = (ranks.to_string(), format!("shard.strategy={strategy}"));
    let arguments = ["train", "reference.toml", "--out", "run", "--ranks", &ranks];
    let settings = ["--set", "data.path=text", "--set", &strategy];
    workspace.succeed(&[&arguments[..], &settings, more].concat());
    let torch: Json = serde_json::from_str(reference.torch).expect("JSON");
    assert_recorded_for_this_run(&workspace, &torch);

    let steps = workspace.steps("run");
    let (losses, norms) = (numbers(&torch["losses"]), numbers(&torch["grad_norms"]));
    assert_eq!((losses.len(), norms.len()), (steps.len(), steps.len()));
    assert!(losses[losses.len() - 1] < 0.5 * losses[0], "the recorded run has learned");
    for ((step, loss, norm), (torch_loss, torch_norm)) in steps.into_iter().zip(losses.into_iter().zip(norms))
    {
        let differs = |a: f64, b: f64, bound: f64| (a - b).abs() > bound * b.abs();
        assert!(!differs(loss, torch_loss, LOSS_BOUND), "step {step}: loss {loss}, PyTorch {torch_loss}");
        assert!(!differs(norm, torch_norm, NORM_BOUND), "step {step}: norm {norm}, PyTorch {torch_norm}");
    }
}

/// Fails if the curve was recorded for another run: for another configuration, or other data.
fn assert_recorded_for_this_run(workspace: &Workspace, torch: &Json) {
    let again = "record the curve again: benches/peers/reference_run.py --record FILE";
    let data = workspace.json("text/data.json");
    assert_eq!(data["train"]["sha256"], torch["data_sha256"], "the data has changed; {again}");
    let config: toml::Table = toml::from_str(&workspace.text("run/config.toml")).expect("TOML");
    let config = serde_json::to_value(config).expect("JSON");
    let sections = torch["config"].as_object().expect("sections");
    assert!(!sections.is_empty());
    for (section, keys) in sections {
        for (key, recorded) in keys.as_object().expect("keys") {
            assert_eq!(&config[section][key], recorded, "{section}.{key} has changed; {again}");
        }
    }
}

fn numbers(values: &Json) -> Vec<f64> {
    let values = values.as_array().expect("a list");
    values.iter().map(|value| value.as_f64().expect("a number")).collect()
}
