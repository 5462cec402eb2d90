//! `kiln data prepare`, and training on its output.

use std::fs::File;
use std::io::Write as _;
use std::process::Stdio;
use std::sync::atomic::{AtomicBool, Ordering};

use kiln::data::{DataError, PrepareOptions, Progress, TokenizerSource, prepare_until_stopped};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use serde_json::Value as Json;

use crate::messages::Messages;
use crate::support::{Workspace, names};

const FILES: [&str; 8] = [
    "SHA256SUMS",
    "data.json",
    "inputs.json",
    "tokenizer.json",
    "train.bin",
    "train.crc",
    "val.bin",
    "val.crc",
];

/// Returns two documents, long enough to be split.
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
fn folders_and_lines_give_the_same_tokens() {
    let workspace = with_texts();
    let trained = ["--vocab-size", "400"];
    let info = prepare(&workspace, "texts", "new/from_folder", trained);
    assert_eq!((&info["documents"], &info["vocab_size"]), (&2.into(), &400.into()));
    prepare(&workspace, "documents.jsonl", "new/from_lines", trained);
    // A prepare with an existing tokenizer gives the same tokens.
    let reused = ["--tokenizer", "new/from_folder/tokenizer.json"];
    prepare(&workspace, "texts", "new/again", reused);
    // SHA256SUMS differs too, because it covers the record of the inputs.
    for file in FILES.into_iter().filter(|file| !["inputs.json", "SHA256SUMS"].contains(file)) {
        let read = |folder: &str| workspace.read(format!("new/{folder}/{file}"));
        assert!(read("from_folder") == read("from_lines"), "{file} from lines");
        assert!(read("from_folder") == read("again"), "{file} with the same tokenizer");
    }
    assert_eq!(names(&workspace.path("new")), ["again", "from_folder", "from_lines"]);
}

#[test]
fn training_uses_the_vocabulary_of_the_data() {
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

    // A model may have a larger vocabulary. It resumes with other data if the user requests it.
    let wide = ["--set", "data.path=prepared", "--set", "model.vocab_size=512"];
    workspace.succeed(&[&["train", "run.toml", "--out", "wide"], &wide[..]].concat());
    workspace.write("texts/c.txt", "one more document\n".repeat(100));
    prepare(&workspace, "texts", "more", ["--tokenizer", "prepared/tokenizer.json"]);
    let arguments = ["--set", "data.path=more", "--set", "train.steps=12", "--resume", "latest"];
    let resume = [&["train", "run.toml", "--out", "run"], &arguments[..]].concat();
    let ended = workspace.kiln(&resume);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("with --allow-changed data\n"), "{}", ended.stderr);
    let said = workspace.succeed(&[&resume[..], &["--allow-changed", "data"]].concat());
    assert!(said.contains("as allowed: the SHA-256 of the training data was "), "{said}");
}

#[test]
fn limit_takes_the_first_documents() {
    let workspace = with_texts();
    let arguments = ["data", "prepare", "--input", "texts", "--vocab-size", "400", "--out"];
    let said = workspace.succeed(&[&arguments[..], &["first", "--limit", "1"]].concat());
    assert!(said.contains("data: training a tokenizer on at most 1 document\n"), "{said}");
    assert!(said.contains("data: 1 document, "), "{said}");
    let ended = workspace.kiln(&[&arguments[..], &["none", "--limit", "0"]].concat());
    assert_eq!(ended.code, Some(2), "{ended:?}");
}

/// The tests of the data crate kill prepares; here, one is asked to stop.
#[test]
fn a_stopped_prepare_leaves_nothing() {
    let workspace = with_texts();
    let tokenizer = TokenizerSource::Train { vocab_size: 400 };
    let options = PrepareOptions::new(vec![workspace.path("texts")], workspace.path("new"), tokenizer);
    let stop = AtomicBool::new(false);
    let stopped = prepare_until_stopped(&stop, &options, &mut |progress| {
        stop.store(matches!(progress, Progress::Encoding { .. }), Ordering::Relaxed);
    });
    assert!(matches!(stopped, Err(DataError::Stopped)), "{stopped:?}");
    assert_eq!(names(&workspace.path("")), ["data", "documents.jsonl", "run.toml", "texts"]);
    let arguments = ["data", "prepare", "--input", "texts", "--vocab-size", "400", "--out"];
    let said = workspace.succeed(&[&arguments[..], &["new"]].concat());
    assert!(said.starts_with("data: training a tokenizer on "), "{said}");
    workspace.succeed(&[&arguments[..], &["whole"]].concat());
    assert_eq!(names(&workspace.path("")), ["data", "documents.jsonl", "new", "run.toml", "texts", "whole"]);
    for file in FILES {
        let [new, whole] = ["new", "whole"].map(|out| workspace.read(format!("{out}/{file}")));
        assert!(new == whole, "{file}");
    }
}

/// Flags and configuration keys have the same effect.
#[test]
fn flags_and_keys_give_the_same_tokens() {
    let workspace = Workspace::new();
    let lines: String = (0..40).map(|line| format!("{{\"text\": \"<|fin|>line {line}\"}}\n")).collect();
    workspace.write("documents.ndjson", lines.clone() + "{\"text\": NaN}\n" + &lines);
    let arguments =
        ["data", "prepare", "--input", "documents.ndjson", "--vocab-size", "300", "--out", "flags"];
    let flags = ["--end-of-text", "<|fin|>", "--special-tokens", "--bad-lines", "skip", "--bos", "false"];
    let ended = workspace.kiln(&[&arguments[..], &flags].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let skipped =
        "1 line cannot be used and was skipped: documents.ndjson, line 41: NaN is not JSON (column 10)";
    assert_eq!(ended.stderr, format!(" WARN {skipped}\n"));
    let said = "data: the text has 80 spellings of special tokens, which became these tokens: <|fin|>\n";
    assert!(ended.stdout.contains(said), "{}", ended.stdout);
    // Each document contains one such token and ends with one.
    let ids = [workspace.read("flags/train.bin"), workspace.read("flags/val.bin")].concat();
    assert_eq!(ids.chunks(2).filter(|id| **id == [0, 0]).count(), 160);

    let keys = [
        ("data.path", "'keys'"),
        ("data.text", "['documents.ndjson']"),
        ("data.vocab_size", "300"),
        ("data.end_of_text", "'<|fin|>'"),
        ("data.special_tokens", "true"),
        ("data.bad_lines", "'skip'"),
        ("data.bos", "false"),
        ("sample.prompt", "'line'"),
    ];
    workspace.config("run.toml", &keys);
    let ended = workspace.kiln(&["train", "run.toml", "--out", "run"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    for file in ["train.bin", "val.bin", "tokenizer.json"] {
        assert!(workspace.read(format!("flags/{file}")) == workspace.read(format!("keys/{file}")), "{file}");
    }
    // The checkpoint stores the end of text, which has an unusual name.
    let settings = workspace.json("run/checkpoints/fsdp_cpt4/generation_config.json");
    assert_eq!(settings["eos_token_id"], 0);
    workspace.succeed(&["generate", "--checkpoint", "run", "--prompt", "", "--max-tokens", "3"]);
    let ended =
        workspace.kiln(&["train", "run.toml", "--out", "other", "--set", "data.special_tokens=false"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("data.special_tokens: true then, false now"), "{ended:?}");

    let refusals: [(&[&str], &str); 3] = [
        (&["--end-of-text", "<|no|>"], "special tokens are: <|fin|>"),
        (&["--end-of-text", "<|fin|>", "--bos", "true"], "data.bos = true, but the tokenizer has no token"),
        (&["--bos", "maybe"], "expected auto, true or false"),
    ];
    for (flags, said) in refusals {
        let given =
            ["data", "prepare", "--input", "run.toml", "--tokenizer", "keys/tokenizer.json", "--out", "no"];
        let ended = workspace.kiln(&[&given[..], flags].concat());
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(said), "{ended:?}");
    }
}

/// `data.text` prepares `data.path` in the first run, and leaves it unchanged in the next.
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

/// The first run to start prepares the data; the others wait for it.
#[test]
fn concurrent_starts_share_prepared_data() {
    let workspace = with_texts();
    workspace.config(
        "run.toml",
        &[("data.path", "'own'"), ("data.text", "['texts']"), ("data.vocab_size", "300")],
    );
    let outs = ["a", "b", "c"];
    let runs = outs.map(|out| workspace.start(&["train", "run.toml", "--out", out]));
    for run in runs {
        let ended = workspace.end(run);
        assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    }
    assert_eq!(workspace.steps("a"), workspace.steps("b"));
    assert_eq!(workspace.steps("a"), workspace.steps("c"));
    assert_eq!(names(&workspace.path("own")), FILES);
}

/// Returns a workspace whose data was prepared from `texts` by its first run.
fn prepared_by_a_run() -> Workspace {
    let workspace = with_texts();
    workspace.config(
        "run.toml",
        &[("data.path", "'own'"), ("data.text", "['texts']"), ("data.vocab_size", "300")],
    );
    workspace.succeed(&["train", "run.toml", "--out", "first"]);
    workspace
}

#[test]
fn data_from_other_text_is_refused() {
    let mut messages = Messages::default();
    let workspace = prepared_by_a_run();
    let mut refused = |title: &str, more: &[&str]| {
        let arguments = [&["train", "run.toml", "--out", "second"], more].concat();
        messages.refused(title, &workspace, &arguments);
    };
    refused("another vocabulary", &["--set", "data.vocab_size=400"]);
    refused("another fraction", &["--set", "data.validation_fraction=0.2"]);
    refused("other text", &["--set", "data.text=['documents.jsonl']"]);
    refused("text that is gone", &["--set", "data.text=['gone']"]);
    workspace.write("texts/a.txt", "another text, shorter\n");
    workspace.write("texts/c.txt", "a new text\n");
    refused("text that has changed", &[]);
    insta::assert_snapshot!(messages.finish());

    // The command in the message works.
    let second = ["train", "run.toml", "--out", "second", "--set"];
    workspace.succeed(&[&second[..], &["data.text=[]"]].concat());
    assert_eq!(workspace.steps("first"), workspace.steps("second"));
    workspace.succeed(&["train", "run.toml", "--out", "third", "--set", "data.path=own-2"]);
    workspace.remove("own");
    workspace.succeed(&["train", "run.toml", "--out", "fourth"]);
    assert_eq!(workspace.steps("third"), workspace.steps("fourth"));
}

/// The run resumes with the data that it was trained on. So does a run on data whose folder does not record its
/// sources.
#[test]
fn resumed_run_warns_of_other_text() {
    let workspace = prepared_by_a_run();
    workspace.write("texts/a.txt", "another text, shorter\n");
    let resumed = ["train", "run.toml", "--out", "first", "--resume", "latest"];
    let ended = workspace.kiln(&[&resumed[..], &["--set", "train.steps=6"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let warning = " WARN own was prepared from different text or options than data.text sets now \
                   (text, changed: texts/a.txt (";
    assert!(ended.stderr.starts_with(warning), "{}", ended.stderr);

    workspace.remove("own/inputs.json");
    let ended = workspace.kiln(&["train", "run.toml", "--out", "second"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let warning = " WARN own does not record its source";
    assert!(ended.stderr.starts_with(warning), "{}", ended.stderr);
}

/// Existing data is accepted under another seed, which would only split new data differently, and after a file was
/// rewritten with the same content.
#[test]
fn other_seed_and_time_are_accepted() {
    let workspace = prepared_by_a_run();
    workspace.write("texts/a.txt", workspace.read("texts/a.txt"));
    workspace.succeed(&["train", "run.toml", "--out", "second", "--set", "train.seed=7"]);
}

/// An input that can be read only once gives the same tokens as a file with the same text.
#[test]
fn pipes_give_the_same_tokens() {
    let workspace = with_texts();
    let [text, _] = documents();
    let (trained, tokens) =
        (["--vocab-size", "400"], ["data.json", "tokenizer.json", "train.bin", "val.bin"]);
    prepare(&workspace, "texts/a.txt", "from_file", trained);
    let expected = tokens.map(|file| workspace.read(format!("from_file/{file}")));

    let mut outs = Vec::new();
    for input in ["-", "/dev/stdin", "/dev/fd/0"] {
        let out = format!("from_input_{}", outs.len());
        let arguments = ["data", "prepare", "--input", input, "--out", &out];
        let mut command = workspace.command(&[&arguments[..], &trained[..]].concat());
        let mut child = command.stdin(Stdio::piped()).spawn().expect("the binary starts");
        let mut pipe = child.stdin.take().expect("a pipe");
        pipe.write_all(text.as_bytes()).expect("room in the pipe");
        drop(pipe);
        let ended = workspace.end(child);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{input}: {ended:?}");
        assert!(ended.stdout.contains("data: reading an input that is a pipe"), "{ended:?}");
        outs.push(out);
    }

    // A tokenizer from a pipe is also read only once.
    let arguments = ["data", "prepare", "--input", "texts/a.txt", "--out", "piped_tokenizer"];
    let mut command = workspace.command(&[&arguments[..], &["--tokenizer", "/dev/stdin"]].concat());
    let mut child = command.stdin(Stdio::piped()).spawn().expect("the binary starts");
    let mut pipe = child.stdin.take().expect("a pipe");
    pipe.write_all(&workspace.read("from_file/tokenizer.json")).expect("a reader");
    drop(pipe);
    let ended = workspace.end(child);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    assert!(ended.stdout.contains("data: reading an input that is a pipe"), "{ended:?}");
    outs.push("piped_tokenizer".to_owned());

    // A FIFO as an input of the command and of a run.
    for name in ["fifo.txt", "fifo.run"] {
        mkfifo(&workspace.path(name), Mode::S_IRWXU).expect("a FIFO");
    }
    let fill = |name: &str| {
        let mut fifo = File::options().write(true).open(workspace.path(name)).expect("a reader");
        fifo.write_all(text.as_bytes()).expect("a reader");
    };
    let arguments = ["data", "prepare", "--input", "fifo.txt", "--out", "from_fifo"];
    let child = workspace.start(&[&arguments[..], &trained[..]].concat());
    fill("fifo.txt");
    assert_eq!(workspace.end(child).code, Some(0));
    let changes = [("data.path", "'from_run'"), ("data.text", "['fifo.run']"), ("data.vocab_size", "400")];
    workspace.config("run.toml", &changes);
    let child = workspace.start(&["train", "run.toml", "--out", "run"]);
    fill("fifo.run");
    assert_eq!(workspace.end(child).code, Some(0));
    // The next content of the FIFO is unknown.
    let ended = workspace.kiln(&["train", "run.toml", "--out", "again"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("fifo.run (it can be read only once"), "{ended:?}");

    outs.extend(["from_fifo".to_owned(), "from_run".to_owned()]);
    for out in outs {
        assert_eq!(names(&workspace.path(&out)), FILES, "{out}");
        let found = tokens.map(|file| workspace.read(format!("{out}/{file}")));
        assert!(found == expected, "{out}");
    }
}
