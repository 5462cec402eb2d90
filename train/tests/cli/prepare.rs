//! `kiln data prepare`, and training on what it makes.

use serde_json::Value as Json;

use crate::support::{Workspace, names};

const FILES: [&str; 4] = ["data.json", "tokenizer.json", "train.bin", "val.bin"];

/// Two documents, long enough to be split.
fn documents() -> [String; 2] {
    let document = |name: &str| -> String {
        (0..400).map(|line| format!("{name} line {line} of the {name} document\n")).collect()
    };
    [document("first"), document("second")]
}

fn with_texts() -> Workspace {
    let workspace = Workspace::new();
    let [first, second] = documents();
    workspace.write("texts/a.txt", &first);
    workspace.write("texts/deep/b.md", &second);
    workspace.write("texts/.hidden", "not this");
    let line = |text: &str| format!("{}\n", serde_json::json!({ "text": text }));
    workspace.write("documents.jsonl", line(&first) + &line(&second));
    workspace
}

fn prepare(workspace: &Workspace, input: &str, out: &str, tokenizer: [&str; 2]) -> Json {
    let arguments = ["data", "prepare", "--input", input, "--out", out];
    workspace.succeed(&[&arguments, &tokenizer[..]].concat());
    assert_eq!(names(&workspace.path(out)), FILES);
    workspace.json(format!("{out}/data.json"))
}

#[test]
fn folders_and_json_lines_give_the_same_tokens() {
    let workspace = with_texts();
    let trained = ["--vocab-size", "400"];
    let info = prepare(&workspace, "texts", "new/from_folder", trained);
    assert_eq!((&info["documents"], &info["vocab_size"]), (&2.into(), &400.into()));
    prepare(&workspace, "documents.jsonl", "new/from_lines", trained);
    // And a tokenizer that is used again gives the tokens it gave before.
    let reused = ["--tokenizer", "new/from_folder/tokenizer.json"];
    prepare(&workspace, "texts", "new/again", reused);
    for file in FILES {
        let read = |folder: &str| workspace.read(format!("new/{folder}/{file}"));
        assert!(read("from_folder") == read("from_lines"), "{file} from lines");
        assert!(read("from_folder") == read("again"), "{file} with the same tokenizer");
    }
    assert_eq!(names(&workspace.path("new")), ["again", "from_folder", "from_lines"]);
}

#[test]
fn training_takes_the_vocabulary_of_the_data() {
    let workspace = with_texts();
    let info = prepare(&workspace, "texts", "prepared", ["--vocab-size", "400"]);
    let arguments = ["--set", "data.path=prepared", "--set", "train.steps=10"];
    let run = [&["train", "run.toml", "--out", "run"], &arguments[..]].concat();
    let said = workspace.succeed(&run);
    assert!(said.contains("unigram entropy"), "{said}");
    let state = workspace.state("run/checkpoints/fsdp_cpt10");
    assert_eq!(state["model"]["vocab_size"], 400);
    assert_eq!(state["data_sha256"], info["train"]["sha256"]);
    let losses = workspace.losses("run");
    assert!(losses[9] < losses[0], "{losses:?}");

    // A model with room to spare is fine, and goes on with other data if that is wanted.
    let wide = ["--set", "data.path=prepared", "--set", "model.vocab_size=512"];
    workspace.succeed(&[&["train", "run.toml", "--out", "wide"], &wide[..]].concat());
    workspace.write("texts/c.txt", "one more document\n".repeat(100));
    prepare(&workspace, "texts", "more", ["--tokenizer", "prepared/tokenizer.json"]);
    let arguments = ["--set", "data.path=more", "--set", "train.steps=12", "--resume", "latest"];
    let resume = [&["train", "run.toml", "--out", "run"], &arguments[..]].concat();
    let ended = workspace.kiln(&resume);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.ends_with("with --allow-changed data\n"), "{}", ended.stderr);
    let said = workspace.succeed(&[&resume[..], &["--allow-changed", "data"]].concat());
    assert!(said.contains("as allowed: the SHA-256 of the training data was "), "{said}");
}

/// `data.text` prepares `data.path` on the first run, and leaves it alone on the next.
#[test]
fn a_run_prepares_its_own_data_once() {
    let workspace = with_texts();
    workspace.config(
        "run.toml",
        &[("data.path", "'own'"), ("data.text", "['texts']"), ("data.vocab_size", "300")],
    );
    let first = workspace.succeed(&["train", "run.toml", "--out", "first"]);
    assert!(first.contains("data: training a tokenizer"), "{first}");
    let data = workspace.read("own/train.bin");
    let second = workspace.succeed(&["train", "run.toml", "--out", "second"]);
    assert!(!second.contains("data: training a tokenizer"), "{second}");
    assert!(workspace.read("own/train.bin") == data);
    assert_eq!(workspace.steps("first"), workspace.steps("second"));
}
