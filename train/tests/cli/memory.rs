//! The least memory of a run against what runs take and what there is.

use kiln::device;
use kiln::run::LeastMemory;
use kiln::sharded::module_shapes;
use kiln_model::{Decoder, Key, Layers};
use kiln_shard::Optimizer;

use crate::messages::Messages;
use crate::support::{VOCAB, Workspace};

/// Large enough that buffers are what is counted.
const MODEL: [(&str, &str); 4] =
    [("model.d_model", "64"), ("model.d_ff", "192"), ("model.layers", "4"), ("train.steps", "3")];

/// What the bound says of a run, and what the run reports.
fn bound_and_peak(changes: &[(&str, &str)]) -> (f64, f64) {
    let workspace = Workspace::new();
    let config = workspace.config("run.toml", &[&MODEL, changes].concat());
    let model = config.model.resolve(Some(VOCAB)).expect("a model");
    let modules = module_shapes(
        &Decoder::new(&Layers::default(), &model, Key::new(0), &device::plain()).expect("layers"),
    );
    let least = LeastMemory::of_run(&config, &model, &modules, &Optimizer::default(), false, true).per_rank();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let peaks =
        workspace.metrics("run").iter().filter_map(|line| line["peak_bytes"].as_f64()).fold(0.0, f64::max);
    (least as f64, peaks)
}

/// Nothing that fits is refused: no run takes less than the bound.
#[test]
fn no_run_takes_less_than_the_least() {
    let strategies = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_GRAD_OP"];
    for strategy in strategies {
        for recompute in ["'none'", "'block'"] {
            // What counts most: state, gradients of earlier micro-batches, inputs of blocks.
            for (global_batch, micro_batch, seq_len) in
                [("2", "1", "8"), ("16", "4", "8"), ("32", "16", "64")]
            {
                let name = format!("'{strategy}'");
                let mut changes = vec![
                    ("shard.strategy", name.as_str()),
                    ("shard.recompute", recompute),
                    ("train.global_batch", global_batch),
                    ("train.micro_batch", micro_batch),
                    ("data.seq_len", seq_len),
                ];
                if strategy.starts_with("HYBRID") {
                    changes.push(("shard.shard_size", "1"));
                }
                let (least, peak) = bound_and_peak(&changes);
                println!("{strategy} {recompute} {micro_batch}: {least} of {peak}");
                assert!(least <= peak, "{changes:?}: {least} and {peak}");
                assert!(least > 0.2 * peak, "{changes:?}: {least} says nothing of {peak}");
            }
        }
    }
    for changes in [
        &[("precision.compute", "'bf16'")][..],
        &[("precision.compute", "'bf16'"), ("train.ranks", "1")],
        &[("train.ranks", "1")],
        &[("train.ranks", "1"), ("shard.communicate_alone", "true")],
        &[("train.steps", "1"), ("optim.warmup_steps", "1")],
        &[("shard.reshard", "'always'"), ("model.tie_embeddings", "false")],
        &[("shard.reshard", "'never'")],
        &[("train.freeze", "['embed_tokens.', 'layers.0.', 'layers.2.']")],
        &[("train.freeze", "['layers.']"), ("shard.recompute", "'block'")],
    ] {
        let (least, peak) = bound_and_peak(changes);
        println!("{changes:?}: {least} of {peak}");
        assert!(least <= peak, "{changes:?}: {least} and {peak}");
    }
}

/// Sizes that no machine has are refused, and a size that a user gives takes the place of the machine's.
#[test]
fn runs_that_cannot_fit_are_refused() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    let refused = |messages: &mut Messages, title: &str, memory: &str, changes: &[(&str, &str)]| {
        workspace.config("run.toml", &[changes, &[("device.memory", memory)]].concat());
        messages.refused(title, &workspace, &["train", "run.toml", "--out", "run"]);
    };
    let large = [("model.d_model", "4096"), ("model.d_ff", "11008"), ("model.layers", "32")];
    refused(&mut messages, "a large model", "'64GiB'", &large);
    let replicated = [&large[..], &[("shard.strategy", "'NO_SHARD'")]].concat();
    refused(&mut messages, "a large model, replicated", "'64GiB'", &replicated);
    refused(
        &mut messages,
        "a large micro-batch",
        "'1.5 GB'",
        &[("train.micro_batch", "1000000"), ("train.global_batch", "4000000")],
    );
    refused(&mut messages, "a size of nothing", "'1B'", &[]);
    // Before the data are looked at, which are not there.
    refused(&mut messages, "no data either", "'64GiB'", &[&large[..], &[("data.path", "'none'")]].concat());
    // Numbers beyond all counting.
    let most = "9000000000000000000";
    refused(&mut messages, "a mistyped number", "'64GiB'", &[("model.layers", most)]);
    refused(
        &mut messages,
        "several mistyped numbers",
        "'64GiB'",
        &[("model.d_ff", most), ("model.vocab_size", most)],
    );
    workspace.config("run.toml", &[]);
    let arguments = ["train", "run.toml", "--out", "run", "--set", "device.memory=64"];
    messages.refused("a size without a unit", &workspace, &arguments);
    let arguments = ["train", "run.toml", "--out", "run", "--set", "device.memory=much"];
    messages.refused("no size", &workspace, &arguments);
    let bench = ["bench", "strategies", "--config", "run.toml", "--ranks", "2"];
    workspace.config("run.toml", &[("device.memory", "'1KB'")]);
    messages.refused("a benchmark", &workspace, &bench);
    insta::assert_snapshot!(messages.finish());

    workspace.config("run.toml", &[("device.memory", "'1GiB'")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
}

/// Otherwise it is refused because its data have not been prepared.
#[test]
fn the_largest_preset_is_refused_where_it_cannot_fit() {
    let memory = device::Memory::of_machine().expect("Linux");
    let path = crate::presets::folder().join("7b.toml");
    let workspace = Workspace::new();
    let config = path.to_str().expect("UTF-8");
    let ended = workspace.kiln(&["train", config, "--out", "run"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let refused = ended.stderr.contains("error: this run takes at least 102.4 GiB of memory");
    assert_eq!(refused, memory.total < 102 << 30, "{ended:?}");
}
