//! The parts of its base model that a run keeps: chat template, end tokens and context, so that a resume
//! needs nothing else.

use serde_json::{Value as Json, json};

use crate::support::{Workspace, tokenizer};

/// Files of a model folder that describe how the model's texts look.
const SMALL_FILES: [(&str, &str); 6] = [
    ("tokenizer_config.json", r#"{"chat_template": "{{ messages }}", "eos_token": "<|endoftext|>"}"#),
    ("special_tokens_map.json", r#"{"eos_token": "<|endoftext|>"}"#),
    ("added_tokens.json", r#"{"<|endoftext|>": 0}"#),
    ("chat_template.jinja", "{{ messages[0].content }}"),
    ("tokenizer.model", "\u{fffd}\0 not text"),
    ("merges.txt", "#version: 0.2\n"),
];

/// Returns a workspace with `hf`, a model with a context of 64 tokens, and with `second.toml`, a run that starts
/// from this model and does not change its weights.
fn workspace() -> Workspace {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "first"]);
    workspace.succeed(&["export", "--checkpoint", "first", "--out", "hf"]);
    change(&workspace, "hf/config.json", &json!({"max_position_embeddings": 64, "pad_token_id": 7}));
    for (name, content) in SMALL_FILES {
        workspace.write(&format!("hf/{name}"), content);
    }
    let config = workspace.text("run.toml");
    let (before, model) = config.split_once("[model]\n").expect("a model");
    let (_, after) = model.split_once("\n[").expect("another section");
    let text = format!("{before}[init]\nfrom = \"hf\"\n\n[{after}");
    workspace.write("second.toml", text.replace("lr = 1e-2", "lr = 0.0"));
    workspace
}

fn change(workspace: &Workspace, file: &str, changes: &Json) {
    let mut json = workspace.json(file);
    for (key, value) in changes.as_object().expect("an object") {
        json[key] = value.clone();
    }
    workspace.write(file, json.to_string());
}

/// Returns the continuation of the prompt `ab` by a model.
fn text(workspace: &Workspace, from: &str) -> String {
    let generate = ["generate", "--checkpoint", from, "--prompt", "ab", "--max-tokens", "6"];
    let text = workspace.succeed(&[&generate[..], &["--temperature", "0"]].concat());
    text.trim_end_matches('\n').strip_prefix("ab").expect("the prompt").to_owned()
}

/// Makes the first token that `hf` generates a second end token, which only `file` names.
fn end_at_once(workspace: &Workspace, file: &str) {
    let first: String = text(workspace, "hf").chars().take(1).collect();
    let id = tokenizer().encode(&first).expect("ids")[0];
    change(workspace, file, &json!({"eos_token_id": [0, id]}));
}

fn train(workspace: &Workspace, out: &str, more: &[&str]) -> String {
    workspace.succeed(&[&["train", "second.toml", "--out", out], more].concat())
}

#[test]
fn a_run_keeps_what_its_model_says() {
    let workspace = workspace();
    assert_eq!(text(&workspace, "hf").len(), 6);
    end_at_once(&workspace, "hf/generation_config.json");
    change(&workspace, "hf/generation_config.json", &json!({"temperature": 0.6}));
    assert_eq!(text(&workspace, "hf"), "");
    let sample =
        ["--set", "sample.prompt=ab", "--set", "sample.temperature=0", "--set", "sample.max_tokens=6"];
    train(&workspace, "run", &sample);
    let samples = workspace.text("run/samples.jsonl");
    assert!(samples.lines().all(|line| line.contains(r#""text":"""#)), "{samples}");
    // The run resumes, is converted, and is the start of another run.
    train(&workspace, "run", &["--set", "train.steps=6", "--resume", "latest"]);
    workspace.succeed(&["convert", "--checkpoint", "run", "--out", "full"]);
    train(&workspace, "again", &["--set", "init.from=run"]);
    for from in
        ["run/checkpoints/fsdp_cpt4", "run/checkpoints/fsdp_cpt6", "full", "again/checkpoints/fsdp_cpt4"]
    {
        for (name, content) in SMALL_FILES {
            assert_eq!(workspace.text(format!("{from}/{name}")), content, "{from}");
        }
        assert_eq!(workspace.json(format!("{from}/generation_config.json"))["temperature"], 0.6);
        assert_eq!(workspace.state(from)["context_length"], 64, "{from}");
        assert_eq!(text(&workspace, from), "", "{from}");
        workspace.succeed(&["inspect", "--verify", from]);
    }
    // Evaluation uses the run's sequence length.
    let eval = |more: &[&str]| workspace.succeed(&[&["eval", "--checkpoint", "run"], more].concat());
    assert_eq!(eval(&[]), eval(&["--seq-len", "8"]));
    workspace.succeed(&["export", "--checkpoint", "run", "--out", "back"]);
    for (name, content) in SMALL_FILES {
        assert_eq!(workspace.text(format!("back/{name}")), content);
    }
    let config = |folder: &str| workspace.json(format!("{folder}/config.json"));
    assert_eq!(config("back")["max_position_embeddings"], 64);
    assert_eq!(config("back")["pad_token_id"], 7);
    let settings = |folder: &str| workspace.json(format!("{folder}/generation_config.json"));
    assert_eq!(config("back")["eos_token_id"], settings("hf")["eos_token_id"]);
    assert_eq!(settings("back")["eos_token_id"], settings("hf")["eos_token_id"]);
    assert_eq!(text(&workspace, "back"), "");
}

/// `config.json` itself is not copied.
#[test]
fn ids_that_only_the_configuration_names_are_kept() {
    let workspace = workspace();
    workspace.remove("hf/generation_config.json");
    end_at_once(&workspace, "hf/config.json");
    train(&workspace, "run", &[]);
    assert_eq!(text(&workspace, "run"), "");
    assert_eq!(workspace.json("run/checkpoints/fsdp_cpt4/generation_config.json")["pad_token_id"], 7);
}

/// Ids and templates would have another meaning with a different tokenizer.
#[test]
fn nothing_is_kept_of_another_tokenizer() {
    let workspace = workspace();
    workspace.replace("hf/tokenizer.json", "<|endoftext|>", "<|other|>");
    let said = train(&workspace, "run", &[]);
    assert!(said.contains("omit the chat template and end tokens of the weights' tokenizer"), "{said}");
    for (name, _) in SMALL_FILES {
        assert!(!workspace.path(format!("run/checkpoints/fsdp_cpt4/{name}")).exists(), "{name}");
    }
    assert_eq!(workspace.state("run/checkpoints/fsdp_cpt4")["context_length"], 64);
}

#[test]
fn the_context_is_that_of_the_model() {
    let workspace = workspace();
    let context =
        |out: &str| workspace.state(&format!("{out}/checkpoints/fsdp_cpt4"))["context_length"].clone();
    // A run on longer sequences does not extend the context silently.
    change(&workspace, "hf/config.json", &json!({"max_position_embeddings": 6}));
    let long = workspace.kiln(&["train", "second.toml", "--out", "long"]);
    assert_eq!(long.code, Some(0), "{long:?}");
    let warning = "data.seq_len = 8 is longer than the context length of the model, 6 tokens";
    assert!(long.stderr.contains(warning), "{long:?}");
    assert_eq!(context("long"), 6);
    workspace.succeed(&["eval", "--checkpoint", "long"]);
    train(&workspace, "set", &["--set", "model.context_length=32"]);
    assert_eq!(context("set"), 32);
    workspace.succeed(&["import", "--hf", "hf", "--out", "imported"]);
    train(&workspace, "from", &["--set", "init.from=imported", "--set", "model.context_length=9"]);
    assert_eq!(context("from"), 9);
    // A model trained from scratch has the length of its training sequences as its context.
    for (length, expected) in [("4", 8), ("16", 16)] {
        let seq_len = format!("data.seq_len={length}");
        let out = format!("of-{length}");
        train(&workspace, &out, &["--set", "init.from=first", "--set", &seq_len]);
        assert_eq!(context(&out), expected);
    }
    let none = workspace.kiln(&["train", "second.toml", "--out", "none", "--set", "model.context_length=0"]);
    assert!(none.stderr.contains("model.context_length = 0"), "{none:?}");
}

/// A resume reads the model and its weights from the checkpoint.
#[test]
fn a_resume_reads_no_base_model() {
    let workspace = workspace();
    let untied = ["--set", "model.tie_embeddings=false"];
    let start = [&untied[..], &["--allow-missing", "lm_head.*", "--set", "train.steps=2"]].concat();
    train(&workspace, "run", &start);
    train(&workspace, "tied", &["--set", "train.steps=2"]);
    let resume = ["--resume", "latest"];
    // The base model still exists here, so that the resume could read it; the checkpoint must not lack anything.
    train(&workspace, "run", &[&untied[..], &resume, &["--set", "train.steps=3"]].concat());
    workspace.remove("hf");
    train(&workspace, "run", &resume);
    train(&workspace, "tied", &resume);
    workspace.succeed(&[
        "train",
        "tied/config.toml",
        "--out",
        "tied",
        "--resume",
        "latest",
        "--set",
        "train.steps=5",
    ]);
    workspace.succeed(&[
        "check",
        "second.toml",
        "--out",
        "tied",
        "--resume",
        "latest",
        "--set",
        "train.steps=6",
    ]);
    assert_eq!(workspace.steps("tied").len(), 5);
    assert_eq!(workspace.text("tied/checkpoints/fsdp_cpt5/chat_template.jinja"), SMALL_FILES[3].1);
    assert_eq!(workspace.state("tied/checkpoints/fsdp_cpt5")["context_length"], 64);
    // A new run needs the base model.
    let new = workspace.kiln(&["train", "second.toml", "--out", "new"]);
    assert_eq!(new.code, Some(2), "{new:?}");
}

/// With more steps, the schedule of the learning rate differs from the first step on.
#[test]
fn a_learning_rate_that_jumps_at_a_resume_is_told() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let resume = |more: &[&str]| {
        let train = ["train", "run.toml", "--out", "run", "--resume", "latest"];
        workspace.succeed(&[&train[..], more].concat())
    };
    let said = resume(&["--set", "train.steps=12"]);
    let jump = "the learning rate jumps from 1.000e-3 in step 4 to 8.145e-3 in step 5";
    assert!(said.contains(jump) && said.contains("because train.steps changed"), "{said}");
    assert!(said.contains("To continue at 1.000e-3, set optim.schedule = \"constant\""), "{said}");
    // The fix in the message works.
    let constant = ["optim.schedule=constant", "optim.warmup_steps=0", "optim.lr=1.000e-3", "train.steps=14"];
    let said = resume(&constant.map(|set| ["--set", set]).concat());
    assert!(!said.contains("learning rate"), "{said}");
    let said = resume(&["--set", "train.steps=14"]);
    assert!(!said.contains("learning rate"), "nothing to train: {said}");
}
