//! `kiln plan`: predictions of memory, traffic and time.

use serde_json::Value;

use crate::support::{VOCAB, Workspace, example};

fn plan(workspace: &Workspace, arguments: &[&str]) -> Value {
    let text = workspace.succeed(&[&["plan"][..], arguments, &["--json"]].concat());
    serde_json::from_str(&text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn preset(name: &str) -> String {
    crate::presets::folder().join(format!("{name}.toml")).to_str().expect("UTF-8").to_owned()
}

/// Returns the rows of a plan, which must have at least one.
fn rows(plan: &Value) -> &Vec<Value> {
    plan["rows"].as_array().filter(|rows| !rows.is_empty()).unwrap_or_else(|| panic!("no rows: {plan}"))
}

#[test]
fn a_large_model_needs_a_way_that_fits() {
    let workspace = Workspace::new();
    let arguments = ["--ranks", "8", "--memory", "46GiB", "--set", "train.micro_batch=2"];
    let plan = plan(&workspace, &[&[&preset("7b")[..]][..], &arguments].concat());
    assert_eq!(plan["parameters"], 6_738_415_616_u64);
    for row in rows(&plan) {
        let phases = row["phases"].as_object().expect("phases");
        let sum: u64 = phases.values().filter_map(Value::as_u64).sum();
        assert_eq!(sum, row["peak_bytes"].as_u64().expect("bytes"), "{row}");
        assert_eq!(row["fits"], row["needed_bytes"].as_u64() <= Some(46 << 30), "{row}");
        let axes = row["sent_by_axis"].as_object().expect("axes");
        let sent: u64 = axes.values().filter_map(Value::as_u64).sum();
        assert_eq!(sent, row["sent_bytes"].as_u64().expect("bytes"), "{row}");
    }
    let find = |strategy: &str, recompute: &str, offload: bool| {
        let is = |row: &&Value| {
            row["strategy"] == strategy && row["recompute"] == recompute && row["offload"] == offload
        };
        rows(&plan).iter().find(is).unwrap_or_else(|| panic!("no {strategy}: {plan}"))
    };
    assert_eq!(find("NO_SHARD", "none", false)["fits"], false);
    assert_eq!(find("FULL_SHARD", "none", false)["fits"], false);
    assert_eq!(find("FULL_SHARD", "selective", false)["fits"], true);
    assert_eq!(find("FULL_SHARD", "block", false)["fits"], true);
    let recommended = &plan["recommended"];
    assert_eq!(
        (&recommended["strategy"], &recommended["recompute"]),
        (&"FULL_SHARD".into(), &"selective".into())
    );
    let reason = recommended["reason"].as_str().expect("a reason");
    assert!(reason.starts_with("7b on 8 x 46.0 GiB: NO_SHARD needs "), "{reason}");
    assert!(
        reason.contains("FULL_SHARD with selective recompute needs ") && reason.contains("fits"),
        "{reason}"
    );
    let row = &rows(&plan)[recommended["row"].as_u64().expect("an index") as usize];
    assert_eq!(row["strategy"], recommended["strategy"]);
}

/// The configuration sets no vocabulary size, so the plan uses that of the prepared data, as a run does, and not
/// `data.vocab_size`.
#[test]
fn the_vocabulary_is_that_of_the_data() {
    let workspace = Workspace::new();
    let prepared = plan(&workspace, &["run.toml"]);
    assert_eq!(prepared["vocab_size"], VOCAB);
    let later = plan(&workspace, &["run.toml", "--set", "data.path=later", "--set", "data.vocab_size=300"]);
    assert_eq!(later["vocab_size"], 300);
    assert_ne!(later["parameters"], prepared["parameters"]);
    let tune = ["tune", "run.toml", "--candidates", "1", "--steps", "1", "--rounds", "1", "--json"];
    let tuned: Value = serde_json::from_str(&workspace.succeed(&tune)).expect("JSON");
    assert_eq!(tuned["parameters"], prepared["parameters"]);
    // As in a run, a vocabulary smaller than the tokenizer's is refused.
    let ended = workspace.kiln(&["plan", "run.toml", "--set", "model.vocab_size=256"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("has 257 tokens, but model.vocab_size is 256"), "{ended:?}");
}

/// A configuration of four micro-batches of one sequence, whose gradients take more memory than the
/// activations of all four sequences.
fn accumulating(workspace: &Workspace) {
    let model = [("model.d_model", "512"), ("model.d_ff", "2048"), ("model.layers", "8")];
    let batch = [("train.ranks", "4"), ("train.global_batch", "16"), ("train.micro_batch", "1")];
    let accumulate = [("shard.accumulate", "\"unsharded\"")];
    workspace.config("run.toml", &[&model[..], &batch, &accumulate].concat());
}

/// Returns the row for `FULL_SHARD` without recomputation with this micro-batch.
fn full_shard(plan: &Value, micro_batch: u64) -> Option<&Value> {
    rows(plan).iter().find(|row| {
        row["strategy"] == "FULL_SHARD" && row["recompute"] == "none" && row["micro_batch"] == micro_batch
    })
}

#[test]
fn a_larger_micro_batch_that_fits_is_found() {
    let workspace = Workspace::new();
    accumulating(&workspace);
    let gpu = |memory: u64, more: &[&str]| {
        let memory = format!("{memory}B");
        plan(&workspace, &[&["run.toml", "--memory", &memory, "--margin", "0"][..], more].concat())
    };
    let needed = |plan: &Value, micro_batch: u64| {
        full_shard(plan, micro_batch).expect("a row")["needed_bytes"].as_u64().expect("bytes")
    };
    let small = needed(&gpu(1 << 40, &[]), 1);
    let large = needed(&gpu(1 << 40, &["--set", "train.micro_batch=4"]), 4);
    assert!(large < small, "{large} and {small} bytes");
    // Even with micro-batches of one sequence, nothing fits.
    let found = gpu(large, &[]);
    let asked: Vec<_> = rows(&found).iter().filter(|row| row["micro_batch"] == 1).collect();
    assert!(!asked.is_empty() && asked.iter().all(|row| row["fits"] == false), "{found}");
    assert_eq!(found["recommended"]["micro_batch"], 4, "{found}");
    assert_eq!(full_shard(&found, 4).expect("a row")["fits"], true);
    // If a run is refused, its message suggests the same micro-batch.
    let memory = format!("device.memory={}B", small / 2);
    let ended = workspace.kiln(&["train", "run.toml", "--out", "run", "--set", &memory]);
    assert!(ended.stderr.contains("--set train.micro_batch=4: takes"), "{ended:?}");
}

#[test]
fn a_recommendation_leaves_a_margin() {
    let workspace = Workspace::new();
    let seven = |arguments: &[&str]| {
        plan(&workspace, &[&[&*preset("7b"), "--ranks", "8", "--memory"], arguments].concat())
    };
    let needed = |plan: &Value| {
        let row = plan["recommended"]["row"].as_u64().expect("a recommendation") as usize;
        rows(plan)[row]["needed_bytes"].as_u64().expect("bytes")
    };
    let least = rows(&seven(&["46GiB"])).iter().filter_map(|row| row["needed_bytes"].as_u64()).min();
    // 1 % more than the smallest memory that any row needs.
    let memory = least.expect("rows") / 100 * 101;
    let tight = format!("{memory}B");
    let without = seven(&[&tight, "--margin", "0"]);
    assert!(needed(&without) <= memory, "{without}");
    let with = seven(&[&tight]);
    assert_eq!(with["margin"], 0.05);
    if !with["recommended"].is_null() {
        assert!(needed(&with) <= memory / 100 * 95, "{with}");
    }
    let text =
        workspace.succeed(&["plan", &preset("7b"), "--ranks", "8", "--memory", &tight, "--margin", "50"]);
    assert!(text.contains("\nNo strategy leaves 50 % of "), "{text}");
    let text = workspace.succeed(&["plan", &preset("7b"), "--ranks", "8", "--memory", "1GiB"]);
    assert!(text.contains("\nNo strategy fits with any micro-batch"), "{text}");
}

/// Every output that contains the plan's number names a layer without `meta_forward`.
#[test]
fn layers_that_describe_nothing_are_named() {
    let workspace = Workspace::new();
    let run = |name: &str, arguments: &[&str]| workspace.run(&example(name), arguments);
    let layer = ["--set", "model.feed_forward=relu3"];
    let ended = run("own_layer", &[&["plan", "run.toml"], &layer[..]].concat());
    assert!(ended.stdout.contains("\nnot described: CubedRelu. "), "{ended:?}");
    let ended = run("own_layer", &[&["plan", "run.toml", "--json"], &layer[..]].concat());
    let plan: Value =
        serde_json::from_str(&ended.stdout).unwrap_or_else(|error| panic!("{error}: {ended:?}"));
    assert_eq!(plan["undescribed"], serde_json::json!(["CubedRelu"]));
    let ended = run("own_layer", &[&["train", "run.toml", "--out", "run"], &layer[..]].concat());
    assert!(ended.stdout.contains(" were planned; not described: CubedRelu"), "{ended:?}");
    let refused = ["train", "run.toml", "--out", "none", "--set", "device.memory=1KB"];
    let ended = run("own_layer", &[&refused[..], &layer].concat());
    assert!(ended.stderr.contains("not described: CubedRelu"), "{ended:?}");
    // These layers describe their memory.
    let ended = run("own_attention", &["plan", "run.toml", "--set", "model.attention=alibi"]);
    assert!(ended.code == Some(0) && !ended.stdout.contains("not described"), "{ended:?}");
    let text = workspace.succeed(&["plan", "run.toml"]);
    assert!(!text.contains("not described"), "{text}");
}

/// FSDP2 can run this configuration on such cards, because it reduces every micro-batch. A run that reduces once
/// per step needs memory for the whole gradient; the plan only adds advice about that.
#[test]
fn a_large_model_accumulates_in_shards() {
    let workspace = Workspace::new();
    let name = preset("7b");
    let plan = |accumulate: &[&str], memory: &str| {
        let batch = ["train.global_batch=64", "train.micro_batch=2", "precision.compute=bf16"];
        let settings = batch.iter().chain(accumulate).flat_map(|setting| ["--set", setting]);
        let ranks = [&name[..], "--ranks", "8", "--memory", memory];
        plan(&workspace, &ranks.into_iter().chain(settings).collect::<Vec<_>>())
    };
    let find = |plan: &Value, strategy: &str| {
        let is = |row: &&Value| {
            row["strategy"] == strategy && row["recompute"] == "block" && row["offload"] == false
        };
        rows(plan).iter().find(is).cloned().unwrap_or_else(|| panic!("no {strategy}: {plan}"))
    };
    let sharded = plan(&[], "46GiB");
    for (strategy, accumulate) in [("FULL_SHARD", "sharded"), ("NO_SHARD", "unsharded")] {
        assert_eq!(find(&sharded, strategy)["accumulate"], accumulate, "{sharded}");
    }
    let row = find(&sharded, "FULL_SHARD");
    assert_eq!((&row["micro_batches"], &row["micro_batch"]), (&4.into(), &2.into()), "{row}");
    assert!(row["needed_bytes"].as_u64() <= Some(24 << 30), "{row}");
    assert!(sharded["accumulate"].is_null(), "{sharded}");

    let unsharded = plan(&["shard.accumulate=unsharded"], "24GiB");
    let whole = find(&unsharded, "FULL_SHARD");
    // 4 bytes for each parameter, of which a rank holds an eighth if they are sharded.
    let (less, more) = (row["needed_bytes"].as_u64(), whole["needed_bytes"].as_u64());
    assert!(less.map(|bytes| bytes + (20 << 30)) < more, "{less:?} and {more:?}");
    let advice = unsharded["accumulate"].as_str().unwrap_or_default();
    assert!(
        advice.starts_with("With --set shard.accumulate=sharded, FULL_SHARD with recompute needs "),
        "{unsharded}"
    );
}

/// Every preset with every number of ranks, for models that are only planned.
#[test]
fn plans_reach_from_1_rank_to_4096() {
    let workspace = Workspace::new();
    for name in ["90m", "300m", "1b", "7b"] {
        for ranks in ["1", "3", "64", "4096"] {
            let nodes = if ranks == "3" { "3" } else { "1" };
            let arguments = [
                preset(name),
                "--ranks".into(),
                ranks.into(),
                "--nodes".into(),
                nodes.into(),
                "--gpu".into(),
            ];
            let arguments: Vec<_> = arguments.iter().map(String::as_str).chain(["h100"]).collect();
            let plan = plan(&workspace, &arguments);
            assert!(rows(&plan).iter().all(|row| row["step_s"].as_f64() > Some(0.0)), "{plan}");
            assert!(rows(&plan).iter().all(|row| row["mfu"].as_f64() < Some(1.0)), "{plan}");
        }
    }
}

/// The bytes that a plan predicts equal those that the recorder counts in executed steps.
#[test]
fn a_plan_sends_what_steps_send() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("train.ranks", "4"), ("shard.shard_size", "2")]);
    let bench = [
        "bench",
        "strategies",
        "--config",
        "run.toml",
        "--ranks",
        "4",
        "--steps",
        "1",
        "--rounds",
        "1",
        "--json",
    ];
    let measured: Value = serde_json::from_str(&workspace.succeed(&bench)).expect("JSON");
    let plan = plan(&workspace, &["run.toml", "--ranks", "4"]);
    let mut compared = 0;
    for row in rows(&plan).iter().filter(|row| row["recompute"] == "none") {
        let is = |other: &&Value| other["strategy"] == row["strategy"];
        let other = measured["rows"].as_array().and_then(|rows| rows.iter().find(is)).expect("measured");
        assert_eq!(row["sent_bytes"], other["sent_bytes"], "{row}");
        compared += 1;
    }
    assert_eq!(compared, 5);
}

#[test]
fn a_measured_network_gives_the_time_of_a_step() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[]);
    let without = plan(&workspace, &["run.toml", "--ranks", "2"]);
    assert!(rows(&without).iter().all(|row| row["step_s"].is_null()), "{without}");
    let link = |operation: &str| {
        format!(
            r#"{{"backend": "local", "ranks": 2, "nodes": 1, "operation": "{operation}", "latency_s": 1e-5, "bytes_per_s": 1e9}}"#
        )
    };
    let links = ["all_gather", "reduce_scatter", "all_reduce"].map(link).join(", ");
    workspace.write("network.json", format!(r#"{{"version": 1, "links": [{links}]}}"#));
    let arguments = ["run.toml", "--ranks", "2", "--flops", "0.1", "--network", "network.json"];
    let with = plan(&workspace, &arguments);
    let seconds = |strategy: &str| {
        let row = rows(&with).iter().find(|row| row["strategy"] == strategy).expect("a row");
        row["step_s"].as_f64().expect("seconds")
    };
    assert!(seconds("FULL_SHARD") > seconds("SHARD_GRAD_OP"), "it gathers more: {with}");
    workspace.succeed(&["bench", "network", "--ranks", "2", "--out", "measured.json"]);
    plan(&workspace, &["run.toml", "--ranks", "2", "--network", "measured.json"]);
    let calibrated = plan(&workspace, &["run.toml", "--ranks", "2", "--calibrate"]);
    assert!(rows(&calibrated).iter().all(|row| row["step_s"].as_f64() > Some(0.0)), "{calibrated}");
}

#[test]
fn a_sweep_is_a_table_and_a_drawing() {
    let workspace = Workspace::new();
    let preset = preset("1b");
    let sweep = ["plan", &preset, "--gpu", "a100-80", "--ranks", "8", "--sweep", "ranks=8..64"];
    let table = workspace.succeed(&[&sweep[..], &["--svg", "scaling.svg"]].concat());
    for ranks in ["     8 ", "    16 ", "    32 ", "    64 "] {
        assert!(table.lines().any(|line| line.starts_with(ranks)), "{table}");
    }
    let drawn = std::fs::read_to_string(workspace.path("scaling.svg")).expect("a drawing");
    assert!(
        drawn.starts_with("<svg") && drawn.contains("seconds per step") && drawn.contains(">64<"),
        "{drawn}"
    );
}

#[test]
fn what_is_no_plan_is_told() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[]);
    for (arguments, says) in [
        (&["--gpu", "voodoo2"][..], "use one of b200, "),
        (&["--ranks", "6", "--nodes", "4"], "cannot be spread evenly over 4 machines"),
        (&["--sweep", "ranks=8"], "ranks=8..4096"),
        (&["--flops", "0"], "--flops must be more than 0"),
        (&["--margin", "100"], "--margin must be at least 0 and below 100 percent"),
        (&["--network", "none.json"], "kiln bench network --out"),
    ] {
        let ended = workspace.kiln(&[&["plan", "run.toml"][..], arguments].concat());
        assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:?}");
        assert!(ended.stderr.contains(says), "{arguments:?}: {ended:?}");
    }
}
