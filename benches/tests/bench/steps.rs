//! `kiln-bench step`, and `kiln-bench gpu` on devices that every machine has.

use burn::module::Module;
use burn::tensor::Device;
use kiln_model::{Decoder, Key, Layers};
use serde_json::Value;

use crate::messages::Messages;
use crate::support::Workspace;

/// Returns the output of `kiln-bench step` for the tiny model, with more arguments.
fn step(workspace: &Workspace, more: &[&str]) -> String {
    workspace.config("bench.toml", &[("model.vocab_size", "300")]);
    let arguments = ["step", "--config", "bench.toml", "--steps", "3", "--warmup", "1"];
    workspace.succeed(&[&arguments[..], more].concat())
}

fn numbers(value: &Value) -> Vec<f64> {
    value.as_array().expect("a list").iter().map(|x| x.as_f64().expect("a number")).collect()
}

#[test]
fn steps_are_timed() {
    let workspace = Workspace::new();
    let said = step(&workspace, &["--json", "--set", "shard.strategy=NO_SHARD"]);
    assert_eq!(said.lines().count(), 1, "one line: {said}");
    let report: Value = serde_json::from_str(&said).expect("JSON");
    let model: kiln_model::ModelConfig = serde_json::from_value(report["model"].clone()).expect("a model");
    let decoder = Decoder::new(&Layers::default(), &model, Key::new(0), &Device::flex()).expect("a decoder");
    assert_eq!(report["parameters"], decoder.num_params());
    for (key, value) in [
        ("system", Value::from("kiln")),
        ("strategy", "NO_SHARD".into()),
        ("dtype", "f32".into()),
        // Values from the configuration.
        ("ranks", 2.into()),
        ("global_batch", 8.into()),
        ("micro_batch", 2.into()),
        ("seq_len", 8.into()),
        ("threads_per_rank", 1.into()),
        // Tensors are in host memory.
        ("peak_reserved_bytes", Value::Null),
    ] {
        assert_eq!(report[key], value, "{key}");
    }
    let mut steps = numbers(&report["step_s"]);
    assert_eq!(steps.len(), 3);
    steps.sort_by(f64::total_cmp);
    assert!(steps[0] > 0.0);
    let tokens_per_s = report["tokens_per_s"].as_f64().expect("a number");
    assert!((tokens_per_s * steps[1] / 64.0 - 1.0).abs() < 1e-9, "the median counts: {report}");
    let flops = report["model_flops_per_s"].as_f64().expect("a number");
    let per_token = decoder.flops_per_token(8);
    assert!((flops / tokens_per_s / per_token - 1.0).abs() < 1e-9);
    // The configuration has a peak of 1 TFLOP/s.
    assert!((report["mfu"].as_f64().expect("a number") / flops * 1e12 - 1.0).abs() < 1e-9);
    let update = report["update_s"].as_f64().expect("a number");
    assert!(update > 0.0 && update < steps[2], "{report}");
    let first = report["first_step_s"].as_f64().expect("Linux says");
    assert!((0.0..600.0).contains(&first));
    let ranks = numbers(&report["peak_rank_bytes"]);
    assert!(ranks.len() == 2 && ranks.iter().all(|bytes| *bytes > 12.0 * 300.0 * 16.0));
    assert!(report["peak_rss_sum_bytes"].as_u64().expect("Linux says") > 1 << 20);
}

#[test]
fn a_report_for_people_says_the_same() {
    let text = step(&Workspace::new(), &["--ranks", "1"]);
    for part in ["device: CPU", "FULL_SHARD on 1 rank, ", "tok/s", "MFU", "peak memory"] {
        assert!(text.contains(part), "{part}: {text}");
    }
    assert!(!text.contains("on the device"), "{text}");
}

/// The command itself, on the CPU: names, counts, and the compared figures.
#[test]
fn every_kernel_and_whole_steps() {
    let workspace = Workspace::new();
    let arguments = ["gpu", "--device", "cpu", "--quick", "--json"];
    let table: Value = serde_json::from_str(&workspace.succeed(&arguments)).expect("JSON");
    check(&table, false);
    let mut only = arguments[..4].to_vec();
    only.extend(["--only", "rms_norm*", "--only", "tiny"]);
    let text = workspace.succeed(&only);
    let rows: Vec<_> = text
        .lines()
        .filter_map(|line| line.strip_prefix("| ")?.split(" | ").next())
        .filter(|name| !name.starts_with("---"))
        .collect();
    assert_eq!(rows, ["operation", "rms_norm", "rms_norm_backward", "model", "tiny"], "{text}");
}

/// Asserts that a table of the tiny shapes in f32 is complete.
fn check(table: &Value, reserves_memory: bool) {
    let kernels = table["kernels"].as_array().expect("rows");
    let names: Vec<_> = kernels.iter().map(|row| row["name"].as_str().expect("a name")).collect();
    // In f32 there is nothing to cast.
    let mut expected = Vec::new();
    for operation in ["rms_norm", "rotary", "swiglu", "embedding", "dropout", "attention", "linear"] {
        expected.extend([operation.to_owned(), format!("{operation}_backward")]);
    }
    expected.extend(["cross_entropy", "update"].map(str::to_owned));
    assert_eq!(names, expected);
    assert!(table["copy_bytes_per_s"].as_f64().expect("a number") > 0.0);
    for row in kernels {
        assert!(row["seconds"].as_f64().expect("a number") > 0.0, "{row}");
        let (bytes, flops) = (&row["work"]["bytes"], &row["work"]["flops"]);
        assert!(bytes.is_number() != flops.is_number(), "{row}");
        assert!(row["peer_s"].is_null());
        assert!(bytes.is_null() || row["share"].as_f64().expect("a number") > 0.0, "{row}");
    }
    let by_hand = |name: &str| {
        let row = kernels.iter().find(|row| row["name"] == name).expect("the row");
        let work = &row["work"];
        work["bytes"].as_f64().or(work["flops"].as_f64()).expect("a number")
    };
    // 32 rows of 64 values of 4 bytes, read and written; 96 values in the feed-forward layer.
    assert_eq!(by_hand("rms_norm"), 2.0 * 32.0 * 64.0 * 4.0);
    assert_eq!(by_hand("swiglu_backward"), 5.0 * 32.0 * 96.0 * 4.0);
    assert_eq!(by_hand("linear_backward"), 2.0 * 2.0 * 32.0 * 64.0 * 96.0);
    // Four heads of 16; half of the scores are above the diagonal.
    assert_eq!(by_hand("attention"), 2.0 * 2.0 * 4.0 * 32.0 * 32.0 * 16.0 / 2.0);
    let steps = table["steps"].as_array().expect("rows");
    let names: Vec<_> = steps.iter().map(|row| row["name"].as_str().expect("a name")).collect();
    assert_eq!(names, ["tiny", "tiny+recompute"]);
    for row in steps {
        assert!(row["failure"].is_null(), "{row}");
        let report = &row["kiln"][0];
        assert!(report["tokens_per_s"].as_f64().expect("a number") > 0.0, "{row}");
        let reserved = report["peak_reserved_bytes"].as_u64();
        assert_eq!(reserved.is_some_and(|bytes| bytes > 0), reserves_memory, "{row}");
    }
    assert_eq!(steps[1]["kiln"][0]["recompute"], "block");
    assert_eq!(table["failures"], Value::Array(Vec::new()));
}

/// On the device that wgpu finds; CONTRIBUTING.md explains how to use a driver that computes on the CPU.
#[cfg(feature = "wgpu")]
#[test]
fn every_kernel_and_whole_steps_on_wgpu() {
    let arguments = ["gpu", "--device", "wgpu", "--quick", "--json"];
    let ended = Workspace::new().kiln(&arguments);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let table: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    assert!(table["device"].as_str().expect("a name").ends_with("through wgpu"), "{table}");
    check(&table, true);
}

/// A stand-in for Python and the peer, which prints the same as a peer.
#[test]
fn the_peer_takes_turns() {
    let workspace = Workspace::new();
    let text = "case \"$*\" in *--kernels*) exit 3 ;; esac\n\
                echo 'some library says hello'\n\
                echo \"$*\" >>turns\n\
                echo '{\"tokens_per_s\": 1e-3, \"peak_reserved_bytes\": 7}'\n";
    workspace.write("peer.sh", text);
    workspace.write("10m.toml", "[model]\npreset = \"10m\"\nlayers = 1\n");
    let arguments = ["gpu", "--device", "cpu", "--steps", "1", "--config", "10m.toml"];
    let smaller = ["--set", "train.global_batch=1", "--set", "train.micro_batch=1"];
    let short = ["--set", "data.seq_len=8", "--peer", "sh", "--peer-script", "peer.sh"];
    let all = [&arguments[..], &smaller, &short, &["--pairs", "2", "--json"]].concat();
    // A different number of layers from the preset: a model that the peer does not know.
    let table: Value = serde_json::from_str(&workspace.succeed(&all)).expect("JSON");
    assert_eq!(table["steps"][0]["peer"], Value::Array(Vec::new()));
    assert!(!workspace.path("turns").exists());

    workspace.write("10m.toml", "[model]\npreset = \"10m\"\n");
    let table: Value = serde_json::from_str(&workspace.succeed(&all)).expect("JSON");
    let row = &table["steps"][0];
    assert_eq!((&row["name"], row["peer"].as_array().map(Vec::len)), (&"10m".into(), Some(2)));
    let turns = workspace.text("turns");
    assert_eq!(turns.lines().count(), 2);
    for word in ["--preset 10m", "--mode fsdp", "--batch 1", "--seq 8", "--steps 1", "--dtype f32"] {
        assert!(turns.contains(word), "{word}: {turns}");
    }
    // Fast enough, but on the CPU no device memory is known.
    let ended = workspace.kiln(&[&all[..], &["--bars"]].concat());
    assert_eq!(ended.code, Some(1));
    let table: Value = serde_json::from_str(&ended.stdout).expect("JSON");
    let failures = table["failures"].as_array().expect("a list");
    assert_eq!(failures.len(), 1, "{failures:?}");
    assert!(failures[0].as_str().expect("text").contains("memory over the peer's"));

    workspace.write("peer.sh", "echo broken\n");
    let ended = workspace.kiln(&all);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stdout.contains("did not print JSON"), "{ended:?}");
}

#[test]
fn measurements_that_cannot_be_are_refused() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    let mut refused = |title: &str, arguments: &[&str]| {
        messages.refused(title, &workspace, arguments);
    };
    let cpu = ["gpu", "--device", "cpu", "--quick"];
    let on_cpu = |more: &[&'static str]| [&cpu[..], more].concat();
    refused("no steps", &["step", "--config", "run.toml", "--steps", "0"]);
    refused("no warm-up", &["step", "--config", "run.toml", "--warmup", "0"]);
    refused("ranks that cannot share the batch", &["step", "--config", "run.toml", "--ranks", "3"]);
    refused("values without a configuration", &["step", "--set", "train.steps=1"]);
    refused("no row is called so", &on_cpu(&["--only", "rms"]));
    refused("steps of nothing", &on_cpu(&["--steps", "0"]));
    refused("no pairs", &on_cpu(&["--pairs", "0"]));
    refused("a missing script", &on_cpu(&["--peer", "python3", "--peer-script", "none.py"]));
    refused("bars without a peer", &on_cpu(&["--bars"]));
    refused("a configuration that is missing", &on_cpu(&["--config", "none.toml"]));
    refused("a part of one", &on_cpu(&["--config", "run.toml", "--only", "steps"]));
    refused("an unknown device", &["gpu", "--device", "tpu"]);
    let peer = ["--peer", "python3", "--peer-script", "run.toml"];
    refused("a peer on wgpu", &[&["gpu", "--device", "wgpu"][..], &peer].concat());
    insta::assert_snapshot!(messages.finish());
}

/// Features that are not in this build.
#[cfg(not(any(feature = "cuda", feature = "wgpu")))]
#[test]
fn gpus_need_a_build_that_knows_them() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    messages.refused("cuda", &workspace, &["gpu"]);
    messages.refused("wgpu", &workspace, &["gpu", "--device", "wgpu"]);
    insta::assert_snapshot!(messages.finish());
}
