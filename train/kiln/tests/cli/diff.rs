//! `kiln diff` and `kiln bisect`: planted mistakes are found, and nothing else is reported.

use serde_json::Value as Json;

use crate::support::{Ended, Workspace, example, tokens};

/// A planted mistake, how a run gets it, and where it shows.
struct Planted {
    /// The value of PLANTED, for a mistake in the code of `train/kiln/examples/planted.rs`.
    code: &'static str,
    /// Arguments of the good run.
    good: &'static [&'static str],
    /// Arguments of the bad run.
    bad: &'static [&'static str],
    step: u64,
    phase: &'static str,
    module: &'static str,
    /// The key that causes the difference, if there is one.
    key: Option<&'static str>,
}

const fn of_key(
    key: &'static str,
    bad: &'static [&'static str],
    phase: &'static str,
    module: &'static str,
) -> Planted {
    Planted { code: "", good: &[], bad, step: 1, phase, module, key: Some(key) }
}

const fn of_code(code: &'static str, step: u64, phase: &'static str, module: &'static str) -> Planted {
    Planted { code, good: &[], bad: &[], step, phase, module, key: None }
}

const fn of_fault(bad: &'static [&'static str], phase: &'static str, module: &'static str) -> Planted {
    Planted { code: "", good: &[], bad, step: 2, phase, module, key: None }
}

const SEED: Planted = of_key("train.seed", &["--set", "train.seed=1"], "start", "embed");

const STALE: &str = "stale@forward:2:1";

const PLANTED: [Planted; 26] = [
    // Configuration.
    SEED,
    of_key("data.shuffle", &["--set", "data.shuffle=false"], "data", "embed"),
    of_key("model.rope_theta", &["--set", "model.rope_theta=100"], "forward", "layers.0"),
    of_key("model.norm_eps", &["--set", "model.norm_eps=1e-2"], "forward", "layers.0"),
    of_key("model.dropout", &["--set", "model.dropout=0.1"], "forward", "embed"),
    of_key("precision.compute", &["--set", "precision.compute=bf16"], "forward", "embed"),
    of_key("precision.reduce", &["--set", "precision.reduce=bf16"], "gradient", "head"),
    of_key("train.z_loss", &["--set", "train.z_loss=1e-2"], "loss", "head"),
    of_key("optim.beta2", &["--set", "optim.beta2=0.9"], "update", "embed"),
    of_key("optim.lr", &["--set", "optim.lr=2e-2"], "update", "embed"),
    of_key("optim.grad_clip", &["--set", "optim.grad_clip=0.01"], "update", "embed"),
    of_key(
        "optim.groups",
        &["--set", "optim.groups=[{ parameters = [\"layers.*norm*\"], weight_decay = 0.5 }]"],
        "update",
        "layers.0",
    ),
    // Mistakes in code.
    of_code("init", 1, "start", "layers.1"),
    of_code("rope", 1, "forward", "layers.1"),
    of_code("counted_twice", 1, "loss", "head"),
    of_code("backward", 1, "backward", "layers.1"),
    of_code("gradient", 1, "gradient", "layers.0"),
    of_code("decay_norms", 1, "update", "layers.0"),
    // This mistake shows once there is momentum.
    of_code("momentum", 2, "update", "embed"),
    // A mistake that depends on the rank: runs on one and on two ranks differ.
    Planted {
        good: &["--ranks", "1", "--set", "train.micro_batch=4"],
        bad: &["--ranks", "2", "--set", "train.micro_batch=4"],
        ..of_code("mask", 1, "forward", "layers.0")
    },
    // Communication.
    of_fault(&["--fault", "scale=2@backward:2:1"], "gradient", "head"),
    of_fault(&["--fault", "unreduced@backward:2:0"], "gradient", "head"),
    of_fault(&["--fault", STALE], "forward", "embed"),
    // The same mistake, compared with a run whose sums have a different order.
    Planted {
        good: &["--ranks", "1", "--set", "train.micro_batch=4"],
        ..of_fault(&["--fault", "scale=2@backward:2:1"], "gradient", "head")
    },
    // A small mistake in bf16, where runs on one and on two ranks are nearly equal.
    Planted {
        good: &["--ranks", "1", "--set", "precision.compute=bf16"],
        ..of_fault(
            &["--set", "precision.compute=bf16", "--fault", "scale=1.01@backward:2:1"],
            "gradient",
            "head",
        )
    },
    // Data with one different token.
    Planted {
        code: "",
        good: &["--set", "data.shuffle=false"],
        bad: &["--set", "data.shuffle=false", "--set", "data.path=other"],
        step: 2,
        phase: "data",
        module: "embed",
        key: Some("data.path"),
    },
];

/// Selects the custom parts of `train/kiln/examples/planted.rs`.
const OWN: [&str; 8] = [
    "--set",
    "model.attention=mine",
    "--set",
    "model.feed_forward=mine",
    "--set",
    "loss.kind=mine",
    "--set",
    "optim.kind=mine",
];

fn workspace() -> Workspace {
    let workspace = Workspace::new();
    let mut other = tokens(crate::support::TRAIN_TOKENS);
    // The changed token is in the second step, which has samples 8 to 15 of 8 tokens.
    other[70] += 1;
    workspace.write_data("other", &other);
    workspace
}

fn train(workspace: &Workspace, code: &str, is_own: bool, out: &str, arguments: &[&str]) {
    let own = if is_own { &OWN[..] } else { &[] };
    let train = ["train", "run.toml", "--out", out, "--hash", "steps=1-3", "--set", "eval.samples=2"];
    let arguments = [&train[..], own, arguments].concat();
    let mut command = workspace.command_of(&example("planted"), &arguments);
    let ended = workspace.end(command.env("PLANTED", code).spawn().expect("it starts"));
    assert_eq!(ended.code, Some(0), "{code} {arguments:?}: {ended:?}");
}

fn diff(workspace: &Workspace, a: &str, b: &str) -> (Option<i32>, Json) {
    let Ended { code, stdout, stderr } = workspace.kiln(&["diff", a, b, "--json"]);
    let json = serde_json::from_str(&stdout);
    (code, json.unwrap_or_else(|error| panic!("{error}: {stdout} {stderr}")))
}

#[test]
fn every_planted_mistake_is_found() {
    let workspace = workspace();
    let mut wrong = Vec::new();
    for (index, planted) in PLANTED.iter().enumerate() {
        let Planted { code, good, bad, step, phase, module, .. } = planted;
        let is_own = !code.is_empty();
        let (a, b) = (format!("good-{index}"), format!("bad-{index}"));
        // A mistake that depends on the rank occurs with any number of ranks.
        let of_good = if *code == "mask" { code } else { "" };
        train(&workspace, of_good, is_own, &a, good);
        train(&workspace, code, is_own, &b, bad);
        let (ended, report) = diff(&workspace, &a, &b);
        let found = &report["parted"];
        let is_found = ended == Some(1)
            && report["verdict"] == "different"
            && found["step"] == *step
            && found["phase"] == *phase
            && found["module"] == *module;
        let note = found["note"].as_str().unwrap_or_default();
        let is_found = is_found && (bad.last() != Some(&STALE) || note == "only on rank 1");
        let cause = report["likely_cause"].as_str().unwrap_or_default();
        if !is_found || planted.key.is_some_and(|key| !cause.contains(key)) {
            wrong.push(format!("{code}{bad:?}: {found}, {cause}"));
        }
    }
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), PLANTED.len(), wrong.join("\n"));
}

#[test]
fn the_key_that_makes_a_difference_is_named() {
    let workspace = workspace();
    for Planted { good, bad, step, phase, module, key, .. } in &PLANTED {
        let Some(key) = key else { continue };
        let set = |flag: &'static str, arguments: &'static [&'static str]| {
            arguments.iter().filter(|word| **word != "--set").flat_map(move |word| [flag, *word])
        };
        // Other keys that make no difference.
        let harmless = ["train.ranks=4", "shard.strategy=NO_SHARD", "log.every=3", "checkpoint.keep=7"];
        let mut arguments = vec!["bisect", "run.toml", "run.toml", "--json"];
        arguments.extend(set("--set-good", good).chain(set("--set-bad", bad)));
        arguments.extend(harmless.iter().flat_map(|set| ["--set-bad", *set]));
        let ended = workspace.kiln(&arguments);
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
        let report: Json = serde_json::from_str(&ended.stdout).expect("JSON");
        let culprits = report["culprits"].as_array().expect("a list");
        assert_eq!(culprits.len(), 1, "{key}: {report:#}");
        assert_eq!(culprits[0]["keys"][0]["key"], *key);
        let parts = &culprits[0]["outcome"]["parts_at"];
        assert_eq!(
            (&parts["step"], &parts["phase"], &parts["module"]),
            (&(*step).into(), &(*phase).into(), &(*module).into())
        );
    }
}

#[test]
fn runs_that_are_the_same_part_nowhere() {
    let workspace = workspace();
    let run = |out: &str, arguments: &[&str]| train(&workspace, "", false, out, arguments);
    run("two", &[]);
    for (out, arguments) in [
        ("again", &[][..]),
        ("none", &["--set", "shard.strategy=NO_SHARD", "--set", "shard.accumulate=sharded"]),
        ("grad", &["--set", "shard.strategy=SHARD_GRAD_OP"]),
        ("recompute", &["--set", "shard.recompute=block"]),
    ] {
        run(out, arguments);
        let (ended, report) = diff(&workspace, "two", out);
        assert_eq!((ended, &report["verdict"]), (Some(0), &"equal".into()), "{out}: {report:#}");
        assert_eq!(report["equal"], report["places"]);
    }
    let processes = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--out", "processes"];
    workspace.succeed(&[&processes[..], &["--hash", "steps=1-3", "--set", "eval.samples=2"]].concat());
    assert_eq!(diff(&workspace, "two", "processes").0, Some(0));
    for (out, arguments) in [
        ("unsharded", &["--set", "shard.accumulate=unsharded"][..]),
        ("one", &["--ranks", "1"]),
        ("four", &["--ranks", "4"]),
        ("four_none", &["--ranks", "4", "--set", "shard.strategy=NO_SHARD"]),
        ("hybrid", &["--ranks", "4", "--set", "shard.strategy=HYBRID_SHARD", "--set", "shard.shard_size=2"]),
        ("rows", &["--set", "train.micro_batch=1"]),
    ] {
        run(out, arguments);
        let (ended, report) = diff(&workspace, "two", out);
        assert_eq!((ended, &report["verdict"]), (Some(1), &"rounding".into()), "{out}: {report:#}");
        assert!(report["largest"].as_f64().is_some_and(|largest| largest < 1e-5), "{out}: {report:#}");
        // Only the first forward pass does not depend on how the batch is split.
        assert!(["gradient", "backward", "loss"].contains(&report["first"]["phase"].as_str().expect("one")));
        let said = workspace.kiln(&["diff", "two", out, "--tolerance", "1e-5"]);
        assert_eq!(said.code, Some(0), "{said:?}");
        assert!(
            said.stdout.contains("differ by rounding") && said.stdout.contains("bit for bit equal"),
            "{said:?}"
        );
        assert_eq!(workspace.kiln(&["diff", "two", out, "--tolerance", "1e-12"]).code, Some(1));
    }
    let half = ["--set", "precision.compute=bf16"];
    run("half", &half);
    for (out, arguments) in [
        ("half_one", &["--ranks", "1"][..]),
        ("half_four", &["--ranks", "4"]),
        ("half_rows", &["--set", "train.micro_batch=1"]),
    ] {
        run(out, &[&half, arguments].concat());
        let (_, report) = diff(&workspace, "half", out);
        assert_ne!(report["verdict"], "different", "{out}: {report:#}");
    }
    // The second run trained on and evaluated a different number of samples.
    run("short", &["--set", "optim.schedule=constant"]);
    run("longer", &["--set", "optim.schedule=constant", "--set", "train.steps=6", "--set", "eval.samples=3"]);
    let (_, report) = diff(&workspace, "short", "longer");
    assert_eq!(report["verdict"], "equal", "{report:#}");
    // Without hashes, the other files are compared.
    workspace.remove("again/hashes.jsonl");
    let (ended, report) = diff(&workspace, "two", "again");
    assert_eq!((ended, &report["verdict"]), (Some(0), &"equal".into()), "{report:#}");
    assert_eq!(diff(&workspace, "two/metrics.jsonl", "one/metrics.jsonl").0, Some(1));
}

#[test]
fn side_by_side_is_one_command() {
    let workspace = workspace();
    let live = |more: &[&str]| {
        let ended =
            workspace.kiln(&[&["diff", "--live", "run.toml", "run.toml", "--json"][..], more].concat());
        let report: Json = serde_json::from_str(&ended.stdout).unwrap_or_else(|_| panic!("{ended:?}"));
        (ended.code, report)
    };
    let (ended, report) = live(&["--ranks-a", "1", "--ranks-b", "4"]);
    assert_eq!((ended, &report["verdict"]), (Some(1), &"rounding".into()), "{report:#}");
    let none = ["--set-b", "shard.strategy=NO_SHARD", "--set-b", "shard.accumulate=sharded"];
    assert_eq!(live(&none).0, Some(0));
    let (ended, report) = live(&["--set-b", "train.seed=1"]);
    assert_eq!((ended, &report["parted"]["phase"]), (Some(1), &SEED.phase.into()), "{report:#}");
    assert_eq!(workspace.kiln(&["diff", "run.toml", "run.toml", "--set-b", "train.seed=1"]).code, Some(2));
}

#[test]
fn hashes_of_a_run_that_goes_on_are_those_of_one_that_did_not_stop() {
    let workspace = workspace();
    let run = |out: &str, more: &[&str]| {
        let train = ["train", "run.toml", "--out", out, "--hash", "steps=1-4,modules"];
        workspace.succeed(&[&train[..], &["--set", "checkpoint.every=2"], more].concat());
    };
    run("straight", &[]);
    run("resumed", &[]);
    run("resumed", &["--resume", "resumed/checkpoints/fsdp_cpt2"]);
    let steps = |out: &str| -> Vec<u64> {
        let text = workspace.text(format!("{out}/hashes.jsonl"));
        let step = |line: &str| serde_json::from_str::<Json>(line).expect("JSON")["step"].as_u64();
        text.lines().map(|line| step(line).expect("a step")).collect()
    };
    assert_eq!(steps("resumed"), [1, 2, 3, 4]);
    assert_eq!(diff(&workspace, "straight", "resumed").0, Some(0));
    let line = workspace.text("straight/hashes.jsonl");
    let first: Json = serde_json::from_str(line.lines().next().expect("a line")).expect("JSON");
    let tensors: std::collections::BTreeSet<_> = first["entries"]
        .as_array()
        .expect("entries")
        .iter()
        .map(|entry| entry["tensor"].to_string())
        .collect();
    assert!(tensors.contains("\"weights\"") && !tensors.iter().any(|name| name.contains('.')), "{tensors:?}");
}

/// Changes one value of a tensor in a Hugging Face model.
fn plant(workspace: &Workspace, folder: &str, tensor: &str, value: f32) {
    let path = format!("{folder}/model.safetensors");
    let mut file = workspace.read(&path);
    let header = 8 + u64::from_le_bytes(file[..8].try_into().expect("a length")) as usize;
    let names: Json = serde_json::from_slice(&file[8..header]).expect("a header");
    assert_eq!(names[tensor]["dtype"], "F32", "{tensor}");
    let at = header + names[tensor]["data_offsets"][0].as_u64().expect("an offset") as usize;
    file[at..at + 4].copy_from_slice(&value.to_le_bytes());
    workspace.write(&path, file);
}

#[test]
fn what_is_not_a_number_is_a_difference_and_named_first() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "a"]);
    workspace.succeed(&["export", "--checkpoint", "a", "--out", "hf"]);
    let late = "model.norm.weight";
    for value in [f32::NAN, f32::INFINITY] {
        let other = format!("hf-{value}");
        workspace.copy("hf", &other);
        plant(&workspace, &other, late, value);
        // A finite difference in an earlier tensor.
        plant(&workspace, &other, "model.embed_tokens.weight", 7.0);
        for (a, b) in [("hf", other.as_str()), (other.as_str(), "hf"), ("a", other.as_str())] {
            let (ended, report) = diff(&workspace, a, b);
            assert_eq!((ended, &report["verdict"]), (Some(1), &"different".into()), "{report:#}");
            let place = format!("{}", report["parted"]);
            assert!(place.contains("norm.weight") && place.contains("1 of them NaN or infinite"), "{place}");
            let said = workspace.kiln(&["diff", a, b, "--tolerance", "1"]);
            assert_eq!(said.code, Some(1), "{said:?}");
        }
    }
    // Metrics and hashes.
    workspace.copy("a", "b");
    let metrics = workspace.metrics("a");
    let lines = metrics.into_iter().map(|mut line| {
        if line["step"] == 3 && line.get("grad_norm").is_some() {
            line["grad_norm"] = Json::Null;
        }
        line.to_string() + "\n"
    });
    workspace.write("b/metrics.jsonl", lines.collect::<String>());
    let said = workspace.kiln(&["diff", "a", "b", "--tolerance", "1"]);
    assert_eq!(said.code, Some(1), "{said:?}");
    assert!(said.stdout.contains("step 3, metrics, model: grad_norm ("), "{said:?}");
}

#[test]
fn tokenizers_of_data_are_compared() {
    let workspace = Workspace::new();
    workspace.write_data("same", &tokens(crate::support::TRAIN_TOKENS));
    assert_eq!(diff(&workspace, "data", "same").0, Some(0));
    // A different spelling of the same tokenizer.
    let mut tokenizer = workspace.json("same/tokenizer.json");
    workspace.write("same/tokenizer.json", format!("{tokenizer:#}\n"));
    assert_eq!(diff(&workspace, "data", "same").0, Some(0));
    let vocab = tokenizer["model"]["vocab"].as_object_mut().expect("a vocabulary");
    let (a, b) = (vocab["a"].clone(), vocab["b"].clone());
    (vocab["a"], vocab["b"]) = (b, a.clone());
    workspace.write("same/tokenizer.json", tokenizer.to_string());
    let (ended, report) = diff(&workspace, "data", "same");
    assert_eq!((ended, &report["parted"]["tensor"]), (Some(1), &"tokenizer.json".into()), "{report:#}");
    let note = format!("id {a} is \"a\" in the first, id {a} is \"b\" in the second");
    assert_eq!(report["parted"]["note"], note, "{report:#}");
    assert_eq!(workspace.kiln(&["diff", "data", "same", "--tolerance", "1"]).code, Some(1));
}

#[test]
fn checkpoints_models_data_and_configurations_can_be_compared() {
    let workspace = workspace();
    workspace.succeed(&["train", "run.toml", "--out", "a"]);
    workspace.succeed(&["train", "run.toml", "--out", "b", "--set", "optim.lr=2e-2"]);
    workspace.succeed(&["export", "--checkpoint", "a", "--out", "hf"]);
    assert_eq!(workspace.kiln(&["diff", "a", "a/checkpoints/fsdp_cpt4"]).code, Some(0));
    assert_eq!(workspace.kiln(&["diff", "a", "hf"]).code, Some(0));
    let said = workspace.kiln(&["diff", "b/checkpoints", "hf"]);
    assert!(said.code == Some(1) && said.stdout.contains("elements have different bits"), "{said:?}");
    let (ended, report) = diff(&workspace, "a", "b");
    let cause = report["likely_cause"].as_str().expect("a cause");
    assert!(
        ended == Some(1) && cause.contains("optim.lr (0.01 in the first, 0.02 in the second)"),
        "{report:#}"
    );
    let (ended, report) = diff(&workspace, "data", "other");
    assert_eq!((ended, &report["parted"]["tensor"]), (Some(1), &"train.bin".into()));
    assert!(
        report["parted"]["note"].as_str().is_some_and(|note| note.starts_with("token 70 is id")),
        "{report:#}"
    );
    let said = workspace.kiln(&["diff", "a/config.toml", "b/config.toml", "--tolerance", "1"]);
    assert!(said.code == Some(1) && said.stdout.contains("differ in 1 key"), "{said:?}");
    for (other, why) in [("data", "nothing in common to compare"), ("nothing", "does not exist")] {
        let said = workspace.kiln(&["diff", "a", other]);
        assert!(said.code == Some(2) && said.stderr.contains(why), "{said:?}");
        assert!(said.stderr.contains("kiln explain not-comparable"), "{said:?}");
    }
    let said = workspace.kiln(&["bisect", "a", "a"]);
    assert!(said.code == Some(1) && said.stdout.contains("the configurations are the same"), "{said:?}");
}
