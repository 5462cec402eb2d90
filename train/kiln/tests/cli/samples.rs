//! Texts and losses of answers during a run, and its events: what they contain, that they do not change the run,
//! and that they do not depend on the ranks.

use std::path::Path;

use kiln::process::output::printable;
use rustix::process::Signal;
use serde_json::Value as Json;

use crate::support::{Workspace, names, signal};

/// Pairs that are short enough for sequences of eight tokens.
const PAIRS: &str = "{\"prompt\":\"ab\",\"answer\":\"cd\"}\n\n{\"prompt\":\"\",\"answer\":\"efg\"}\n\
                     {\"prompt\":\"hello\",\"answer\":\"a\"}\n";

const ON_THE_WAY: [&str; 10] = [
    "--set",
    "sample.every=2",
    "--set",
    "sample.prompt=abc",
    "--set",
    "sample.prompts=[\"x y\", \"\"]",
    "--set",
    "eval.prompts=pairs.jsonl",
    "--set",
    "eval.every=3",
];

/// Returns a workspace for six steps, with every setting that depends on a position, and a file of answers.
fn workspace(changes: &[(&str, &str)]) -> Workspace {
    let workspace = Workspace::new();
    let common = [
        ("train.steps", "6"),
        ("train.seed", "7"),
        ("model.dropout", "0.1"),
        ("sample.max_tokens", "12"),
        ("checkpoint.every", "2"),
    ];
    workspace.config("run.toml", &[&common, changes].concat());
    workspace.write("pairs.jsonl", PAIRS);
    workspace
}

fn train(workspace: &Workspace, out: &str, more: &[&str]) -> String {
    workspace.succeed(&[&["train", "run.toml", "--out", out], more].concat())
}

fn lines(workspace: &Workspace, path: &str) -> Vec<Json> {
    let text = workspace.text(path);
    text.lines().map(|line| serde_json::from_str(line).expect("JSON")).collect()
}

/// Step, prompt and text of every sample.
fn samples(workspace: &Workspace, out: &str) -> Vec<(u64, String, String)> {
    let text = |line: &Json, key: &str| line[key].as_str().expect("a text").to_owned();
    lines(workspace, &format!("{out}/samples.jsonl"))
        .iter()
        .map(|line| (line["step"].as_u64().expect("a step"), text(line, "prompt"), text(line, "text")))
        .collect()
}

/// Returns the step and kind of every event.
fn events(workspace: &Workspace, out: &str) -> Vec<(u64, String)> {
    let events = lines(workspace, &format!("{out}/events.jsonl"));
    assert!(events.is_sorted_by_key(|event| event["time"].as_f64().expect("a time")));
    let kind = |event: &Json| event["kind"].as_str().expect("a kind").to_owned();
    events.iter().map(|event| (event["step"].as_u64().expect("a step"), kind(event))).collect()
}

/// Returns the text of the last event.
fn last_event(workspace: &Workspace, out: &str) -> String {
    let events = lines(workspace, &format!("{out}/events.jsonl"));
    events.last().expect("an event")["text"].as_str().expect("a text").to_owned()
}

/// Returns the weights and moments of the last checkpoint, by file.
fn tensors(workspace: &Workspace, out: &str) -> Vec<(String, Vec<u8>)> {
    let folder = Path::new(out).join("checkpoints/fsdp_cpt6");
    let all = names(&workspace.path(&folder)).into_iter().filter(|name| name.ends_with(".safetensors"));
    let all: Vec<_> = all.map(|name| (name.clone(), workspace.read(folder.join(name)))).collect();
    assert!(!all.is_empty());
    all
}

/// Returns the validation losses, with their steps.
fn validation(workspace: &Workspace, out: &str, key: &str) -> Vec<(u64, f64)> {
    let metrics = workspace.metrics(out);
    let of = |line: &Json| Some((line["step"].as_u64()?, line.get(key)?.as_f64()?));
    metrics.iter().filter_map(of).collect()
}

#[test]
fn a_run_has_the_same_bits_with_samples_on_the_way() {
    for changes in [
        &[][..],
        &[("precision.compute", "'bf16'"), ("model.tie_embeddings", "true"), ("shard.recompute", "'block'")],
        &[("shard.strategy", "'SHARD_GRAD_OP'"), ("sample.temperature", "0.0")],
    ] {
        let workspace = workspace(changes);
        train(&workspace, "plain", &["--set", "eval.every=3"]);
        assert!(!workspace.path("plain/samples.jsonl").exists());
        let said = train(&workspace, "run", &ON_THE_WAY);
        assert_eq!(workspace.steps("run"), workspace.steps("plain"), "{changes:?}");
        assert_eq!(validation(&workspace, "run", "val_loss"), validation(&workspace, "plain", "val_loss"));
        assert!(tensors(&workspace, "run") == tensors(&workspace, "plain"), "{changes:?}");

        let samples = samples(&workspace, "run");
        let of = |(step, prompt, _): &(u64, String, String)| (*step, prompt.clone());
        let expected = [2, 4, 6].map(|step| ["abc", "x y", ""].map(|prompt| (step, prompt.to_owned())));
        assert_eq!(samples.iter().map(of).collect::<Vec<_>>(), expected.concat());
        // One line for each text during the run, and all texts at its end.
        for step in [2, 4] {
            assert_eq!(said.matches(&format!("step {step:>5} | sample: ")).count(), 3, "{said}");
        }
        let last = samples[6..].iter().map(|(_, prompt, text)| format!("sample: {prompt}{text}\n"));
        let last = last.collect::<String>();
        assert!(said.contains(&format!("\n{}next ", printable(&last))), "{said}");
        assert!(workspace.metrics("run").iter().all(|line| line["time"].as_f64().expect("a time") > 1.7e9));
    }
}

/// With constant weights, the bits are the same on any number of ranks.
#[test]
fn samples_are_the_same_on_any_ranks() {
    let workspace = workspace(&[("optim.lr", "0.0"), ("optim.warmup_steps", "0")]);
    let train = |out: &str, more: &[&str]| {
        train(&workspace, out, &[&ON_THE_WAY[..], more].concat());
        (samples(&workspace, out), validation(&workspace, out, "answer_loss"))
    };
    let alone = train("alone", &["--ranks", "1"]);
    assert_eq!(alone.1.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 6]);
    // Two samples from the same weights and the same random numbers are equal.
    assert_eq!(alone.0[0].2, alone.0[6].2);
    for more in [
        &["--ranks", "2"][..],
        &["--ranks", "4", "--set", "shard.strategy=NO_SHARD"],
        &["--ranks", "4", "--set", "shard.strategy=HYBRID_SHARD", "--set", "shard.shard_size=2"],
    ] {
        assert_eq!(train(&format!("ranks{}", more.len()), more), alone, "{more:?}");
    }
    let other = train("other", &["--set", "train.seed=8"]);
    assert_ne!(other.0, alone.0);
}

#[test]
fn processes_write_what_threads_write() {
    let workspace = workspace(&[]);
    train(&workspace, "threads", &ON_THE_WAY);
    let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--"];
    let arguments = [&launch[..], &["train", "run.toml", "--out", "run"], &ON_THE_WAY].concat();
    workspace.succeed(&arguments);
    assert_eq!(samples(&workspace, "run"), samples(&workspace, "threads"));
    for key in ["val_loss", "answer_loss"] {
        assert_eq!(validation(&workspace, "run", key), validation(&workspace, "threads", key), "{key}");
    }
    assert_eq!(events(&workspace, "run"), events(&workspace, "threads"));
    // Processes of ranks other than 0 write none of these lines.
    let logs: String =
        names(&workspace.path("logs")).iter().map(|name| workspace.text(format!("logs/{name}"))).collect();
    assert_eq!(logs.matches("step     2 | sample: ").count(), 3, "{logs}");
}

#[test]
fn a_resumed_run_goes_on_with_its_samples_and_events() {
    let workspace = workspace(&[("train.ranks", "1")]);
    train(&workspace, "run", &ON_THE_WAY);
    let all = samples(&workspace, "run");
    let happened = |steps: &[u64]| {
        let saved = steps.iter().map(|step| (*step, "checkpoint".to_owned()));
        saved.chain([(6, "end".to_owned())]).collect::<Vec<_>>()
    };
    let straight = [vec![(0, "start".to_owned())], happened(&[2, 4, 6])].concat();
    assert_eq!(events(&workspace, "run"), straight);
    assert!(last_event(&workspace, "run").starts_with("6 steps, loss "));

    let back = ["--resume", "run/checkpoints/fsdp_cpt2"];
    train(&workspace, "run", &[&ON_THE_WAY[..], &back].concat());
    assert_eq!(samples(&workspace, "run"), all);
    assert_eq!(samples(&workspace, "run/superseded-1"), all[3..]);
    let resumed = [straight, vec![(2, "resume".to_owned())], happened(&[4, 6])].concat();
    assert_eq!(events(&workspace, "run"), resumed);

    // If later checkpoints are missing, as after a crash, the texts of their steps are kept in a separate
    // file.
    workspace.remove("run/checkpoints/fsdp_cpt6");
    workspace.write("run/checkpoints/latest", "fsdp_cpt4\n");
    train(&workspace, "run", &[&ON_THE_WAY[..], &["--resume", "latest"]].concat());
    assert_eq!(samples(&workspace, "run"), all);
    let cut = workspace.text("run/samples-superseded.jsonl");
    assert_eq!(cut.lines().count(), 3, "{cut}");
    let resume = &lines(&workspace, "run/events.jsonl")[resumed.len()];
    let text = resume["text"].as_str().expect("a text");
    assert!(text.starts_with("from step 4, run/checkpoints/fsdp_cpt4; kiln "), "{text}");
    assert!(text.contains(", 1 rank, FULL_SHARD, device: CPU"), "{text}");

    // A resume with nothing left to do changes nothing.
    let before = workspace.tree();
    train(&workspace, "run", &[&ON_THE_WAY[..], &["--resume", "latest"]].concat());
    let name = |file: &str| workspace.path("run").join(file);
    for file in ["samples.jsonl", "events.jsonl", "metrics.jsonl"] {
        assert_eq!(workspace.tree()[&name(file)], before[&name(file)], "{file}");
    }
}

#[test]
fn answers_have_the_loss_that_eval_tells() {
    let workspace = workspace(&[]);
    let said = train(&workspace, "run", &ON_THE_WAY);
    let losses = validation(&workspace, "run", "answer_loss");
    assert_eq!(losses.iter().map(|(step, _)| *step).collect::<Vec<_>>(), [3, 6]);
    assert_eq!(validation(&workspace, "run", "val_loss").len(), 2);
    assert!(said.contains(&format!(" | answer loss {:.4}\n", losses[0].1)), "{said}");
    let eval = ["eval", "--checkpoint", "run", "--pairs", "pairs.jsonl", "--json"];
    let told = workspace.succeed(&eval);
    let told: Json = serde_json::from_str(told.lines().last().expect("a line")).expect("JSON");
    let (told, logged) = (told["loss"].as_f64().expect("a loss"), losses[1].1);
    assert!((told - logged).abs() <= 1e-6 * told, "{told} and {logged}");
}

#[test]
fn prompts_that_cannot_be_used_are_refused_before_the_run() {
    let workspace = workspace(&[]);
    for (file, content) in [
        ("empty", "\n"),
        ("bad", "{\"prompt\":\"a\",\"answer\":\"b\"}\n{\"prompt\":\"a\"}\n"),
        ("long", "{\"prompt\":\"abcdef\",\"answer\":\"ghij\"}\n"),
        ("no_answer", "{\"prompt\":\"a\",\"answer\":\"\"}\n"),
    ] {
        workspace.write(&format!("{file}.jsonl"), content);
    }
    for (key, says) in [
        ("eval.prompts=gone.jsonl", "cannot read gone.jsonl: No such file or directory"),
        ("eval.prompts=data", "cannot read data: it is not a regular file"),
        ("eval.prompts=empty.jsonl", "empty.jsonl has no lines: write an object"),
        ("eval.prompts=bad.jsonl", "bad.jsonl, line 2: missing field `answer`"),
        ("eval.prompts=no_answer.jsonl", "no_answer.jsonl, line 1: the answer is empty"),
        (
            "eval.prompts=long.jsonl",
            "at most 8 before the last one: shorten them, or train with a longer data.seq_len",
        ),
        ("sample.every=3", "sample.every = 3: there is no prompt; set sample.prompt or sample.prompts"),
    ] {
        let ended = workspace.kiln(&["train", "run.toml", "--out", "run", "--set", key]);
        assert_eq!(ended.code, Some(2), "{key}: {ended:?}");
        assert!(ended.stderr.contains(says), "{key}: {ended:?}");
        assert!(!workspace.path("run").exists(), "{key}");
        let checked = workspace.kiln(&["check", "run.toml", "--out", "run", "--set", key]);
        assert_eq!(checked.code, Some(1), "{key}: {checked:?}");
        // `kiln check` puts the advice on a separate line.
        let problem = says.split([';', ':']).next().expect("a part");
        assert!(checked.stdout.contains(problem), "{key}: {checked:?}");
    }
    let checked =
        workspace.succeed(&["check", "run.toml", "--out", "run", "--set", "eval.prompts=pairs.jsonl"]);
    assert!(checked.contains("pairs.jsonl has 3 answers"), "{checked}");
}

#[test]
fn what_goes_wrong_and_who_stops_are_events() {
    let workspace = workspace(&[("checkpoint.every", "0")]);
    let skip = ["--fault", "nan@backward:3:1", "--set", "train.nonfinite=skip"];
    train(&workspace, "skipped", &skip);
    let kinds = events(&workspace, "skipped");
    assert_eq!(kinds[1], (3, "skipped".to_owned()), "{kinds:?}");
    let failed = workspace.kiln(&["train", "run.toml", "--out", "failed", "--fault", "nan@backward:3:1"]);
    assert_eq!(failed.code, Some(1), "{failed:?}");
    assert_eq!(events(&workspace, "failed"), [(0, "start".to_owned()), (2, "failure".to_owned())]);
    assert!(last_event(&workspace, "failed").starts_with("step 3: the gradient norm is NaN"));

    let launch = ["launch", "--nproc-per-node", "2", "--log-dir", "logs", "--"];
    let fault = ["train", "run.toml", "--out", "killed", "--fault", "kill@data:3:1"];
    let ended = workspace.kiln(&[&launch[..], &fault].concat());
    assert_ne!(ended.code, Some(0), "{ended:?}");
    assert_eq!(events(&workspace, "killed"), [(0, "start".to_owned()), (2, "failure".to_owned())]);
    assert!(last_event(&workspace, "killed").contains("rank 1"), "{}", last_event(&workspace, "killed"));

    let slow = ["train", "run.toml", "--out", "stopped", "--fault", "slow=4@data:3:0"];
    let child = workspace.start(&slow);
    workspace.wait_for_steps("stopped", 2);
    signal(&child, Signal::USR1);
    assert_eq!(workspace.end(child).code, Some(75));
    let (step, kind) = events(&workspace, "stopped").pop().expect("an event");
    assert_eq!(kind, "stop");
    let told = last_event(&workspace, "stopped");
    assert!(told.starts_with(&format!("asked by SIGUSR1: {step} of 6 steps, checkpoint stopped/")), "{told}");
}
