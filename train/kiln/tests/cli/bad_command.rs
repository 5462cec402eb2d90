//! Invalid arguments and inputs of the other commands.

use std::process::{Command, Stdio};

use crate::messages::Messages;
use crate::support::Workspace;

#[test]
fn commands_that_cannot_be_are_refused() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    workspace.write("text.txt", "some text, and some more of it\n".repeat(50));
    workspace.write("out/notes.txt", "mine");
    let mut refused = |title: &str, arguments: &[&str]| {
        messages.refused(title, &workspace, arguments);
    };
    let prepare = ["data", "prepare", "--input"];
    let with = |arguments: &[&'static str]| [&prepare, arguments].concat();
    refused("missing input", &with(&["none.txt", "--out", "new", "--vocab-size", "300"]));
    refused("unknown built-in text", &with(&["builtin:x", "--out", "new", "--vocab-size", "300"]));
    refused("vocabulary too small", &with(&["text.txt", "--out", "new", "--vocab-size", "256"]));
    refused("prepared before", &with(&["text.txt", "--out", "data", "--vocab-size", "300"]));
    refused("folder in use", &with(&["text.txt", "--out", "out", "--vocab-size", "300"]));
    refused("place of a file", &with(&["text.txt", "--out", "run.toml", "--vocab-size", "300"]));
    refused("missing tokenizer", &with(&["text.txt", "--out", "new", "--tokenizer", "none.json"]));
    refused("no tokenizer", &with(&["text.txt", "--out", "new"]));
    refused(
        "two tokenizers",
        &with(&["text.txt", "--out", "new", "--vocab-size", "300", "--tokenizer", "t"]),
    );
    refused(
        "nothing held out",
        &with(&["text.txt", "--out", "new", "--vocab-size", "300", "--validation-fraction", "0"]),
    );
    refused(
        "less than nothing held out",
        &with(&["text.txt", "--out", "new", "--vocab-size", "300", "--validation-fraction", "-0.1"]),
    );
    let generate = ["generate", "--prompt", "a", "--max-tokens", "3", "--checkpoint"];
    let with = |arguments: &[&'static str]| [&generate, arguments].concat();
    refused("no checkpoint", &with(&["none"]));
    refused("folder without a checkpoint", &with(&["data"]));
    refused("temperature below zero", &with(&["data", "--temperature=-1"]));
    refused("temperature after a space", &with(&["data", "--temperature", "-1"]));
    refused("top-k after a space", &with(&["data", "--top-k", "-1"]));
    refused("temperature that is not a number", &with(&["data", "--temperature", "nan"]));
    refused("top-p of nothing", &with(&["data", "--top-p", "0"]));
    refused("top-p above one", &with(&["data", "--top-p", "1.5"]));
    refused("top-p that is not a number", &with(&["data", "--top-p", "nan"]));
    refused("top-k below zero", &with(&["data", "--top-k=-1"]));
    refused("unknown command", &["trane", "run.toml"]);
    refused("no configuration", &["train"]);
    refused("ranks that are not a number", &["train", "run.toml", "--ranks", "two"]);
    let bench = ["bench", "strategies", "run.toml"];
    let with = |arguments: &[&'static str]| [&bench, arguments].concat();
    refused("no ranks to measure", &with(&["--ranks", "0"]));
    refused("ranks that cannot share the batch", &with(&["--ranks", "3"]));
    refused("nothing to measure", &with(&["--ranks", "2", "--rounds", "0"]));
    refused("an unknown measurement", &["bench", "stratgies"]);
    insta::assert_snapshot!(messages.finish());
}

/// The advice must be about the name or the limit, not about permissions or disk space.
#[test]
fn advice_fits_what_the_system_says() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let long = "x".repeat(300);
    let path = format!("data.path={long}");
    for arguments in [
        &["inspect", &long][..],
        &["export", "--checkpoint", "run", "--out", &long],
        &["convert", "--checkpoint", "run", "--out", &long],
        &["train", "run.toml", "--out", "new", "--set", &path],
        &["train", "run.toml", "--out", "new", "--resume", &long],
        &["data", "verify", &long],
    ] {
        let ended = workspace.kiln(arguments);
        let advice =
            "File name too long (os error 36); choose a shorter name\nmore: kiln explain file-access\n";
        assert_eq!(ended.code, Some(1), "{arguments:?}: {ended:?}");
        assert!(ended.stderr.ends_with(advice), "{arguments:?}: {ended:?}");
    }
    let kiln = env!("CARGO_BIN_EXE_kiln");
    for (limit, name) in [("ulimit -n 8", "files"), ("ulimit -f 1", "size")] {
        let mut shell = Command::new("sh");
        // SIGXFSZ would end the process before the write reports an error.
        let run = format!("trap '' XFSZ; {limit}; exec {kiln} train run.toml --out {name}");
        shell.args(["-c", &run]).current_dir(workspace.path("")).stdout(Stdio::piped());
        let ended = workspace.end(shell.stderr(Stdio::piped()).spawn().expect("a shell"));
        assert_eq!(ended.code, Some(1), "{limit}: {ended:?}");
        let advice = format!("(`{}`)", &limit[..9]);
        assert!(ended.stderr.contains(&advice), "{limit}: {ended:?}");
    }
}

#[test]
fn inputs_that_cannot_be_used_leave_no_folder() {
    let mut messages = Messages::default();
    let mut fails = |title: &str, file: &str, content: &[u8], tokenizer: &[&str]| {
        let workspace = Workspace::new();
        workspace.write(file, content);
        let arguments = [&["data", "prepare", "--input", file, "--out", "new"], tokenizer].concat();
        messages.fails(title, &workspace, &arguments);
        assert!(!workspace.path("new").exists(), "{title}");
    };
    let trained = ["--vocab-size", "300"];
    fails("not text", "a.txt", b"\xFF\xFE", &trained);
    fails("no text", "a.txt", b"", &trained);
    fails("too little text", "a.txt", b"w", &trained);
    fails("line that is not JSON", "a.jsonl", b"{\"text\": \"a\"}\n{\"text\": \n", &trained);
    fails("line without text", "a.jsonl", b"{\"txet\": \"a\"}\n", &trained);
    fails("damaged tokenizer", "a.txt", b"some text", &["--tokenizer", "run.toml"]);
    insta::assert_snapshot!(messages.finish());
}

/// `generate` names the damaged file of a checkpoint.
#[test]
fn generate_names_what_is_damaged() {
    let mut messages = Messages::default();
    let generate = ["generate", "--checkpoint", "run", "--prompt", "a", "--max-tokens", "3"];
    let mut fails = |title: &str, damage: &dyn Fn(&Workspace)| {
        let workspace = Workspace::new();
        workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
        damage(&workspace);
        messages.fails(title, &workspace, &generate);
    };
    let file = |name: &str| format!("run/checkpoints/fsdp_cpt2/{name}");
    fails("missing weights", &|w| w.remove(&file("model-part-00001-of-00002.safetensors")));
    fails("truncated weights", &|w| w.write(&file("model-part-00002-of-00002.safetensors"), [1; 50]));
    fails("tokenizer of another model", &|w| {
        w.write("text.txt", "some text, and some more of it\n".repeat(50));
        let prepare = ["data", "prepare", "--input", "text.txt", "--out", "new", "--vocab-size", "300"];
        w.succeed(&prepare);
        w.write(&file("tokenizer.json"), w.read("new/tokenizer.json"));
    });
    insta::assert_snapshot!(messages.finish());
}
