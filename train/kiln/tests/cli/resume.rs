//! An interrupted run ends as if it had not been interrupted.

use std::collections::BTreeMap;
use std::path::Path;

use kiln::data::{BatchSource, SampleOrder, Split, TokenFile, slice_for};
use kiln_model::ops::{BF16_CHOICE, bf16_instructions};
use serde_json::Value as Json;

use crate::support::{SEQ_LEN, TRAIN_TOKENS, Workspace, assert_same_curve, names, tokens};

/// Twenty steps with every setting that depends on a position in the run: schedule, shuffling, dropout, micro-batches.
const LONG: [(&str, &str); 8] = [
    ("train.steps", "20"),
    ("train.seed", "7"),
    ("model.dropout", "0.1"),
    ("optim.schedule", "'cosine'"),
    ("optim.warmup_steps", "3"),
    ("optim.grad_clip", "0.5"),
    ("checkpoint.every", "10"),
    ("data.shuffle", "true"),
];

const FULL_SHARD: &[(&str, &str)] = &[("shard.strategy", "'FULL_SHARD'")];
const SHARD_GRAD_OP: &[(&str, &str)] =
    &[("shard.strategy", "'SHARD_GRAD_OP'"), ("shard.recompute", "'block'")];
const HYBRID_SHARD: &[(&str, &str)] = &[
    ("shard.strategy", "'HYBRID_SHARD'"),
    ("shard.shard_size", "2"),
    ("shard.recompute", "'block'"),
    ("train.ranks", "4"),
    ("train.micro_batch", "1"),
];

fn long(workspace: &Workspace, changes: &[(&str, &str)]) {
    workspace.config("long.toml", &[&LONG[..], changes].concat());
}

/// Returns the files of a checkpoint, except for the configuration that started the run.
fn files(workspace: &Workspace, checkpoint: &str) -> BTreeMap<String, Vec<u8>> {
    let all = names(&workspace.path(checkpoint));
    assert!(all.iter().filter(|name| name.ends_with(".safetensors")).count() >= 4, "{all:?}");
    let mut files: BTreeMap<_, _> = all
        .into_iter()
        .filter(|name| name != "config.toml")
        .map(|name| (name.clone(), workspace.read(Path::new(checkpoint).join(name))))
        .collect();
    // The manifest contains the configuration too.
    let mut manifest = workspace.json(Path::new(checkpoint).join("manifest.json"));
    for key in ["checksum", "config"] {
        manifest[key] = Json::Null;
    }
    manifest["files"]["config.toml"] = Json::Null;
    files.insert("manifest.json".to_owned(), manifest.to_string().into_bytes());
    files
}

fn assert_same_end(workspace: &Workspace, a: &str, b: &str) {
    let end = |out: &str| files(workspace, &format!("{out}/checkpoints/fsdp_cpt20"));
    let (a, b) = (end(a), end(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, content) in &a {
        assert!(b[name] == *content, "{name} differs");
    }
}

#[test]
fn ten_steps_and_ten_more_are_twenty_to_the_bit() {
    for (name, changes) in [("full", FULL_SHARD), ("grad_op", SHARD_GRAD_OP), ("hybrid", HYBRID_SHARD)] {
        let workspace = Workspace::new();
        long(&workspace, changes);
        workspace.succeed(&["train", "long.toml", "--out", "straight"]);
        let said = workspace.succeed(&[
            "train",
            "long.toml",
            "--out",
            "resumed",
            "--resume",
            "straight/checkpoints/fsdp_cpt10",
        ]);
        assert!(said.starts_with("resuming from straight/checkpoints/fsdp_cpt10\n"), "{said}");
        let straight = workspace.steps("straight");
        assert_eq!(straight.len(), 20);
        assert_same_curve(name, &workspace.steps("resumed"), &straight[10..], 0.0);
        assert_eq!(workspace.val_loss("resumed"), workspace.val_loss("straight"), "{name}");
        assert_same_end(&workspace, "resumed", "straight");
    }
}

/// A run keeps its `shard.accumulate`, even if it resumes under a strategy with the other default.
#[test]
fn a_resume_accumulates_as_before() {
    let workspace = Workspace::new();
    let strategies = [("FULL_SHARD", "sharded"), ("NO_SHARD", "unsharded")];
    for ((strategy, accumulate), (other, otherwise)) in
        [(strategies[0], strategies[1]), (strategies[1], strategies[0])]
    {
        long(&workspace, &[("shard.strategy", &format!("'{strategy}'"))]);
        let said = workspace.succeed(&["train", "long.toml", "--out", strategy]);
        assert!(said.contains(&format!("{strategy}, recompute none, accumulate {accumulate}\n")), "{said}");
        let from = format!("{strategy}/checkpoints/fsdp_cpt10");
        for folder in [strategy, &from] {
            let text = workspace.text(format!("{folder}/config.toml"));
            assert!(text.contains(&format!("accumulate = \"{accumulate}\"\n")), "{text}");
        }
        let resume = |out: &str, settings: &[&str]| {
            let settings = settings.iter().flat_map(|setting| ["--set", setting]);
            let arguments = ["train", "long.toml", "--out", out, "--resume", &from];
            workspace.succeed(&arguments.into_iter().chain(settings).collect::<Vec<_>>())
        };
        let straight = workspace.steps(strategy);
        let set = format!("shard.strategy={other}");
        let out = format!("{strategy}-{other}");
        let said = resume(&out, &[&set]);
        assert!(said.contains(&format!("{other}, recompute none, accumulate {accumulate}\n")), "{said}");
        assert!(!said.contains("from here on"), "{said}");
        assert_same_curve(&out, &workspace.steps(&out), &straight[10..], 0.0);
        // An explicit value takes precedence.
        let set = format!("shard.accumulate={otherwise}");
        let out = format!("{strategy}-{otherwise}");
        let said = resume(&out, &[&set]);
        let line = format!("shard.accumulate was \"{accumulate}\" and is \"{otherwise}\" from here on\n");
        assert!(said.contains(&line), "{said}");
        assert_same_curve(&out, &workspace.steps(&out), &straight[10..], 1e-5);
        assert_ne!(workspace.steps(&out), straight[10..], "the other order has the same bits");
    }
}

/// The run dies in step 14 because of an invalid token. Lines logged after its last checkpoint do not appear
/// twice.
#[test]
fn a_run_that_died_goes_on_as_if_it_had_not() {
    let workspace = Workspace::new();
    long(&workspace, FULL_SHARD);
    workspace.succeed(&["train", "long.toml", "--out", "straight"]);

    let order = SampleOrder::new((TRAIN_TOKENS as u64 - 1) / SEQ_LEN as u64, true, 7).unwrap();
    let mut broken = tokens(TRAIN_TOKENS);
    broken[order.sample_at(13 * 8 + 5) as usize * SEQ_LEN + 3] = 999;
    workspace.write_data("data", &broken);
    let died = workspace.kiln(&["train", "long.toml", "--out", "run"]);
    assert_eq!(died.code, Some(1), "{died:?}");
    assert_eq!(workspace.steps("run").len(), 13);
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt10", "latest"]);

    workspace.write_data("data", &tokens(TRAIN_TOKENS));
    workspace.succeed(&["train", "long.toml", "--out", "run", "--resume", "latest"]);
    assert_same_curve("all", &workspace.steps("run"), &workspace.steps("straight"), 0.0);
    assert_same_end(&workspace, "run", "straight");
}

#[test]
fn other_rank_counts_see_the_same_tokens_in_the_same_order() {
    let workspace = Workspace::new();
    long(&workspace, FULL_SHARD);
    workspace.succeed(&["train", "long.toml", "--out", "straight"]);
    let straight = workspace.steps("straight");
    // Micro-batches may change too: neither the samples nor the dropout masks depend on the split.
    for (ranks, micro_batch) in [("1", "train.micro_batch=4"), ("4", "train.micro_batch=1")] {
        let out = format!("on{ranks}");
        let from = "straight/checkpoints/fsdp_cpt10";
        workspace.succeed(&[
            "train",
            "long.toml",
            "--out",
            &out,
            "--resume",
            from,
            "--ranks",
            ranks,
            "--set",
            micro_batch,
        ]);
        assert_same_curve(&out, &workspace.steps(&out), &straight[10..], 1e-5);
        let tokens = |line: &serde_json::Value| line.get("tokens").cloned();
        let count = |out: &str| workspace.metrics(out).iter().filter_map(tokens).next_back();
        assert_eq!(count(&out), count("straight"));
    }

    // The losses could agree by chance, so the tokens are compared too, from the checkpoint's position:
    let state = workspace.state("straight/checkpoints/fsdp_cpt10");
    let start = state["next_sample"].as_u64().unwrap();
    assert_eq!(start, slice_for(10, 8, 0, 2, 0, 2));
    let open = || TokenFile::open(workspace.path("data"), Split::Train, SEQ_LEN).unwrap();
    let source = BatchSource::new(open(), true, 7).unwrap();
    for step in 0..10 {
        let whole = source.fetch(start + step * 8, 8).unwrap();
        for (ranks, micro_batch) in [(1, 2), (2, 2), (4, 2), (4, 1)] {
            let mut together = (Vec::new(), Vec::new());
            for rank in 0..ranks {
                for index in 0..8 / ranks / micro_batch {
                    let first = start + slice_for(step, 8, rank, ranks, index, micro_batch);
                    let batch = source.fetch(first, micro_batch as usize).unwrap();
                    together.0.extend(batch.inputs);
                    together.1.extend(batch.targets);
                }
            }
            assert!(together == (whole.inputs.clone(), whole.targets.clone()), "{ranks} ranks");
        }
    }
}

#[test]
fn a_finished_run_has_nothing_left_to_do() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let (steps, checkpoints) = (workspace.steps("run"), workspace.checkpoints("run"));
    for resume in ["latest", "run", "run/checkpoints", "run/checkpoints/fsdp_cpt4"] {
        let said = workspace.succeed(&["train", "run.toml", "--out", "run", "--resume", resume]);
        assert!(said.contains("done: 4 steps"), "{said}");
        assert_eq!(workspace.steps("run"), steps);
        assert_eq!(workspace.checkpoints("run"), checkpoints);
    }
    // With more steps than before, the run continues.
    let more = ["train", "run.toml", "--out", "run", "--resume", "latest", "--set", "train.steps=6"];
    workspace.succeed(&more);
    let longer = workspace.steps("run");
    assert_eq!(longer[..4], steps);
    assert_eq!(longer.len(), 6);
}

/// A configuration with fewer steps than already taken must not be recorded.
#[test]
fn fewer_steps_than_have_been_done_change_nothing() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("train.steps", "6"), ("checkpoint.every", "2")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let mut before = workspace.tree();
    let holder = workspace.path("run/.kiln/holder.json");
    before.remove(&holder);
    for resume in ["latest", "run/checkpoints/fsdp_cpt6", "run/checkpoints/fsdp_cpt4"] {
        let arguments = ["train", "run.toml", "--out", "run", "--resume", resume];
        let said = workspace.succeed(&[&arguments[..], &["--set", "train.steps=3"]].concat());
        let done = if resume.ends_with('4') { 4 } else { 6 };
        let nothing = format!("nothing to train: the run has done {done} steps, and train.steps is 3;");
        assert!(said.contains(&nothing), "{said}");
        assert!(said.contains(&format!("done: {done} steps, validation loss ")), "{said}");
        let mut after = workspace.tree();
        after.remove(&holder);
        assert!(before == after, "--resume {resume}");
    }
    // From a checkpoint with fewer steps.
    let back = ["train", "run.toml", "--out", "run", "--resume", "run/checkpoints/fsdp_cpt2"];
    workspace.succeed(&[&back[..], &["--set", "train.steps=3"]].concat());
    assert_eq!(workspace.checkpoints("run"), ["fsdp_cpt2", "fsdp_cpt3", "latest"]);
}

/// A start resolves the values that depend on the device, and a resume reports values that it resolves differently.
#[test]
fn what_the_device_settles_is_written_down() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("train.micro_batch", "'auto'"), ("precision.compute", "'auto'")]);
    // The processor counts as one without bf16 instructions, whatever it has.
    let plainly = |arguments: &[&str]| {
        let mut command = workspace.command(arguments);
        let ended = workspace.end(command.env(BF16_CHOICE, "none").spawn().expect("the binary starts"));
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
        ended.stdout
    };
    let said = plainly(&["train", "run.toml", "--out", "run"]);
    let settled = "chosen for the device: precision.compute = \"f32\", train.micro_batch = 4\n";
    assert!(said.contains(settled), "{said}");
    for file in ["run/config.toml", "run/checkpoints/fsdp_cpt4/config.toml"] {
        let text = workspace.text(file);
        assert!(text.contains("compute = \"f32\"\n") && text.contains("micro_batch = 4\n"), "{text}");
    }
    // The same values, set in the file, give the same numbers.
    workspace.config("explicit.toml", &[("train.micro_batch", "4")]);
    workspace.succeed(&["train", "explicit.toml", "--out", "explicit"]);
    assert_same_curve("settled", &workspace.steps("run"), &workspace.steps("explicit"), 0.0);

    let resume = ["train", "run.toml", "--out", "run", "--resume", "latest", "--set", "train.steps=5"];
    let said = plainly(&resume);
    assert!(!said.contains("from here on"), "{said}");
    // These values are what another device might resolve.
    let other = ["--set", "train.micro_batch=2", "--set", "precision.compute=bf16"];
    let said = workspace.succeed(&[&resume[..7], &["train.steps=6"], &other[..]].concat());
    for line in [
        "precision.compute was \"f32\" and is \"bf16\" from here on\n",
        "train.micro_batch was 4 and is 2 from here on\n",
    ] {
        assert!(said.contains(line), "{said}");
    }
    // Without the variable, the processor decides.
    let precision = if bf16_instructions() == Some("AMX") { "bf16" } else { "f32" };
    let said = workspace.succeed(&["train", "run.toml", "--out", "own"]);
    let settled =
        format!("chosen for the device: precision.compute = \"{precision}\", train.micro_batch = 4\n");
    assert!(said.contains(&settled), "{said}");
}
