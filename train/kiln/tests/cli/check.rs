//! `kiln check` on ranks that are threads: a valid set-up passes, and each planted fault is found and named
//! together with its fix. `check_processes` has the faults that need several processes.

use crate::hugging_face::copy_fixture;
use crate::support::{Ended, RUN, Workspace, example, tokenizer, tokens};

const CHECK: [&str; 4] = ["check", "run.toml", "--out", "run"];

/// Runs the check, and fails if it leaves files behind.
fn check(workspace: &Workspace, more: &[&str]) -> Ended {
    let before = workspace.tree();
    let ended = workspace.kiln(&[&CHECK[..], more].concat());
    let after = workspace.tree();
    let changed: Vec<_> =
        before.keys().chain(after.keys()).filter(|p| before.get(*p) != after.get(*p)).collect();
    assert!(changed.is_empty(), "{more:?}: changed {changed:?}");
    ended
}

/// Fails unless the check finds a fault in `what` of `stage` whose text contains all of `says`. Entries that
/// begin with `->` are advice.
#[track_caller]
pub fn assert_found(ended: &Ended, [stage, what]: [&str; 2], says: &[&str]) {
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let head = format!("fail  {stage:<5}  {what} ");
    let lines: Vec<_> = ended.stdout.lines().collect();
    let is_found = (0..lines.len()).any(|at| {
        let rest = lines[at + 1..].iter().take_while(|line| line.starts_with(' '));
        let text = [lines[at]].into_iter().chain(rest.copied()).collect::<Vec<_>>().join("\n");
        text.starts_with(&head) && says.iter().all(|part| text.contains(part))
    });
    assert!(is_found, "{head}{says:?}:\n{}\n{}", ended.stdout, ended.stderr);
    for unwanted in ["panicked", "Error {", "Some(", "Os {"] {
        assert!(!format!("{}{}", ended.stdout, ended.stderr).contains(unwanted), "{ended:?}");
    }
}

#[track_caller]
fn finds(workspace: &Workspace, more: &[&str], place: [&str; 2], says: &[&str]) {
    assert_found(&check(workspace, more), place, says);
}

/// Trains two steps in `run`.
fn trained() -> Workspace {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    workspace
}

#[test]
fn a_set_up_without_fault_passes() {
    let workspace = Workspace::new();
    for more in
        [&[][..], &["--ranks", "1"], &["--set", "shard.strategy=NO_SHARD", "--set", "checkpoint.format=full"]]
    {
        let ended = check(&workspace, more);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
        assert!(!ended.stdout.contains("warn  ") && !ended.stdout.contains("fail  "), "{ended:?}");
        for line in [
            "ok    env    configuration",
            "ok    env    device",
            "ok    env    run folder",
            "ok    data   tokenizer",
            "ok    data   training",
            "ok    data   first tokens",
            "ok    data   validation",
            "ok    model  model",
            "ok    model  memory",
            "ok    step   step",
            "ok    save   disk",
            "ok    save   save",
        ] {
            assert!(ended.stdout.contains(line), "{line}: {ended:?}");
        }
        let last = ended.stdout.lines().last().unwrap_or_default();
        assert!(last.contains(" ok, 0 warnings, 0 failures; ") && last.ends_with(" s"), "{last}");
    }
    // For a run that would resume, and for one that starts from the weights.
    let workspace = trained();
    let ended =
        check(&workspace, &["--resume", "latest", "--set", "checkpoint.keep=1", "--set", "train.steps=9"]);
    assert!(ended.stdout.contains("checkpoints take 1 x"), "one of two is there already: {ended:?}");
    for more in [&["--resume", "latest"][..], &["--set", "init.from=run", "--out", "new"]] {
        let ended = workspace.kiln(&[&["check", "run.toml", "--out", "run"][..], more].concat());
        let ended =
            if more[0] == "--set" { workspace.kiln(&[&["check", "run.toml"], more].concat()) } else { ended };
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains(" fits"), "{ended:?}");
    }
}

/// A model that is too large for a quick step is narrowed. Settings that name its layers remain valid.
#[test]
fn a_large_model_is_narrowed() {
    let workspace = Workspace::new();
    let large = ["--set", "model.d_model=768", "--set", "model.layers=4", "--set", "model.d_ff=2048"];
    let more = [
        "--set",
        "train.freeze=[\"layers.3.\"]",
        "--set",
        "train.global_batch=2",
        "--set",
        "train.micro_batch=1",
    ];
    let ended = check(&workspace, &[&large[..], &more].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("two narrow blocks with its layers"), "{ended:?}");
}

#[test]
fn stages_are_looked_at_by_themselves() {
    let workspace = Workspace::new();
    let stages = |ended: &Ended| {
        let mut stages: Vec<_> = ended
            .stdout
            .lines()
            // Below the line of a check, further lines may show more.
            .filter(|line| !line.starts_with(' '))
            .filter_map(|line| line.split_whitespace().nth(1))
            .map(str::to_owned)
            .collect();
        stages.pop();
        stages.dedup();
        stages
    };
    for (stage, shown) in
        [("env", &["env"][..]), ("data", &["data"]), ("model", &["model"]), ("step,save", &["step", "save"])]
    {
        let ended = check(&workspace, &["--stage", stage]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert_eq!(stages(&ended), shown, "{ended:?}");
    }
    // The report says that a stage is skipped because a stage it needs has failed.
    let ended = check(&workspace, &["--stage", "save", "--set", "model.feed_forward=mine"]);
    assert_found(&ended, ["model", "model"], &["mine"]);
    assert!(ended.stdout.contains("warn  save   skipped  skipped: needs model"), "{ended:?}");
}

#[test]
fn faults_of_the_configuration() {
    let workspace = Workspace::new();
    let config = ["env", "configuration"];
    workspace.write("run.toml", RUN.replace("\nsteps", "\nstepps"));
    finds(&workspace, &[], config, &["unknown key `stepps`", "did you mean `steps`"]);
    workspace.write("run.toml", RUN);
    finds(
        &workspace,
        &["--set", "train.global_batch=7"],
        config,
        &["over 2 ranks leaves 1", "-> use a multiple of 2"],
    );
    let more_ranks = check(&workspace, &["--ranks", "16"]);
    assert_found(&more_ranks, config, &["train.global_batch = 8 over 16 ranks"]);
    assert!(more_ranks.stdout.contains("skipped: needs a usable configuration"), "{more_ranks:?}");
    finds(&workspace, &["--set", "train.micro_batch=3"], config, &["-> use a micro_batch that divides 4"]);
    // Each problem has its own line.
    let both = check(&workspace, &["--set", "train.global_batch=7", "--set", "optim.beta2=1.5"]);
    assert_found(&both, config, &["optim.beta2 = 1.5: must be in [0, 1)"]);
    assert_found(&both, config, &["over 2 ranks leaves 1"]);
    if !cfg!(feature = "cuda") {
        workspace.replace("run.toml", "backend = \"cpu\"\nthreads = 1\n", "backend = \"cuda\"\n");
        finds(&workspace, &[], config, &["built without CUDA", "--features cuda"]);
    }
}

#[test]
fn faults_of_the_model() {
    let workspace = Workspace::new();
    finds(&workspace, &["--set", "model.attention=mine"], ["model", "model"], &["\"mine\""]);
    finds(&workspace, &["--set", "optim.kind=sgd"], ["model", "optimizer"], &["sgd"]);
    finds(&workspace, &["--set", "loss.kind=hinge"], ["model", "loss"], &["hinge"]);
    finds(
        &workspace,
        &["--set", "train.freeze=[\"layer.0\"]"],
        ["model", "parameters"],
        &["no parameter starts with \"layer.0\""],
    );
    let small = check(&workspace, &["--set", "device.memory=10KiB"]);
    let says = ["this run takes", "device.memory is 10.0 KiB", "-> What would help"];
    assert_found(&small, ["model", "memory"], &says);
    // A step of a reduced model needs less memory.
    assert!(small.stdout.contains("ok    save   save"), "{small:?}");
    // The first step succeeds; the second does not.
    let wild = check(&workspace, &["--set", "optim.lr=1e30"]);
    assert_found(&wild, ["save", "save"], &["has a loss of", "-> lower optim.lr"]);
    assert!(wild.stdout.contains("ok    step   step"), "{wild:?}");
}

#[test]
fn faults_of_the_data() {
    let damaged = |damage: &dyn Fn(&Workspace), more: &[&str], what: &str, says: &[&str]| {
        let workspace = Workspace::new();
        damage(&workspace);
        finds(&workspace, more, ["data", what], says);
    };
    damaged(&|_| {}, &["--set", "data.path=none"], "data", &["none"]);
    damaged(&|w| w.write("data/data.json", "{"), &[], "data", &["data.json"]);
    damaged(&|w| w.remove("data/val.bin"), &[], "validation", &["val.bin"]);
    let half = |w: &Workspace| {
        let bytes = w.read("data/train.bin");
        w.write("data/train.bin", &bytes[..bytes.len() / 2]);
    };
    damaged(&half, &[], "training", &["train.bin has 1801 bytes, but data.json states 1801 tokens"]);
    damaged(&|_| {}, &["--set", "data.seq_len=5000"], "training", &["data.seq_len = 5000 needs 5001"]);
    // The last id of the token file is invalid.
    let beyond = |w: &Workspace| {
        let mut all = tokens(1801);
        all[1800] = 999;
        w.write_data("data", &all);
    };
    damaged(&beyond, &[], "training", &["is 999, outside the vocabulary of 257"]);
    damaged(&|w| w.write("data/tokenizer.json", "{}"), &[], "tokenizer", &["tokenizer.json"]);
    // A tokenizer with fewer tokens than the ids in the data.
    let foreign = |w: &Workspace| {
        let mut all = tokens(1801);
        all[7] = 290;
        w.write_data("data", &all);
        w.replace("data/data.json", "\"vocab_size\":257", "\"vocab_size\":300");
    };
    damaged(
        &foreign,
        &[],
        "tokenizer",
        &["has the id 290, and the tokenizer has 257", "-> put the tokenizer"],
    );
    damaged(
        &|w| w.remove("data"),
        &["--set", "data.text=[\"none.txt\"]"],
        "text",
        &["none.txt", "-> check its spelling"],
    );
    let unknown = ["--set", "data.text=[\"builtin:arithmetik\"]"];
    damaged(&|w| w.remove("data"), &unknown, "text", &["no built-in text", "builtin:arithmetic"]);
    let workspace = Workspace::new();
    let small = ["--set", "model.vocab_size=100"];
    finds(
        &workspace,
        &small,
        ["model", "model"],
        &["has 257 tokens, but model.vocab_size is 100", "-> raise"],
    );
}

/// Text that is not a regular file still counts as existing. No one writes to the FIFO, and the check does not
/// wait for it.
#[test]
fn text_that_is_no_file() {
    let workspace = Workspace::new();
    workspace.remove("data");
    nix::unistd::mkfifo(&workspace.path("pipe"), nix::sys::stat::Mode::S_IRWXU).expect("a pipe");
    for text in ["builtin:arithmetic", "-", "pipe"] {
        let setting = format!("data.text=[\"{text}\"]");
        let ended = workspace.kiln(&[&CHECK[..], &["--stage", "data", "--set", &setting]].concat());
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert!(ended.stdout.contains("the run prepares it first, from 1 input"), "{ended:?}");
    }
}

/// Prepared data records to which tokenizer it belongs.
#[test]
fn a_tokenizer_that_was_replaced() {
    let workspace = Workspace::new();
    workspace.write("text.txt", "one two three four five six ".repeat(400));
    workspace.succeed(&["data", "prepare", "--input", "text.txt", "--out", "own", "--vocab-size", "270"]);
    let own = ["--set", "data.path=own"];
    let ended = check(&workspace, &own);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    tokenizer().save(workspace.path("own/tokenizer.json")).expect("a tokenizer");
    finds(&workspace, &own, ["data", "tokenizer"], &["own/tokenizer.json"]);
}

#[test]
fn faults_of_the_run_folder() {
    let workspace = trained();
    let folder = ["env", "run folder"];
    let occupied = check(&workspace, &[]);
    assert_found(&occupied, folder, &["run already holds a run", "-> continue it with --resume run"]);
    // A step needs no folder; a save does.
    assert!(occupied.stdout.contains("ok    step   step"), "{occupied:?}");
    assert!(
        occupied.stdout.contains("warn  save   skipped        skipped: needs env: run folder"),
        "{occupied:?}"
    );
    let at = |out: &str| workspace.kiln(&["check", "run.toml", "--out", out]);
    assert_found(&at("data"), folder, &["data is not empty and holds no run of Kiln"]);
    assert_found(&at("run.toml"), folder, &["run.toml is a file"]);
    assert_found(&at("run.toml/run"), folder, &["run.toml is a file", "-> check the permissions"]);
    // A folder in which even root cannot write.
    assert_found(
        &at("/proc/run"),
        folder,
        &["nothing can be written to /proc", "choose another folder with --out"],
    );
    let more =
        ["--set", "checkpoint.keep=0", "--set", "checkpoint.every=1", "--set", "train.steps=1000000000000"];
    let small = workspace.kiln(&[&["check", "run.toml", "--out", "new"][..], &more].concat());
    assert_found(&small, ["save", "disk"], &["checkpoints take 1000000000000 x", "-> free some space there"]);
}

#[test]
fn faults_of_the_checkpoint_to_start_from() {
    let resume = ["--resume", "latest"];
    let with = |more: &[&'static str]| [&resume[..], more].concat();
    let checkpoint = ["model", "checkpoint"];
    let workspace = Workspace::new();
    finds(&workspace, &["--resume", "none"], ["env", "run folder"], &["none"]);
    let workspace = trained();
    finds(
        &workspace,
        &with(&["--set", "model.d_model=32"]),
        checkpoint,
        &["model.d_model is 16 there and 32 here"],
    );
    finds(&workspace, &with(&["--set", "optim.kind=muon"]), checkpoint, &["muon"]);
    finds(
        &workspace,
        &with(&["--set", "train.seed=7"]),
        ["model", "position"],
        &["train.seed was 0 and is 7 now"],
    );
    let allowed = check(&workspace, &with(&["--set", "train.seed=7", "--allow-changed", "train.seed"]));
    assert_eq!(allowed.code, Some(0), "{allowed:?}");
    let optimizer = "run/checkpoints/fsdp_cpt2/optimizer-part-00002-of-00002.safetensors";
    workspace.remove(optimizer);
    finds(&workspace, &resume, checkpoint, &["optimizer-part-00002-of-00002.safetensors"]);
    let weights = "run/checkpoints/fsdp_cpt2/model-part-00001-of-00002.safetensors";
    let bytes = workspace.read(weights);
    workspace.write(weights, &bytes[..bytes.len() - 4]);
    let from = workspace.kiln(&["check", "run.toml", "--out", "new", "--set", "init.from=run"]);
    assert_found(
        &from,
        ["model", "init.from"],
        &["model-part-00001-of-00002.safetensors", "and should have"],
    );
}

/// A Hugging Face model with a file missing.
#[test]
fn weights_of_hugging_face_that_are_not_all_there() {
    let workspace = Workspace::new();
    copy_fixture(&workspace, "llama_shards", "hf");
    workspace.remove("hf/model-00002-of-00003.safetensors");
    let from = ["--set", "init.from=hf"];
    finds(&workspace, &from, ["model", "init.from"], &["model-00002-of-00003.safetensors"]);
}

/// Runs `train/kiln/examples/planted.rs` with the mistake `planted`.
fn planted(workspace: &Workspace, planted: &str, arguments: &[&str]) -> Ended {
    let mut command = workspace.command_of(&example("planted"), arguments);
    workspace.end(command.env("PLANTED", planted).spawn().expect("it starts"))
}

#[test]
fn a_loss_that_panics_is_named() {
    let workspace = Workspace::new();
    let own = ["--set", "loss.kind=mine"];
    let says = "loss.kind = \"mine\" panics for 2 tokens with ";
    let ended = planted(&workspace, "loss_panics", &[&CHECK[..], &own].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains("fail  model  loss"), "{ended:?}");
    assert!(ended.stdout.contains(says) && ended.stdout.contains("fewer than three tokens"), "{ended:?}");
    let ended =
        planted(&workspace, "loss_panics", &[&["train", "run.toml", "--out", "run"][..], &own].concat());
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains(says), "{ended:?}");
    assert!(!workspace.path("run").exists());
}

/// A part that panics in the middle of a run is named, even if the check of the start has not found it.
#[test]
fn parts_that_panic_in_a_step_are_named() {
    let workspace = Workspace::new();
    for (name, own, says) in [
        ("", &["--set", "loss.kind=panics"][..], "rank 0 panicked: loss.kind = \"panics\": no idea"),
        (
            "loss_panics_later",
            &["--set", "loss.kind=mine"],
            "rank 0 panicked: loss.kind = \"mine\": more than two tokens",
        ),
        ("ffn_panics", &LAYERS, "rank 0 panicked: layers.0.ffn (\"mine\"): made for one sequence"),
    ] {
        let run = ["train", "run.toml", "--out", &format!("run{name}"), "--ranks", "1"];
        let ended = planted(&workspace, name, &[&run[..], own].concat());
        assert_eq!(ended.code, Some(1), "{ended:?}");
        assert!(ended.stderr.contains(says), "{ended:?}");
    }
}

#[test]
fn a_state_that_no_checkpoint_has_is_found() {
    let workspace = Workspace::new();
    let own = ["--set", "optim.kind=mine"];
    for ranks in ["1", "2"] {
        let arguments = [&CHECK[..], &own, &["--ranks", ranks]].concat();
        let ended = planted(&workspace, "hidden_state", &arguments);
        assert_found(&ended, ["save", "save"], &["the second step has loss", "checkpoints do not store"]);
        let ended = planted(&workspace, "", &arguments);
        assert_eq!(ended.code, Some(0), "{ended:?}");
    }
}

/// Selects the custom layers of `train/kiln/examples/planted.rs`.
const LAYERS: [&str; 4] = ["--set", "model.attention=mine", "--set", "model.feed_forward=mine"];

/// Each mistake of a layer, which training would hide, is the only one that is found.
#[test]
fn mistakes_of_custom_layers_are_found() {
    let workspace = Workspace::new();
    let look = |name: &str| planted(&workspace, name, &[&CHECK[..], &LAYERS, &["--stage", "model"]].concat());
    let whole = look("");
    assert_eq!(whole.code, Some(0), "{whole:?}");
    assert!(
        whole.stdout.contains("ok    model  layers  causal, cache, lengths, batches, keys, randomness ok"),
        "{whole:?}"
    );
    let (attention, ffn) = ("layers.0.attention (\"mine\")", "layers.0.ffn (\"mine\")");
    for (name, place, says) in [
        ("not_causal", attention, "is not causal: the last of 8 tokens changes earlier results: position 0"),
        ("no_cache", attention, "gives another result with a key-value cache than without: position 4"),
        ("one_length", ffn, "panics for [2, 1] tokens: made for 8 tokens"),
        ("hidden", ffn, "depends on random values that are not parameters"),
        ("random", ffn, "gives another result when a training pass is repeated"),
        ("mask", ffn, "gives another result when a training pass is repeated"),
        ("unkeyed", "layers.0.ffn.gain", "starts with other values each time the model is made"),
    ] {
        let ended = look(name);
        assert_eq!(ended.code, Some(1), "{name}: {ended:?}");
        let problem = format!("{place} {says}");
        let found: Vec<_> = ended.stdout.lines().filter(|line| line.starts_with("fail  ")).collect();
        let is_found = |line: &&str| line.starts_with("fail  model  layers  ") && line.contains(&problem);
        assert!(found.iter().any(is_found), "{name}: {ended:?}");
        // What depends on later positions depends on the number of tokens.
        assert!(found.len() == 1 || name == "not_causal", "{name}: {ended:?}");
    }
    let ended = look("same_key");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let equal = "warn  model  layers  layers.0.attention.q_proj.weight and layers.0.attention.k_proj.weight start with";
    assert!(ended.stdout.contains(equal), "{ended:?}");
}

#[test]
fn a_layer_of_another_shape_is_named() {
    let workspace = Workspace::new();
    let ended = planted(&workspace, "shape", &[&CHECK[..], &LAYERS].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let says = "layers.0.ffn (\"mine\") returned [2, 8, 32] where [2, 8, 16] is needed";
    assert!(ended.stdout.contains(&format!("fail  model  model          {says}")), "{ended:?}");
    assert!(ended.stdout.contains("skipped: needs model: model"), "{ended:?}");
    let ended = planted(&workspace, "shape", &[&["train", "run.toml", "--out", "run"][..], &LAYERS].concat());
    assert_eq!(ended.code, Some(2), "{ended:?}");
    let says = "layers.0.ffn (\"mine\") returned [1, 8, 32] where [1, 8, 16] is needed";
    assert!(ended.stderr.contains(says), "{ended:?}");
    assert!(!workspace.path("run").exists());
}

/// The examples have no mistakes.
#[test]
fn layers_of_the_examples_are_not_accused() {
    let workspace = Workspace::new();
    for (name, layer) in [
        ("own_layer", "model.feed_forward=relu3"),
        ("own_attention", "model.attention=alibi"),
        ("own_metric", "model.feed_forward=watched"),
    ] {
        let arguments = [&CHECK[..], &["--stage", "model", "--set", layer]].concat();
        let ended = workspace.run(&example(name), &arguments);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
        assert!(ended.stdout.contains("ok    model  layers"), "{ended:?}");
    }
}

/// Unusable data must be the only failure, and not cause another one, of a model with a different vocabulary.
#[test]
fn data_that_fail_are_the_only_failure() {
    let workspace = Workspace::new();
    let failures = |ended: &Ended| {
        let lines = ended.stdout.lines().filter(|line| line.starts_with("fail  "));
        lines.map(|line| line.split_whitespace().nth(1).unwrap_or_default().to_owned()).collect::<Vec<_>>()
    };
    let only_data = |more: &[&str]| {
        let ended = check(&workspace, more);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let failures = failures(&ended);
        assert!(!failures.is_empty() && failures.iter().all(|stage| stage == "data"), "{ended:?}");
        ended
    };
    // The model would not fit with the vocabulary that the configuration sets for data not prepared yet.
    let small = ["--set", "device.memory=100MiB", "--set", "data.vocab_size=1000000"];
    let ended = only_data(&[&["--set", "data.path=none"][..], &small].concat());
    assert!(ended.stdout.contains("skipped: needs data, which determine the vocabulary"), "{ended:?}");
    // The vocabulary is known from the readable files.
    workspace.copy("data", "torn");
    workspace.write("torn/train.bin", "x");
    let ended = only_data(&[&["--set", "data.path=torn"][..], &small].concat());
    assert!(ended.stdout.contains("ok    model  model"), "{ended:?}");
}
