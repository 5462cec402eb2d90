//! Files from untrusted sources, or files that are not what their names suggest: each is an error that names
//! the file. A file's content never causes an excessive allocation, a link to be followed, a wait, or raw
//! output to a terminal.

use std::ffi::OsStr;
use std::fs::{self, File};
use std::io::{BufRead, BufReader, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileTypeExt, symlink};
use std::os::unix::net::UnixStream;
use std::process::{Command, Stdio};
use std::thread;

use kiln::checkpoint::Checksum;
use kiln_observe::ask::{Folder, Owner, Reply, ToPrompt, send_reply};
use kiln_sys::ProcessId;
use serde_json::Value as Json;

use crate::hugging_face::copy_fixture;
use crate::support::{Ended, Workspace};

const FOLDER: &str = "run/checkpoints/fsdp_cpt2";
const GENERATE: [&str; 6] = ["generate", "--prompt", "a", "--max-tokens", "2", "--checkpoint"];
const RESUME: [&str; 6] = ["train", "run.toml", "--out", "run", "--resume", "latest"];

/// Trains two steps in `run`, which a configuration of four steps can resume.
fn trained() -> Workspace {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    workspace
}

/// Runs a command, which must end by itself.
pub fn ends(workspace: &Workspace, arguments: &[&str]) -> Ended {
    workspace.end(workspace.start(arguments))
}

fn assert_fails(what: &str, ended: &Ended, code: i32, says: &str) {
    assert_eq!(ended.code, Some(code), "{what}: {ended:?}");
    assert!(ended.stderr.starts_with("error: ") && ended.stderr.contains(says), "{what}: {ended:?}");
    assert!(!ended.stderr.contains("panicked"), "{what}: {ended:?}");
}

/// A valid seal proves nothing: anyone who can write a manifest can also seal it.
#[test]
fn a_manifest_may_ask_for_no_more_than_there_is() {
    let workspace = trained();
    let manifest = workspace.text(format!("{FOLDER}/manifest.json"));
    let large = 1_u64 << 40;
    let mut changes: Vec<(String, String)> = [
        ("\"step\": 2,", "\"step\": 2, \"skipped\": 3,"),
        ("\"next_sample\": 16,", "\"next_sample\": 18446744073709551600,"),
        ("\"tokens\": 128,", "\"tokens\": 18446744073709551600,"),
        ("\"context_length\": 8,", "\"context_length\": 0,"),
        ("\"context_length\": 8,", "\"context_length\": 18446744073709551600,"),
        ("\"ranks\": 2,", "\"ranks\": 0,"),
        ("\"layers\": 2,", "\"layers\": 1000000000,"),
        ("\"heads\": 4,", "\"heads\": 0,"),
    ]
    .map(|(from, to)| (from.to_owned(), to.to_owned()))
    .into();
    for (key, value) in [("vocab_size", 257), ("d_model", 16), ("d_ff", 32), ("layers", 2)] {
        changes.push((format!("\"{key}\": {value},"), format!("\"{key}\": {large},")));
    }
    for (from, to) in changes {
        workspace.write(&format!("{FOLDER}/manifest.json"), &manifest);
        workspace.replace_in_manifest(FOLDER, &from, &to);
        let generate = [&GENERATE[..], &["run"]].concat();
        let eval = ["eval", "--checkpoint", "run", "--data", "data"];
        let init = ["train", "run.toml", "--out", "new", "--set", "init.from=run"];
        for command in [&["inspect", "run"][..], &eval, &generate, &RESUME, &init] {
            let ended = ends(&workspace, command);
            let says = "manifest.json is damaged or not a Kiln checkpoint (";
            assert_fails(&format!("{to} {command:?}"), &ended, 1, says);
        }
    }
    // The files have a weight of each name, but too few bytes for such a model.
    workspace.write(&format!("{FOLDER}/manifest.json"), &manifest);
    workspace.replace_in_manifest(FOLDER, "\"d_ff\": 32,", "\"d_ff\": 8000,");
    let ended = ends(&workspace, &[&GENERATE[..], &["run"]].concat());
    assert_fails("a wider model", &ended, 1, "parameters, and weights of 8800");
    // An empty file of weights claims no memory either.
    workspace.write(&format!("{FOLDER}/manifest.json"), &manifest);
    let weights = format!("{FOLDER}/model-part-00001-of-00002.safetensors");
    workspace.write(&weights, "");
    let ended = ends(&workspace, &[&GENERATE[..], &["run"]].concat());
    assert_fails("no weights", &ended, 1, "it has 0 bytes, and should have");
}

#[test]
fn latest_leads_to_no_other_folder() {
    let workspace = trained();
    workspace.copy(FOLDER, "elsewhere/fsdp_cpt9");
    let absolute = workspace.path("elsewhere/fsdp_cpt9").display().to_string();
    for name in ["../../elsewhere/fsdp_cpt9", &absolute] {
        workspace.write("run/checkpoints/latest", name);
        let said = workspace.succeed(&["inspect", "run"]);
        assert!(said.starts_with("run/checkpoints/fsdp_cpt2: "), "{said}");
    }
}

#[test]
fn what_is_no_file_is_not_waited_for() {
    let workspace = trained();
    let fifo = |path: &str| {
        let kept = workspace.read(path);
        workspace.remove(path);
        let made = Command::new("mkfifo").arg(workspace.path(path)).status();
        assert!(made.expect("mkfifo").success());
        kept
    };
    let manifest = "run/checkpoints/fsdp_cpt2/manifest.json";
    let inspect: &[&str] = &["inspect", "run"];
    for (path, command, code) in [
        ("run/run.json", &RESUME[..], 2),
        ("run/metrics.jsonl", &RESUME, 1),
        ("run/.kiln/holder.json", &RESUME, 1),
        ("run/.kiln/lock", &RESUME, 1),
        (manifest, &RESUME, 1),
        (manifest, inspect, 1),
        ("run/checkpoints/fsdp_cpt2/config.toml", inspect, 1),
        ("run/checkpoints/fsdp_cpt2/model-part-00001-of-00002.safetensors", &RESUME, 1),
    ] {
        let kept = fifo(path);
        let ended = ends(&workspace, command);
        assert_fails(path, &ended, code, "is not a regular file");
        workspace.remove(path);
        workspace.write(path, kept);
    }
    workspace.write("run/flight/rank_0.json", "");
    fifo("run/flight/rank_0.json");
    let ended = ends(&workspace, &["inspect", "flight", "run"]);
    let said = [ended.stdout, ended.stderr].concat();
    assert!(said.contains("rank_0.json: it is not a regular file"), "{said}");
    // `latest` cannot be read, but the newest checkpoint is still found.
    fifo("run/checkpoints/latest");
    assert_eq!(ends(&workspace, &["inspect", "run"]).code, Some(0));
}

/// Import and export copy the files that come with a model, so they must check that the files are inside its folder.
#[test]
fn import_and_export_follow_no_link_out_of_a_folder() {
    let workspace = trained();
    workspace.write("secret/tokenizer.json", workspace.read("data/tokenizer.json"));
    workspace.write("secret/notes", "mine");
    copy_fixture(&workspace, "llama_gqa", "hf");
    let config = workspace.read("hf/config.json");
    for (name, target) in
        [("tokenizer.json", "../secret/tokenizer.json"), ("chat_template.jinja", "../secret/notes")]
    {
        symlink(target, workspace.path("hf").join(name)).expect("a link");
        for command in ["import --hf hf --out new", "export --checkpoint hf --out new"] {
            let ended = workspace.kiln(&command.split(' ').collect::<Vec<_>>());
            assert_fails(command, &ended, 2, "is a link that leads out of its folder");
            assert!(!workspace.path("new").exists());
        }
        workspace.remove(&format!("hf/{name}"));
    }
    fs::rename(workspace.path("hf/config.json"), workspace.path("secret/config.json")).unwrap();
    symlink("../secret/config.json", workspace.path("hf/config.json")).expect("a link");
    let ended = workspace.kiln(&["import", "--hf", "hf", "--out", "new"]);
    assert_fails("config.json", &ended, 2, "hf/config.json is a link that leads out of its folder");
    // A link out of the checkpoint.
    symlink("../../../secret/notes", workspace.path(FOLDER).join("chat_template.jinja")).unwrap();
    let ended = workspace.kiln(&["export", "--checkpoint", "run", "--out", "new"]);
    assert_fails("checkpoint", &ended, 2, "is a link that leads out of its folder");
    assert!(!workspace.path("new").exists());
    // The same layout as in the cache of the hub.
    let snapshot = "models--a--b/snapshots/1";
    workspace.remove("hf/config.json");
    workspace.write("hf/config.json", config);
    for name in ["config.json", "generation_config.json", "model.safetensors"] {
        let blob = format!("models--a--b/blobs/{name}");
        workspace.write(&blob, workspace.read(format!("hf/{name}")));
        fs::create_dir_all(workspace.path(snapshot)).expect("a folder");
        let link = workspace.path(snapshot).join(name);
        symlink(format!("../../blobs/{name}"), link).expect("a link");
    }
    workspace.succeed(&["import", "--hf", snapshot, "--out", "new"]);
}

#[test]
fn names_do_not_reach_a_terminal_as_orders() {
    let is_plain = |what: &str, ended: &Ended| {
        assert_ne!(ended.code, Some(0), "{what}: {ended:?}");
        let said = [ended.stdout.as_str(), &ended.stderr].concat();
        let is_order = |c: char| c.is_control() && c != '\n';
        assert!(!said.contains(is_order), "{what}: {ended:?}");
        let is_spelled_out = said.contains(r"\u001b[2J") || said.contains(r"\u{1b}[2J");
        assert!(is_spelled_out, "{what}: {ended:?}");
    };
    let evil = r"\u001b[2J";
    let named = format!("\"embed{evil}.weight\"");
    let part = format!("\"parts\": [{{\"kind\": \"block\", \"name\": \"{evil}\"}}]");
    let state = format!("\"state\": [\"{evil}\", \"exp_avg\",");
    for (from, to) in [
        ("\"embed_tokens.weight\"", named.as_str()),
        ("\"parts\": []", &part),
        ("\"name\": \"embed\"", &format!("\"name\": \"{evil}\"")),
        ("\"config.toml\": {", &format!("\"{evil}\": {{")),
        ("\"state\": [\n      \"exp_avg\",", &state),
        ("\"dtype\": \"F32\"", &format!("\"dtype\": \"{evil}\"")),
        ("\"checksums\": \"crc64nvme\"", &format!("\"checksums\": \"{evil}\"")),
    ] {
        let workspace = trained();
        workspace.replace_in_manifest(FOLDER, from, to);
        is_plain(to, &workspace.kiln(&["inspect", "run"]));
    }
    let workspace = Workspace::new();
    copy_fixture(&workspace, "llama_gqa", "hf");
    let config = workspace.text("hf/config.json");
    workspace.replace("hf/config.json", "\"silu\"", "\"\u{9b}31m\"");
    let ended = workspace.kiln(&["inspect", "hf"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains(r#"hidden_act = "\u009b31m" is not"#), "{ended:?}");
    workspace.write("hf/config.json", config);
    // Five characters of the tensor's name are replaced by five others, so that the header keeps its length.
    let mut weights = workspace.read("hf/model.safetensors");
    let name = b"model.norm.weight";
    let at = weights.windows(name.len()).position(|window| window == name).expect("a name");
    weights[at..at + 9].copy_from_slice(br"\u001b[2J");
    workspace.write("hf/model.safetensors", weights);
    is_plain("a tensor", &workspace.kiln(&["inspect", "hf"]));
    // The name of a file.
    workspace.write("foreign/\u{1b}[2J", "");
    is_plain("a file", &workspace.kiln(&["train", "run.toml", "--out", "foreign"]));
}

/// Exports the model of `run` to `hf` in the layout of Hugging Face.
fn exported() -> Workspace {
    let workspace = trained();
    workspace.succeed(&["export", "--checkpoint", "run", "--out", "hf"]);
    workspace
}

/// Replaces the last values of the weights with `value`.
fn spoil(workspace: &Workspace, value: f32, count: usize) {
    let mut weights = workspace.read("hf/model.safetensors");
    let values: Vec<u8> = std::iter::repeat_n(value.to_le_bytes(), count).flatten().collect();
    let start = weights.len() - values.len();
    weights[start..].copy_from_slice(&values);
    workspace.write("hf/model.safetensors", weights);
}

#[test]
fn weights_that_are_no_numbers_are_named() {
    for (value, shown) in [(f32::NAN, "NaN"), (f32::INFINITY, "inf")] {
        let workspace = exported();
        spoil(&workspace, value, 1);
        workspace.succeed(&["convert", "--checkpoint", "run", "--out", "imported"]);
        spoil_checkpoint(&workspace, "imported", value, 1);
        for model in ["hf", "imported"] {
            let eval = ["eval", "--checkpoint", model, "--data", "data", "--ranks", "2"];
            let generate = [&GENERATE[..], &[model]].concat();
            let from = format!("init.from={model}");
            let init = ["train", "run.toml", "--out", "new", "--set", &from];
            for command in [&eval[..], &generate, &init] {
                let ended = workspace.kiln(command);
                let what = format!("{value} {command:?}");
                assert_fails(&what, &ended, 1, &format!("{model} cannot be used: its weight `"));
                assert!(ended.stderr.contains(&format!("` holds {shown}, ")), "{what}: {ended:?}");
                assert!(!ended.stderr.contains("optim.lr"), "{what}: {ended:?}");
                assert!(!ended.stdout.contains("NaN"), "{what}: {ended:?}");
            }
        }
    }
}

/// Without this check, only the users of the weights would notice the fault, perhaps much later and elsewhere.
#[test]
fn weights_that_are_no_numbers_are_not_handed_on() {
    let workspace = exported();
    workspace.succeed(&["convert", "--checkpoint", "run", "--out", "whole"]);
    workspace.copy("hf", "sound");
    for (value, shown, count) in [(f32::NAN, "NaN", 1), (f32::NEG_INFINITY, "-inf", 600)] {
        workspace.remove("hf");
        workspace.copy("sound", "hf");
        workspace.copy("whole", "spoilt");
        spoil(&workspace, value, count);
        spoil_checkpoint(&workspace, "spoilt", value, count);
        let before = workspace.tree();
        for (command, is_foreign) in [
            ("import --hf hf --out new", true),
            ("export --checkpoint hf --out new --dtype bf16", true),
            ("export --checkpoint spoilt --out new", false),
            ("convert --checkpoint spoilt --out new", false),
            ("convert --checkpoint spoilt --out new --ranks 3", false),
        ] {
            let ended = workspace.kiln(&command.split(' ').collect::<Vec<_>>());
            let model = if is_foreign { "hf" } else { "spoilt" };
            assert_fails(command, &ended, 1, &format!("{model} cannot be used: its weight `"));
            assert!(ended.stderr.contains(&format!("` holds {shown}, ")), "{command}: {ended:?}");
            let counted = match (count, is_foreign) {
                (1, _) => "it has 1 such value, in 1 weight.",
                // The last norm, and two matrices of 512 before it.
                (_, true) => "it has 600 such values, in 3 weights.",
                (_, false) => "it has 600 such values, in 2 weights.",
            };
            assert!(ended.stderr.contains(counted), "{command}: {ended:?}");
            assert!(before == workspace.tree(), "{command}");
        }
        workspace.remove("spoilt");
    }
}

/// Like [`spoil`], but in the first block of a full checkpoint, whose checksums are updated.
fn spoil_checkpoint(workspace: &Workspace, folder: &str, value: f32, count: usize) {
    let path = format!("{folder}/model-00002-of-00004.safetensors");
    let mut content = workspace.read(&path);
    let header = 8 + usize::try_from(u64::from_le_bytes(*content.first_chunk().expect("a length")))
        .expect("a short header");
    let tensors: Json = serde_json::from_slice(&content[8..header]).expect("JSON");
    let offsets = |tensor: &Json| {
        let at = |index: usize| tensor["data_offsets"][index].as_u64().map(|at| at as usize);
        Some(header + at(0)?..header + at(1)?)
    };
    let start = content.len() - count * 4;
    for range in tensors.as_object().expect("an object").values().filter_map(offsets) {
        let from = range.start.max(start);
        if from < range.end {
            let before = Checksum::of(&content[range.clone()]);
            content[from..range.end].chunks_exact_mut(4).for_each(|place| {
                place.copy_from_slice(&value.to_le_bytes());
            });
            let after = Checksum::of(&content[range]);
            workspace.replace_in_manifest(folder, &before.to_string(), &after.to_string());
        }
    }
    workspace.write(&path, content);
}

/// Every weight is finite, but the results computed from them are not.
#[test]
fn a_loss_that_is_no_number_is_an_error_of_an_evaluation() {
    let workspace = exported();
    spoil(&workspace, 3e38, 3000);
    let ended = workspace.kiln(&["eval", "--checkpoint", "hf", "--data", "data"]);
    assert_fails("validation", &ended, 1, "error: the validation loss is ");
    let pair = ["eval", "--checkpoint", "hf", "--prompt", "a", "--answer", "b"];
    assert_fails("answer", &workspace.kiln(&pair), 1, "error: the loss of the answer is ");
    let ended = workspace.kiln(&[&GENERATE[..], &["hf"]].concat());
    assert_fails("generate", &ended, 1, "error: the score of the next token is ");
}

#[test]
fn a_tokenizer_that_nothing_could_use_is_not_imported() {
    let workspace = exported();
    let tokenizer = workspace.text("hf/tokenizer.json");
    let with_another_token = tokenizer.replace("\"<|endoftext|>\": 0", "\"<|endoftext|>\": 9000");
    for (content, says) in [
        ("{}", "hf/tokenizer.json is not a usable tokenizer"),
        (&with_another_token, "it has 9001 tokens, and the model knows 257"),
    ] {
        assert_ne!(content, tokenizer);
        workspace.write("hf/tokenizer.json", content);
        let ended = workspace.kiln(&["import", "--hf", "hf", "--out", "imported"]);
        assert!(ended.code == Some(1) || ended.code == Some(2), "{ended:?}");
        assert!(ended.stderr.contains(says), "{ended:?}");
        assert!(!workspace.path("imported").exists());
    }
    let config = workspace.read("hf/generation_config.json");
    let without_end = tokenizer.replace("<|endoftext|>", "<|middleoftext|>");
    workspace.write("hf/tokenizer.json", without_end);
    for file in ["hf/generation_config.json", "hf/config.json"] {
        workspace.replace(file, "\"eos_token_id\": 0", "\"eos_token_id\": null");
    }
    let ended = workspace.kiln(&["import", "--hf", "hf", "--out", "imported"]);
    assert!(ended.stderr.contains("the end-of-text token is unknown"), "{ended:?}");
    assert!(!workspace.path("imported").exists());
    workspace.write("hf/generation_config.json", config);
    workspace.write("hf/tokenizer.json", tokenizer);
    workspace.succeed(&["import", "--hf", "hf", "--out", "imported"]);
    workspace.succeed(&[&GENERATE[..], &["imported"]].concat());
}

/// Exports the metrics as a table to `place`.
fn export(workspace: &Workspace, place: &str) -> Ended {
    workspace.kiln(&["metrics", "run", "--csv", place])
}

#[test]
fn a_table_of_metrics_replaces_no_file_of_a_run() {
    let workspace = trained();
    symlink("run/metrics.jsonl", workspace.path("link.csv")).expect("a link");
    symlink("run/samples.jsonl", workspace.path("dangling.csv")).expect("a link");
    workspace.write("notes.txt", "mine");
    let before = workspace.read("run/metrics.jsonl");
    for place in
        ["run/metrics.jsonl", "link.csv", "dangling.csv", "run/.kiln/lock", "run/new.json", "notes.txt"]
    {
        assert_fails(place, &export(&workspace, place), 2, "name another file");
    }
    assert_eq!(workspace.read("run/metrics.jsonl"), before);
    assert_eq!(workspace.read("notes.txt"), b"mine");
    assert!(!workspace.path("run/samples.jsonl").exists() && !workspace.path("run/new.json").exists());
    // An earlier table is replaced, also through a link.
    workspace.write("old.csv", "step,time,loss\n");
    symlink("old.csv", workspace.path("to-old.csv")).expect("a link");
    for place in ["run/table.csv", "to-old.csv", "run/table.csv"] {
        assert_eq!(export(&workspace, place).code, Some(0), "{place}");
    }
    let table = workspace.text("run/table.csv");
    assert!(workspace.path("to-old.csv").is_symlink() && workspace.text("old.csv") == table);

    // A device or pipe gets the table, and remains a device or pipe.
    for (place, code) in [("/dev/full", 1), ("/dev/null", 0)] {
        symlink(place, workspace.path("device")).expect("a link");
        assert_eq!(export(&workspace, "device").code, Some(code), "{place}");
        assert!(fs::metadata(workspace.path("device")).expect("a device").file_type().is_char_device());
        workspace.remove("device");
    }
    let pipe = workspace.path("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo").success());
    let reader = thread::spawn({
        let pipe = pipe.clone();
        move || fs::read(pipe).expect("a table")
    });
    assert_eq!(export(&workspace, "pipe").code, Some(0));
    assert_eq!(reader.join().expect("a reader"), table.as_bytes());
    assert!(fs::metadata(pipe).expect("a pipe").file_type().is_fifo());
    // Standard output contains the table only.
    assert_eq!(export(&workspace, "/dev/stdout").stdout, table);
    let file = File::create(workspace.path("redirected")).expect("a file");
    let mut command = workspace.command(&["metrics", "run", "--csv", "/dev/stdout"]);
    assert_eq!(workspace.end(command.stdout(file).spawn().expect("kiln starts")).code, Some(0));
    assert_eq!(workspace.text("redirected"), table);
}

#[test]
fn a_line_that_never_ends_is_not_read_into_memory() {
    let workspace = trained();
    workspace.copy("run", "other");
    // A sparse file that is larger than memory.
    let metrics = File::options().append(true).open(workspace.path("run/metrics.jsonl")).expect("a file");
    metrics.set_len(1 << 38).expect("a longer file");
    for (arguments, code) in [
        (&["export", "metrics", "run", "--csv", "table.csv"][..], 1),
        (&["diff", "run", "other"], 2),
        (&RESUME, 1),
    ] {
        let ended = workspace.kiln(arguments);
        assert_eq!(ended.code, Some(code), "{arguments:?}: {ended:?}");
        assert!(
            ended.stderr.contains("a line in it has more than 67108864 bytes"),
            "{arguments:?}: {ended:?}"
        );
    }
}

/// Plays a process of the run in `run`: `answer` handles each connection.
fn play(workspace: &Workspace, answer: impl Fn(&UnixStream) + Send + Sync + 'static) {
    let folder = Folder::make(&workspace.path("run")).expect("a folder");
    let owner = Owner { process: ProcessId::this(), ranks: vec![0] };
    let listener = folder.listen(&owner).expect("a socket");
    thread::spawn(move || {
        for stream in listener.incoming().map_while(Result::ok) {
            let mut request = String::new();
            let _ = BufReader::new(&stream).read_line(&mut request);
            answer(&stream);
        }
    });
}

#[test]
fn status_believes_no_reply_that_no_run_gives() {
    let huge = |world_size: u64| {
        format!(r#"{{"status":{{"world_size":{world_size},"steps":1,"deadline_s":1e308,"ranks":[]}}}}"#)
    };
    let replies = [huge(1 << 40), huge(u64::MAX), huge(1 << 20), "[".repeat(1 << 20), "no JSON".to_owned()];
    for reply in replies {
        let workspace = trained();
        let line = format!("{reply}\n");
        play(&workspace, move |mut stream| _ = stream.write_all(line.as_bytes()));
        for more in [&[][..], &["--json"]] {
            let ended = workspace.kiln(&[&["status", "run"], more].concat());
            let what = reply.get(..80).unwrap_or(&reply);
            assert_eq!((ended.code, ended.stderr.as_str()), (Some(1), ""), "{what}: {ended:?}");
            assert!(ended.stdout.len() < 2000, "{what}: {} bytes", ended.stdout.len());
            assert!(ended.stdout.contains("does not answer"), "{what}: {ended:?}");
        }
    }
}

#[test]
fn a_reply_without_an_end_holds_status_up_no_longer_than_silence() {
    let slowly = |mut stream: &UnixStream| {
        while stream.write_all(b" ").is_ok() {
            thread::sleep(std::time::Duration::from_millis(20));
        }
    };
    let fast = |mut stream: &UnixStream| while stream.write_all(&[b' '; 1 << 16]).is_ok() {};
    for answer in [slowly as fn(&UnixStream), fast] {
        let workspace = trained();
        play(&workspace, answer);
        let ended = workspace.kiln(&["status", "run"]);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(1), ""), "{ended:?}");
        assert!(ended.stdout.contains("does not answer"), "{ended:?}");
    }
}

#[test]
fn a_socket_of_a_rank_that_cannot_be_makes_no_long_list() {
    let workspace = trained();
    for rank in [(1 << 16) - 1, (1 << 20) - 1] {
        let folder = Folder::make(&workspace.path("run")).expect("a folder");
        let owner = Owner { process: ProcessId::this(), ranks: vec![rank] };
        let _socket = folder.listen(&owner).expect("a socket");
        for more in [&[][..], &["--json"]] {
            let ended = workspace.kiln(&[&["status", "run"], more].concat());
            assert!(ended.code.is_some_and(|code| code < 2), "{rank}: {ended:?}");
            assert!(ended.stdout.len() < 4000, "{rank}: {} bytes", ended.stdout.len());
        }
        folder.remove_of(&owner);
    }
}

#[test]
fn a_prompt_shows_no_orders_to_the_terminal_and_sends_no_line_that_is_too_long() {
    let workspace = trained();
    play(&workspace, |stream| {
        let evil = "\u{1b}[2Jheld at step 1".to_owned();
        for message in [ToPrompt::Text(evil), ToPrompt::Running] {
            let _ = send_reply(stream, &Reply::Prompt(message));
        }
        // Waits until the client disconnects, without answering.
        let _ = std::io::copy(&mut &*stream, &mut std::io::sink());
    });
    let mut attached =
        workspace.command(&["attach", "run"]).stdin(Stdio::piped()).spawn().expect("kiln starts");
    let mut lines = attached.stdin.take().expect("its input");
    writeln!(lines, "p {}", "x".repeat(70_000)).expect("it is read");
    drop(lines);
    let ended = workspace.end(attached);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
    assert!(ended.stdout.starts_with(r"\u001b[2Jheld at step 1"), "{ended:?}");
    assert!(ended.stdout.contains("a line has at most 65536 bytes"), "{ended:?}");
}

/// As on a file system with names in a legacy encoding.
#[test]
fn a_run_folder_need_not_be_utf_8() {
    let workspace = Workspace::new();
    let name = OsStr::from_bytes(b"run-\xff");
    for (launch, folder) in [(&[][..], "alone"), (&["launch", "--nproc-per-node", "2", "--"], "launched")] {
        let out = std::path::Path::new(folder).join(name);
        let mut command = workspace.command(&[launch, &["train", "run.toml", "--out"]].concat());
        let ended = workspace.end(command.arg(&out).spawn().expect("kiln starts"));
        assert_eq!(ended.code, Some(0), "{folder}: {ended:?}");
        assert!(workspace.path(out).join("checkpoints/latest").exists(), "{folder}");
    }
}
