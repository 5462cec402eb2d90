//! Prepared data that was changed after it was prepared: `kiln data verify`, and the checks of a run.

use std::fs::File;
use std::os::unix::fs::FileExt as _;
use std::os::unix::net::UnixListener;

use nix::sys::stat::Mode;
use nix::unistd::mkfifo;

use crate::hostile::ends;
use crate::messages::Messages;
use crate::support::Workspace;

/// Bytes of a token file that share a checksum.
const BLOCK: u64 = 1 << 16;

/// Returns a workspace with `own/`, prepared from `lines` lines of text.
fn prepared(lines: usize) -> Workspace {
    let workspace = Workspace::new();
    let text: String = (0..lines).map(|line| format!("line {line} of a long document\n")).collect();
    workspace.write("text.txt", text);
    let prepare = ["data", "prepare", "--input", "text.txt", "--out", "own", "--vocab-size", "300"];
    workspace.succeed(&prepare);
    workspace.config("run.toml", &[("data.path", "'own'"), ("data.shuffle", "false")]);
    workspace
}

/// Changes a token in a file of 16-bit ids, at a position in bytes.
fn change(workspace: &Workspace, file: &str, position: u64) {
    let path = workspace.path(file);
    let file = File::options().read(true).write(true).open(path).expect("a file");
    let mut token = [0; 2];
    file.read_exact_at(&mut token, position).expect("a token");
    let other = if token == [40, 0] { [41, 0] } else { [40, 0] };
    file.write_all_at(&other, position).expect("room");
}

const VERIFY: [&str; 3] = ["data", "verify", "own"];

#[test]
fn verify_names_and_locates_damage() {
    let mut messages = Messages::default();
    let workspace = prepared(40_000);
    let said = workspace.succeed(&VERIFY);
    assert!(said.starts_with("own is intact: 7 files, "), "{said}");
    assert!(said.ends_with(", all checksums match\n"), "{said}");
    assert!(workspace.read("own/train.bin").len() as u64 > 6 * BLOCK);
    workspace.copy("own", "whole");
    let mut fails = |title: &str, damage: &dyn Fn()| {
        workspace.remove("own");
        workspace.copy("whole", "own");
        damage();
        messages.fails(title, &workspace, &VERIFY);
    };
    fails("one token", &|| change(&workspace, "own/train.bin", 200_000));
    fails("tokens in two neighbouring blocks and in another one", &|| {
        for position in [BLOCK - 2, BLOCK, 4 * BLOCK + 10] {
            change(&workspace, "own/train.bin", position);
        }
    });
    fails("a token outside the vocabulary", &|| {
        let file = File::options().write(true).open(workspace.path("own/val.bin")).expect("a file");
        file.write_all_at(&999_u16.to_le_bytes(), 100).expect("room");
    });
    fails("a file that is too short", &|| {
        let file = File::options().write(true).open(workspace.path("own/train.bin"));
        file.expect("a file").set_len(1000).expect("a shorter file");
    });
    fails("checksums of blocks", &|| change(&workspace, "own/train.crc", 8));
    fails("what describes the data", &|| {
        workspace.replace("own/data.json", "\"documents\": 1", "\"documents\": 2");
        workspace.write("own/inputs.json", "{}");
        workspace.replace("own/tokenizer.json", "\"version\": \"1.0\"", "\"version\":  \"1.0\"");
    });
    fails("files that are gone", &|| {
        for file in ["val.bin", "val.crc", "tokenizer.json", "inputs.json"] {
            workspace.remove(&format!("own/{file}"));
        }
    });
    fails("sums that are gone", &|| workspace.remove("own/SHA256SUMS"));
    fails("sums that are gone, and checksums of blocks", &|| {
        workspace.remove("own/SHA256SUMS");
        change(&workspace, "own/train.crc", 8);
    });
    fails("no description", &|| workspace.write("own/data.json", "{"));
    workspace.remove("own");
    messages.refused("no folder", &workspace, &VERIFY);
    insta::assert_snapshot!(messages.finish());
}

/// An earlier version has prepared this data, without checksums of blocks and small files.
#[test]
fn data_without_block_checksums_is_used() {
    let workspace = prepared(40_000);
    for file in ["train.crc", "val.crc", "SHA256SUMS"] {
        workspace.remove(&format!("own/{file}"));
    }
    workspace.replace("own/data.json", "\"block_bytes\": 65536", "\"block_bytes\": null");
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let said = workspace.succeed(&VERIFY);
    assert!(said.starts_with("own: 2 files, "), "{said}");
    assert!(said.contains("match their checksums"), "{said}");
    assert!(said.contains("earlier version"), "{said}");
    change(&workspace, "own/train.bin", 200_000);
    workspace.write("own/tokenizer.json", "{}");
    let ended = workspace.kiln(&VERIFY);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("own/train.bin: its SHA-256 differs "), "{}", ended.stderr);
    let tokenizer = "own/tokenizer.json: it is not a usable tokenizer: ";
    assert!(ended.stderr.contains(tokenizer), "{}", ended.stderr);
}

#[test]
fn changed_token_stops_the_start() {
    let mut messages = Messages::default();
    let workspace = prepared(2_000);
    let train = ["train", "run.toml", "--out", "run"];
    workspace.copy("own", "whole");
    let mut fails = |title: &str, damage: &dyn Fn()| {
        workspace.remove("own");
        workspace.copy("whole", "own");
        damage();
        messages.fails(title, &workspace, &train);
        assert!(!workspace.path("run").exists(), "{title}");
    };
    fails("training", &|| change(&workspace, "own/train.bin", 1000));
    fails("validation", &|| change(&workspace, "own/val.bin", 1000));
    fails("no checksums of blocks", &|| workspace.remove("own/train.crc"));
    fails("checksums of other data", &|| workspace.write("own/train.crc", [0; 24]));
    insta::assert_snapshot!(messages.finish());
}

/// At the start, a run checks sixteen blocks of each file; it checks the other blocks when it first uses them.
#[test]
fn changed_token_stops_the_run_on_first_use() {
    let workspace = prepared(90_000);
    let blocks = workspace.read("own/train.bin").len() as u64 / BLOCK;
    assert!((24..30).contains(&blocks), "{blocks}");
    // In a file of this many blocks, the third block is not among the sixteen.
    change(&workspace, "own/train.bin", 2 * BLOCK + 100);
    workspace.config(
        "run.toml",
        &[
            ("data.path", "'own'"),
            ("data.shuffle", "false"),
            ("data.seq_len", "512"),
            ("train.steps", "100"),
            ("eval.samples", "1"),
        ],
    );
    let ended = workspace.kiln(&["train", "run.toml", "--out", "run"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let message = "error: tokens 65536 to 98303 of own/train.bin do not match their checksum: ";
    assert!(ended.stderr.contains(message), "{}", ended.stderr);
    // The last sample of the sixteenth step ends with the first token of the third block.
    assert_eq!(workspace.steps("run").len(), 15);
}

#[test]
fn changed_token_stops_an_evaluation() {
    let workspace = prepared(2_000);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    change(&workspace, "own/val.bin", 100);
    let ended = workspace.kiln(&["eval", "--checkpoint", "run"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let message = "error: tokens 0 to 886 of own/val.bin do not match their checksum: ";
    assert!(ended.stderr.starts_with(message), "{}", ended.stderr);
    assert_eq!(ended.stdout, "");
}

/// Reading a FIFO would wait forever, and a device may have no end.
#[test]
fn special_files_as_data_are_refused() {
    let workspace = prepared(2_000);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let train = ["train", "run.toml", "--out", "new"];
    let eval = ["eval", "--checkpoint", "run"];
    let all = ["train.bin", "val.bin", "train.crc", "val.crc", "data.json", "tokenizer.json"];
    for name in all.into_iter().chain(["SHA256SUMS", "inputs.json"]) {
        let file = format!("own/{name}");
        let kept = workspace.read(&file);
        workspace.remove(&file);
        mkfifo(&workspace.path(&file), Mode::S_IRWXU).expect("a FIFO");
        let is_of_training = name.starts_with("train.");
        for command in [&VERIFY[..], &train, &eval] {
            let is_read = match command[0] {
                "data" => true,
                "eval" => !is_of_training && name != "inputs.json",
                _ => name != "inputs.json",
            };
            let ended = ends(&workspace, command);
            let (code, says) = if is_read { (1, "it is not a regular file") } else { (0, "") };
            assert_eq!(ended.code, Some(code), "{file} {command:?}: {ended:?}");
            assert!(ended.stderr.contains(says), "{file} {command:?}: {ended:?}");
            assert_eq!(ended.stderr.contains(&file), is_read, "{file} {command:?}: {ended:?}");
            if command[0] == "train" && code == 0 {
                workspace.remove("new");
            }
        }
        workspace.remove(&file);
        workspace.write(&file, kept);
    }
    // Other special files are treated the same way.
    workspace.remove("own/train.bin");
    let socket = UnixListener::bind(workspace.path("own/train.bin")).expect("a socket");
    let ended = ends(&workspace, &train);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("own/train.bin: it is not a regular file"), "{ended:?}");
    drop(socket);
}

/// Every start compares the small files: a changed tokenizer would change the meaning of the data.
#[test]
fn changed_small_file_stops_the_start() {
    let mut messages = Messages::default();
    let workspace = prepared(2_000);
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    workspace.copy("own", "whole");
    let changes: [(&str, &dyn Fn()); 3] = [
        ("data.json", &|| {
            workspace.replace("own/data.json", "\"documents\": 1", "\"documents\": 2");
        }),
        ("tokenizer.json", &|| {
            workspace.replace("own/tokenizer.json", "\"version\": \"1.0\"", "\"version\":  \"1.0\"");
        }),
        ("SHA256SUMS", &|| workspace.replace("own/SHA256SUMS", "data.json", "\ndata.json")),
    ];
    for (file, change) in changes {
        workspace.remove("own");
        workspace.copy("whole", "own");
        change();
        for (what, command) in [
            ("a start", &["train", "run.toml", "--out", "new"][..]),
            ("a resume", &["train", "run.toml", "--out", "run", "--resume", "latest"]),
            ("an evaluation", &["eval", "--checkpoint", "run"]),
        ] {
            let before = workspace.tree();
            messages.fails(&format!("{file}: {what}"), &workspace, command);
            assert!(before == workspace.tree(), "{file}: {what}");
        }
    }
    // A user who removes the checksums accepts the change.
    workspace.remove("own");
    workspace.copy("whole", "own");
    workspace.replace("own/data.json", "\"documents\": 1", "\"documents\": 2");
    workspace.remove("own/SHA256SUMS");
    workspace.succeed(&["train", "run.toml", "--out", "new"]);
    insta::assert_snapshot!(messages.finish());
}
