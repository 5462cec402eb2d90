//! Messages of `kiln data prepare` about its inputs, and its leftovers when it is killed.

use std::fs::{self, File};
use std::io::Write as _;
use std::os::unix::fs::{OpenOptionsExt as _, symlink};
use std::process::Child;

use kiln_testkit::{Said, status_of, wait_for};
use nix::sys::stat::Mode;
use nix::unistd::mkfifo;
use rustix::process::Signal;

use crate::support::{Ended, Workspace, names, signal};

/// Returns a text that is long enough for two splits.
fn text(name: &str) -> String {
    (0..400).map(|line| format!("{name} line {line} of the {name} document\n")).collect()
}

fn prepare<'a>(input: &'a str, out: &'a str) -> [&'a str; 8] {
    ["data", "prepare", "--input", input, "--out", out, "--vocab-size", "300"]
}

/// Returns the standard error of a successful prepare.
fn warnings(workspace: &Workspace, input: &str, out: &str) -> String {
    let ended = workspace.kiln(&prepare(input, out));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    ended.stderr
}

/// Returns the standard output of a successful prepare without its progress, which depends on time.
fn said(workspace: &Workspace, inputs: &[&str], out: &str, vocab_size: &str) -> Vec<String> {
    let options = ["--out", out, "--vocab-size", vocab_size];
    let said = workspace.succeed(&[&["data", "prepare", "--input"], inputs, &options].concat());
    let lines = said.lines().filter(|line| !line.contains(" s so far"));
    lines.map(str::to_owned).collect()
}

#[test]
fn files_that_are_not_text_are_named() {
    let workspace = Workspace::new();
    workspace.write("texts/a.txt", text("first"));
    let utf16: Vec<u8> = "some text".encode_utf16().flat_map(u16::to_le_bytes).collect();
    workspace.write("texts/b.txt", [&[0xFF, 0xFE], &utf16[..]].concat());
    workspace.write("texts/c.txt", &utf16);
    workspace.write("texts/d.txt", b"caf\xE9 au lait");
    workspace.write("texts/e.txt.gz", b"\x1F\x8B\x08\0\0\0\0\0\0\x03");
    let note = |out: &str| {
        let said = said(&workspace, &["texts"], out, "300");
        said.into_iter().find(|line| line.contains("not UTF-8 text")).unwrap_or_default()
    };
    assert_eq!(
        note("four"),
        "data: 4 of 5 files are not UTF-8 text and were skipped: texts/b.txt (it is UTF-16), \
         texts/c.txt (it is UTF-16), texts/d.txt (there is an invalid byte at position 3, as in \
         Latin-1), texts/e.txt.gz (it is compressed with gzip); convert or unpack files to read \
         them"
    );
    for index in 0..3 {
        workspace.write(&format!("texts/f{index}.png"), b"\x89PNG\r\n\x1A\n\0\0\0\rIHDR");
    }
    let said = note("seven");
    assert!(said.starts_with("data: 7 of 8 files are not UTF-8 text"), "{said}");
    let binary = "texts/f0.png (there is a zero byte at position 8), and 2 more; ";
    assert!(said.contains(binary), "{said}");
    assert_eq!(workspace.json("seven/data.json")["skipped_files"], 7);
    // The same message appears if the other files contain no text.
    for name in ["a.txt", "b.txt", "c.txt", "d.txt", "f0.png", "f1.png", "f2.png"] {
        workspace.remove(&format!("texts/{name}"));
    }
    let ended = workspace.kiln(&prepare("texts", "none"));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let note = "data: 1 of 1 files is not UTF-8 text and was skipped: texts/e.txt.gz (it is ";
    assert!(ended.stdout.contains(note), "{}", ended.stdout);
    let error = "error: the inputs hold no text (1 file found, 1 of them not UTF-8); ";
    assert!(ended.stderr.contains(error), "{}", ended.stderr);
    // A file named explicitly is not skipped.
    let ended = workspace.kiln(&prepare("texts/e.txt.gz", "none"));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let message = "error: texts/e.txt.gz is not UTF-8 text: it is compressed with gzip; convert ";
    assert!(ended.stderr.starts_with(message), "{}", ended.stderr);
}

#[test]
fn byte_order_mark_is_not_text() {
    let workspace = Workspace::new();
    let lines: String = (0..200)
        .map(|line| format!("{{\"text\": \"line {line} of a document, and some more of it\"}}\n"))
        .collect();
    let info = |file: &str, content: String, out: &str| {
        workspace.write(file, content);
        workspace.succeed(&prepare(file, out));
        ["data.json", "tokenizer.json", "train.bin", "val.bin"]
            .map(|name| workspace.read(format!("{out}/{name}")))
    };
    for (file, content) in [("a.txt", text("first")), ("b.jsonl", lines)] {
        let plain = info(file, content.clone(), &format!("plain_{file}"));
        let marked = info(file, format!("\u{FEFF}{content}"), &format!("marked_{file}"));
        assert!(plain == marked, "{file}");
    }
}

#[test]
fn repeated_content_is_reported() {
    let workspace = Workspace::new();
    workspace.write("texts/a.txt", text("first"));
    workspace.write("texts/b.txt", text("second"));
    workspace.write("texts/deep/copy.txt", text("first"));
    for empty in ["texts/empty", "texts/nothing"] {
        workspace.write(empty, "");
    }
    let once = said(&workspace, &["texts"], "one", "300");
    let same = "data: the same content occurs more than once: ";
    assert_eq!(once[0], format!("{same}texts/a.txt = texts/deep/copy.txt"));
    let twice = said(&workspace, &["texts/b.txt", "./texts/b.txt"], "two", "300");
    assert_eq!(twice[0], format!("{same}texts/b.txt (2 times)"));
    let alone = said(&workspace, &["texts/b.txt"], "three", "300");
    assert!(!alone.iter().any(|line| line.starts_with(same)), "{alone:?}");
}

#[test]
fn small_vocabulary_is_reported() {
    let workspace = Workspace::new();
    workspace.write("a.txt", "a b c d e f g\n".repeat(300));
    let lines = said(&workspace, &["a.txt"], "own", "4096");
    let reached = &workspace.json("own/data.json")["vocab_size"];
    let expected = format!(
        "data: the vocabulary has {reached} tokens instead of the requested 4096: no other pair of tokens \
         occurs twice in this text"
    );
    assert_eq!(lines[1], expected);
    let reached = reached.to_string();
    let lines = said(&workspace, &["a.txt"], "again", &reached);
    assert!(!lines.iter().any(|line| line.contains("requested")), "{lines:?}");
}

/// Regression test: progress was printed only every two megabytes, without the remaining time, and not at all
/// while merging.
#[test]
fn progress_follows_the_clock() {
    let workspace = Workspace::new();
    let text: String = (0..60_000).map(|line| format!("line {line} of the document\n")).collect();
    workspace.write("a.txt", text.repeat(3));
    let lines = said(&workspace, &["a.txt"], "own", "300");
    assert_eq!(lines.len(), 3, "{lines:?}");
    assert_eq!(lines[0], "data: training a tokenizer on 4.8 MB of text");
    assert!(
        lines[1].starts_with("data: the text has so few documents that the end of one is held out"),
        "{lines:?}"
    );
    assert!(lines[2].starts_with("data: 1 document, "), "{lines:?}");
}

#[test]
fn empty_inputs_are_reported() {
    let workspace = Workspace::new();
    workspace.write("a.txt", text("first"));
    let empty = |inputs: &[&str], out: &str| -> Ended {
        let arguments = ["--out", out, "--vocab-size", "300"];
        workspace.kiln(&[&["data", "prepare", "--input"], inputs, &arguments].concat())
    };
    // Standard input is /dev/null here.
    let ended = empty(&["a.txt", "-"], "one");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(ended.stderr, " WARN no text came from /dev/stdin\n");
    let ended = empty(&["-"], "two");
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let says = "error: no text came from /dev/stdin; check that the program that writes it succeeds\n";
    assert_eq!(ended.stderr, format!("{says}more: kiln explain too-little-text\n"));
    assert_eq!(names(&workspace.path("")), ["a.txt", "data", "one", "run.toml"]);
}

#[test]
fn circular_links_are_skipped() {
    let workspace = Workspace::new();
    workspace.write("texts/deep/a.txt", text("first"));
    symlink("..", workspace.path("texts/deep/up")).expect("a link");
    symlink("itself", workspace.path("texts/itself")).expect("a link");
    assert_eq!(warnings(&workspace, "texts", "own"), "");
    assert_eq!(workspace.json("own/data.json")["documents"], 1);
}

/// Text counts as unchanged if its content is the same, wherever it is.
#[test]
fn moved_text_is_the_same_text() {
    let workspace = Workspace::new();
    workspace.write("texts/a.txt", text("first"));
    workspace.write("texts/b.txt", text("second"));
    let start = |inputs: &str, out: &str| {
        let changes = [("data.path", "'own'"), ("data.text", inputs), ("data.vocab_size", "300")];
        workspace.config("run.toml", &changes);
        workspace.kiln(&["train", "run.toml", "--out", out])
    };
    assert_eq!(start("['texts']", "first").code, Some(0));
    let absolute = format!("['{}']", workspace.path("texts").display());
    let ended = start(&absolute, "second");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let ended = start("['texts/../texts']", "third");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    // The text is moved as a whole; then its files are listed in reverse order, which changes the content.
    workspace.copy("texts", "moved");
    workspace.remove("texts");
    let ended = start("['moved']", "fourth");
    assert_eq!(ended.code, Some(0), "{}", ended.stderr);
    let ended = start("['moved/b.txt', 'moved/a.txt']", "fifth");
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("the same files in a different order"), "{}", ended.stderr);
}

/// Returns a prepare that has created its folder and waits for a FIFO.
fn waiting(workspace: &Workspace, fifo: &str, out: &str) -> (Child, Said) {
    mkfifo(&workspace.path(fifo), Mode::S_IRWXU).expect("a FIFO");
    let mut child = workspace.start(&prepare(fifo, out));
    let said = reads_a_pipe(&mut child);
    (child, said)
}

/// Waits until `child` reports that it reads a pipe.
fn reads_a_pipe(child: &mut Child) -> Said {
    let mut said = Said::of(child.stdout.take().expect("a pipe"));
    let line = said.next_line();
    assert_eq!(line.as_deref(), Some("data: reading an input that is a pipe, to the end\n"));
    said
}

fn unfinished(workspace: &Workspace) -> Vec<String> {
    let mut names = names(&workspace.path(""));
    names.retain(|name| name.starts_with('.'));
    names
}

#[test]
fn the_next_prepare_removes_what_a_killed_one_left() {
    let workspace = Workspace::new();
    workspace.write("a.txt", text("first"));
    let (mut killed, _) = waiting(&workspace, "killed.fifo", "own");
    let (living, _said) = waiting(&workspace, "living.fifo", "own");
    assert_eq!(unfinished(&workspace).len(), 2);
    killed.kill().expect("it runs");
    status_of(&mut killed);
    // A folder of another machine, whose processes cannot be checked.
    workspace.write(".own.kiln-00000000-1-0/train.bin", "");

    assert_eq!(warnings(&workspace, "a.txt", "own"), "");
    let left = unfinished(&workspace);
    assert_eq!(left.len(), 2, "{left:?}");
    assert!(left.contains(&".own.kiln-00000000-1-0".to_owned()), "{left:?}");
    // Opening the FIFO gives an error instead of waiting if no process reads it.
    let mut options = File::options();
    options.write(true).custom_flags(libc::O_NONBLOCK);
    let open = || options.open(workspace.path("living.fifo")).map_err(|error| error.to_string());
    let mut fifo = wait_for("a reader", open);
    fifo.write_all(text("second").as_bytes()).expect("a reader");
    drop(fifo);
    // The other process has finished first, and its data stays.
    let before = workspace.read("own/train.bin");
    let ended = workspace.end(living);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("error: own already holds prepared data"), "{ended:?}");
    assert!(workspace.read("own/train.bin") == before);
    assert_eq!(unfinished(&workspace), [".own.kiln-00000000-1-0"]);
}

/// A link may lead anywhere, such as to the whole disk; only entries inside the folder count.
#[test]
fn links_out_of_a_folder_are_skipped() {
    let workspace = Workspace::new();
    workspace.write("texts/a.txt", text("first"));
    workspace.write("elsewhere/b.txt", text("second"));
    symlink("/", workspace.path("texts/root")).expect("a link");
    symlink("../elsewhere/b.txt", workspace.path("texts/b.txt")).expect("a link");
    symlink("nowhere", workspace.path("texts/c.txt")).expect("a link");
    symlink("nowhere", workspace.path("texts/.#c.txt")).expect("a link");
    mkfifo(&workspace.path("texts/d.txt"), Mode::S_IRWXU).expect("a FIFO");
    let said = warnings(&workspace, "texts", "one");
    let elsewhere = workspace.path("elsewhere/b.txt").canonicalize().expect("it is there");
    let elsewhere = elsewhere.display().to_string();
    assert_eq!(
        said.replace(&elsewhere, "ELSEWHERE").replace("elsewhere/b.txt)", "ELSEWHERE)"),
        " WARN 4 entries of the input folders were skipped: texts/b.txt (a link out of the folder, \
         to ELSEWHERE), texts/c.txt (a broken link), texts/d.txt (a pipe), texts/root (a link \
         out of the folder, to /); to read one, name it as an input\n"
    );
    let files = workspace.json("one/inputs.json");
    let files = files["files"].as_array().expect("files");
    assert_eq!(files.len(), 1, "{files:?}");
    // A link that is named explicitly is followed, and so are links that stay inside.
    for name in ["root", "b.txt", "c.txt", "d.txt"] {
        fs::remove_file(workspace.path("texts").join(name)).expect("an entry");
    }
    workspace.write("texts/deep/e.txt", text("third"));
    symlink("deep/e.txt", workspace.path("texts/f.txt")).expect("a link");
    symlink("texts", workspace.path("named")).expect("a link");
    assert_eq!(warnings(&workspace, "named", "two"), "");
    let files = workspace.json("two/inputs.json");
    assert_eq!(files["files"].as_array().expect("files").len(), 3, "{files:?}");
    // The folder has no other entries.
    workspace.write("empty/.hidden", "");
    symlink("../texts/a.txt", workspace.path("empty/a.txt")).expect("a link");
    let ended = workspace.kiln(&prepare("empty", "three"));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("empty/a.txt (a link out of the folder, to "), "{ended:?}");
    assert!(ended.stderr.contains("error: the inputs hold no text (0 files found"), "{ended:?}");
}

/// Data may arrive later, as in any FIFO, and a stop ends the wait.
#[test]
fn waiting_for_a_fifo_can_be_stopped() {
    let workspace = Workspace::new();
    workspace.write("a.txt", text("first"));
    mkfifo(&workspace.path("tokenizer.json"), Mode::S_IRWXU).expect("a FIFO");
    let arguments = ["data", "prepare", "--input", "a.txt", "--out", "own", "--tokenizer", "tokenizer.json"];
    let mut child = workspace.start(&arguments);
    let said = reads_a_pipe(&mut child);
    signal(&child, Signal::TERM);
    let ended = workspace.end(child);
    assert_eq!(ended.code, Some(75), "{ended:?}");
    let said = said.all();
    assert!(said.contains("stopped on request while data was prepared"), "{said}");
    // The message names the actual kind of file.
    let ended = workspace.kiln(&[&arguments[..7], &["/dev/null"]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.starts_with("data: reading an input that is a device, to"), "{ended:?}");
}
