//! Commands that compute on a GPU, compared with the CPU: through wgpu, for which Mesa's lavapipe is
//! sufficient, or on an NVIDIA GPU if `KILN_TEST_DEVICE` is `cuda`. Kernels use a different order of sums and
//! different exponentials, so numbers agree to 1e-4.

use serde_json::Value as Json;

use crate::messages::Messages;
use crate::support::{Ended, Workspace, assert_same_curve, names};

const TOLERANCE: f64 = 1e-4;

/// The setting that selects the CPU.
const CPU: &str = "device.backend=cpu";
const WGPU: &str = "device.backend=wgpu";

/// Returns the GPU's backend, and its name in the output of a run.
fn backend() -> (&'static str, &'static str) {
    match std::env::var("KILN_TEST_DEVICE").as_deref() {
        Err(_) | Ok("wgpu") => ("wgpu", "device: the adapter that wgpu finds"),
        Ok("cuda") if cfg!(feature = "cuda") => ("cuda", "device: GPU 0 ("),
        Ok(other) => panic!("KILN_TEST_DEVICE={other}: must be wgpu, or cuda in a build with it"),
    }
}

/// Returns the setting that makes a run compute on the GPU.
pub fn gpu() -> &'static str {
    if backend().0 == "cuda" { "device.backend=cuda" } else { WGPU }
}

const HYBRID: &[(&str, &str)] = &[
    ("shard.strategy", "'HYBRID_SHARD'"),
    ("shard.shard_size", "2"),
    ("train.ranks", "4"),
    ("train.micro_batch", "1"),
];

/// Returns a workspace for either device, with some values changed.
pub fn workspace(changes: &[(&str, &str)]) -> Workspace {
    let workspace = Workspace::new();
    // The default may differ on a GPU.
    workspace.config("run.toml", &[&[("precision.compute", "'f32'")], changes].concat());
    // `device.threads` is for the CPU only.
    workspace.replace("run.toml", "threads = 1\n", "");
    workspace
}

/// Trains into a folder and returns the output.
fn train(workspace: &Workspace, backend: &str, out: &str, more: &[&str]) -> String {
    let arguments = ["train", "run.toml", "--out", out, "--set", backend];
    workspace.succeed(&[&arguments, more].concat())
}

fn assert_close(what: &str, a: f64, b: f64) {
    assert!((a - b).abs() <= TOLERANCE * b.abs(), "{what}: {a} and {b}");
}

/// Fails unless two runs have the same losses, norms and validation loss.
pub fn assert_same(workspace: &Workspace, what: &str, a: &str, b: &str) {
    assert_same_curve(what, &workspace.steps(a), &workspace.steps(b), TOLERANCE);
    assert_close(what, workspace.val_loss(a), workspace.val_loss(b));
}

#[test]
fn every_strategy_trains_as_on_the_cpu() {
    let accumulate = [("train.micro_batch", "1"), ("shard.recompute", "'block'")];
    let replicate = [("shard.strategy", "'NO_SHARD'"), ("model.dropout", "0.1")];
    for (name, changes) in [
        ("one rank", &[("train.ranks", "1")][..]),
        ("two ranks", &[]),
        ("micro-batches", &accumulate),
        ("replicas", &replicate),
        ("groups", HYBRID),
    ] {
        let workspace = workspace(changes);
        let said = train(&workspace, gpu(), "gpu", &[]);
        assert!(said.contains(backend().1) && said.contains("as device.backend says\n"), "{said}");
        train(&workspace, CPU, "cpu", &[]);
        assert_same(&workspace, name, "gpu", "cpu");
        // A GPU allocates whole pages, so even a tiny model takes many bytes.
        for line in workspace.metrics("gpu").iter().filter(|line| line.get("loss").is_some()) {
            assert!(line["peak_bytes"].as_u64().is_some_and(|bytes| bytes > 10_000), "{line}");
        }
    }
}

/// The same number of ranks gives the same bits on a GPU too.
#[test]
fn a_run_has_the_same_bits_again() {
    let workspace = workspace(&[]);
    for out in ["a", "b"] {
        train(&workspace, gpu(), out, &[]);
    }
    assert_same_curve("again", &workspace.steps("a"), &workspace.steps("b"), 0.0);
    let end = |out: &str| workspace.path(out).join("checkpoints/fsdp_cpt4");
    for name in names(&end("a")).into_iter().filter(|name| name.ends_with(".safetensors")) {
        let file = |out: &str| workspace.read(end(out).join(&name));
        assert!(file("a") == file("b"), "{name}");
    }
}

/// A checkpoint that one device has written resumes on the other.
#[test]
fn checkpoints_go_from_either_device_to_the_other() {
    for (name, changes) in [("full", &[][..]), ("groups", HYBRID)] {
        let changes = [&[("train.steps", "8"), ("checkpoint.every", "4")], changes].concat();
        let workspace = workspace(&changes);
        for (here, there, folder) in [(CPU, gpu(), "cpu"), (gpu(), CPU, "gpu")] {
            train(&workspace, here, folder, &[]);
            let from = format!("{folder}/checkpoints/fsdp_cpt4");
            let (same, other) = (format!("{folder}-same"), format!("{folder}-other"));
            train(&workspace, here, &same, &["--resume", &from]);
            let straight = workspace.steps(folder);
            assert_same_curve(name, &workspace.steps(&same), &straight[4..], 0.0);
            train(&workspace, there, &other, &["--resume", &from]);
            assert_same_curve(name, &workspace.steps(&other), &straight[4..], TOLERANCE);
            assert_close(name, workspace.val_loss(&other), workspace.val_loss(folder));
        }
    }
}

/// A save in the background writes the state of its own step, however many steps follow before it ends. Full
/// checkpoints have the same values.
#[test]
fn saves_in_the_background_are_of_their_step() {
    let workspace = workspace(&[("train.steps", "6"), ("checkpoint.every", "1")]);
    train(&workspace, gpu(), "behind", &[]);
    train(&workspace, gpu(), "waiting", &["--set", "checkpoint.async=false"]);
    train(&workspace, gpu(), "full", &["--set", "checkpoint.format=full"]);
    for step in 1..=6 {
        let folder = |out: &str| format!("{out}/checkpoints/fsdp_cpt{step}");
        let files = names(&workspace.path(folder("waiting")));
        let tensors = || files.iter().filter(|name| name.ends_with(".safetensors"));
        assert!(tensors().count() >= 4, "{files:?}");
        for name in tensors() {
            let file = |out: &str| workspace.read(format!("{}/{name}", folder(out)));
            assert!(file("behind") == file("waiting"), "step {step}: {name}");
        }
        let (from, out) = (folder("behind"), format!("converted{step}"));
        workspace.succeed(&["convert", "--checkpoint", &from, "--out", &out]);
        for name in names(&workspace.path(&out)).iter().filter(|n| n.ends_with(".safetensors")) {
            let converted = workspace.read(format!("{out}/{name}"));
            assert!(converted == workspace.read(format!("{}/{name}", folder("full"))), "{name}");
        }
    }
}

#[test]
fn steps_that_go_wrong_are_left_out() {
    for changes in [&[][..], &[("shard.strategy", "'NO_SHARD'")], HYBRID] {
        let skip = [("train.nonfinite", "'skip'"), ("train.steps", "5"), ("checkpoint.every", "1")];
        let workspace = workspace(&[&skip, changes].concat());
        let drill = ["--fault", "nan@backward:3:1"];
        let said = train(&workspace, gpu(), "gpu", &drill);
        train(&workspace, CPU, "cpu", &drill);
        assert_same(&workspace, "skipped", "gpu", "cpu");
        let line = said.lines().find(|line| line.contains("the update was skipped")).expect("it is said");
        assert!(line.contains("the gradient norm is NaN (first in the gradient of `"), "{line}");
        let steps: Vec<_> = workspace.steps("gpu").into_iter().map(|(step, ..)| step).collect();
        assert_eq!(steps, [1, 2, 4, 5]);
        let file = |step: u64| {
            let folder = format!("gpu/checkpoints/fsdp_cpt{step}");
            let names = names(&workspace.path(&folder));
            let tensors = names.into_iter().filter(|name| name.ends_with(".safetensors"));
            tensors.map(|name| workspace.read(format!("{folder}/{name}"))).collect::<Vec<_>>()
        };
        assert!(file(2) == file(3) && file(3) != file(4));
    }
    // By default, such steps end the run.
    let workspace = workspace(&[]);
    let arguments = ["train", "run.toml", "--out", "run", "--set", gpu()];
    let ended = workspace.kiln(&[&arguments[..], &["--fault", "nan@backward:2:0"]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let start = "error: step 2: the gradient norm is NaN (first in the gradient of `";
    assert!(ended.stderr.starts_with(start), "{}", ended.stderr);
}

/// Faults in collectives on a GPU's buffers are found like those on the CPU.
#[test]
fn calls_that_differ_are_named() {
    // The backward pass starts with a reduction.
    let workspace = workspace(&[("shard.strategy", "'SHARD_GRAD_OP'")]);
    for (out, fault, words) in [
        ("gather", "size@forward:2:1", "rank 1 called all_gather of "),
        ("scatter", "size@backward:2:1", "rank 1 called reduce_scatter of "),
        ("arguments", "error@backward:2:0", "reduce_scatter"),
    ] {
        let arguments = ["train", "run.toml", "--out", out, "--set", gpu(), "--fault", fault];
        let ended = workspace.kiln(&arguments);
        assert_eq!(ended.code, Some(1), "{fault}: {ended:?}");
        assert!(ended.stderr.contains(words), "{fault}: {}", ended.stderr);
        assert!(!ended.stderr.contains("panicked"), "{fault}: {}", ended.stderr);
    }
}

/// Runs `kiln` on a device, passed as an argument, and returns its output.
fn on(workspace: &Workspace, device: &str, arguments: &[&str]) -> String {
    let arguments = [arguments, &["--device", device]].concat();
    let child = workspace.command(&arguments).env("KILN_LOG", "kiln=info").spawn();
    let Ended { code, stdout, stderr } = workspace.end(child.expect("the binary starts"));
    assert_eq!(code, Some(0), "{arguments:?}: {stderr}");
    let named = if device == "cpu" { "device: CPU" } else { backend().1 };
    assert!(stderr.contains(named) && stderr.contains("as --device says"), "{arguments:?}: {stderr}");
    stdout
}

/// The heads are as wide as the attention kernels need. Heads of other widths use matrix products that may round
/// f32 to TF32 on NVIDIA GPUs; the tests of the layers cover these.
const TRAINED: &[(&str, &str)] =
    &[("model.head_dim", "8"), ("train.steps", "40"), ("optim.lr", "3e-2"), ("precision.compute", "'f32'")];

/// Returns a model that has learned that the first letters of the alphabet follow each other.
fn trained() -> Workspace {
    let workspace = Workspace::new();
    let ids = crate::support::tokenizer().encode(&"abcdefg".repeat(250)).expect("ids");
    let ids: Vec<u16> = ids.into_iter().map(|id| u16::try_from(id).expect("a small id")).collect();
    workspace.write_data("data", &ids);
    workspace.config("run.toml", TRAINED);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    workspace
}

#[test]
fn evaluations_are_those_of_the_cpu() {
    let workspace = trained();
    let number = |line: &str, key: &str| -> f64 {
        let json: Json = serde_json::from_str(line.trim()).expect("JSON");
        json[key].as_f64().unwrap_or_else(|| panic!("{key} in {line}"))
    };
    let eval = ["eval", "--checkpoint", "run", "--json"];
    for more in
        [&[][..], &["--ranks", "2"], &["--ranks", "4", "--strategy", "HYBRID_SHARD", "--shard-size", "2"]]
    {
        let arguments = [&eval[..], &["--samples", "8"], more].concat();
        let loss = |device| number(&on(&workspace, device, &arguments), "val_loss");
        assert_close("validation loss", loss(backend().0), loss("cpu"));
    }
    let arguments = [&eval[..], &["--prompt", "abc", "--answer", "dea"]].concat();
    let loss = |device| number(&on(&workspace, device, &arguments), "loss");
    assert_close("answer", loss(backend().0), loss("cpu"));

    let logits = |device: &str| {
        let file = format!("{device}.npy");
        let more = ["--tokens", "97,98,99", "--logits", &file];
        on(&workspace, device, &[&eval[..], &more].concat());
        let bytes = workspace.read(&file);
        // The values follow a header of 128 bytes or less.
        let start = 10 + usize::from(u16::from_le_bytes([bytes[8], bytes[9]]));
        let (values, rest) = bytes[start..].as_chunks();
        assert!(rest.is_empty());
        values.iter().map(|value| f64::from(f32::from_le_bytes(*value))).collect::<Vec<_>>()
    };
    let (gpu, cpu) = (logits(backend().0), logits("cpu"));
    assert_eq!(gpu.len(), cpu.len());
    let size = cpu.iter().map(|value| value * value).sum::<f64>().sqrt();
    let off = gpu.iter().zip(&cpu).map(|(a, b)| (a - b) * (a - b)).sum::<f64>().sqrt();
    assert!(size > 1.0 && off <= TOLERANCE * size, "{off} of {size}");
}

#[test]
fn generated_text_is_that_of_the_cpu() {
    let workspace = trained();
    // One prompt that leaves room in the context of 8, and one that fills it.
    for prompt in ["abc", "abcdefga"] {
        let generate = ["generate", "--checkpoint", "run", "--prompt", prompt];
        let arguments = [&generate[..], &["--max-tokens", "12", "--temperature", "0"]].concat();
        let text = on(&workspace, backend().0, &arguments);
        assert_eq!(text, on(&workspace, "cpu", &arguments));
        assert!(text.len() > prompt.len() + 10, "{text}");
    }
    // The sample at the end of a run, from sharded weights.
    workspace.config(
        "run.toml",
        &[
            ("model.head_dim", "8"),
            ("sample.prompt", "'abc'"),
            ("sample.temperature", "0.0"),
            ("sample.max_tokens", "5"),
            ("precision.compute", "'f32'"),
        ],
    );
    workspace.replace("run.toml", "threads = 1\n", "");
    let said = train(&workspace, gpu(), "run", &["--resume", "latest"]);
    assert!(said.contains("\nsample: abcdefga\nnext "), "{said}");
}

#[test]
fn strategies_are_measured() {
    let workspace = workspace(&[("model.vocab_size", "300")]);
    workspace.replace("run.toml", "\"cpu\"", &format!("\"{}\"", backend().0));
    let strategies = ["bench", "strategies", "--steps", "1", "--rounds", "1"];
    let more = ["--config", "run.toml", "--ranks", "2", "--json"];
    let said = workspace.succeed(&[&strategies[..], &more].concat());
    let table: Json = serde_json::from_str(&said).expect("JSON");
    let rows = table["rows"].as_array().expect("rows");
    assert_eq!(rows.len(), 5);
    for row in rows {
        for key in ["tokens_per_s", "peak_bytes", "sent_bytes", "reductions"] {
            assert!(row[key].as_f64().is_some_and(|value| value > 0.0), "{key}: {row}");
        }
    }
}

#[test]
fn combinations_that_cannot_be() {
    let workspace = workspace(&[]);
    let mut messages = Messages::default();
    let train = ["train", "run.toml", "--out", "run", "--set", WGPU];
    for (title, more) in [
        ("threads of the CPU", ["--set", "device.threads=2"]),
        ("computing in bf16", ["--set", "precision.compute=bf16"]),
        ("reducing in bf16", ["--set", "precision.reduce=bf16"]),
    ] {
        messages.refused(title, &workspace, &[&train[..], &more].concat());
    }
    let place = ["RANK", "LOCAL_RANK"].map(|name| (name, "0"));
    let sizes = ["WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_PORT"].map(|name| (name, "1"));
    let mut command = workspace.command(&train);
    let child = command.envs(place).envs(sizes).env("MASTER_ADDR", "localhost").spawn();
    let ended = workspace.end(child.expect("the binary starts"));
    messages.record("ranks that are processes", &ended, 2);
    insta::assert_snapshot!(messages.finish());
}

/// Processes with one GPU each, connected by NCCL, train like threads on the CPU.
#[cfg(feature = "cuda")]
#[test]
#[ignore = "needs four GPUs and NCCL, or stand-ins: benches/standins/execute.sh"]
fn processes_over_nccl_train_as_on_the_cpu() {
    let replicate = [("shard.strategy", "'NO_SHARD'")];
    let accumulate = [("train.micro_batch", "1"), ("shard.recompute", "'block'")];
    let reduce = [("precision.reduce", "'bf16'")];
    for (name, processes, changes) in [
        ("bf16 reductions", "2", &reduce[..]),
        ("micro-batches", "2", &accumulate),
        ("replicas", "2", &replicate),
        ("four", "4", &accumulate),
        ("groups", "4", HYBRID),
    ] {
        let workspace = workspace(changes);
        train(&workspace, CPU, "cpu", &["--ranks", processes]);
        let launch = ["launch", "--nproc-per-node", processes, "--log-dir", "logs", "--"];
        let run = ["train", "run.toml", "--out", "gpu", "--set", "device.backend=cuda"];
        workspace.succeed(&[&launch[..], &run].concat());
        assert_same(&workspace, name, "gpu", "cpu");
    }
}
