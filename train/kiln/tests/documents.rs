//! Runs the commands of README and `docs/` as a reader would: in order, in one clone, with `kiln` on PATH; and compares
//! the output that the pages show, with figures masked.
//!
//! A block of commands is fenced with `bash` or indented; a block fenced with `text` after it is output. A comment
//! before a block changes that:
//!
//! - `<!-- test: skip REASON -->`: the commands are not run, or the text is not the output of the commands above it;
//! - `<!-- test: exit CODE -->`: one of the commands fails, with this code;
//! - `<!-- test: type LINE; LINE -->`: a terminal, and what a reader types there.

use std::collections::VecDeque;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// The pages, in reading order. The page of errors quotes commands for other people's runs.
const PAGES: [&str; 13] = [
    "README.md",
    "docs/train-your-text.md",
    "docs/chat.md",
    "docs/configuration.md",
    "docs/watching.md",
    "docs/debugging.md",
    "docs/strategies.md",
    "docs/several-machines.md",
    "docs/checkpoints-and-hugging-face.md",
    "docs/optimizers.md",
    "docs/sweeps.md",
    "docs/change-the-model.md",
    "docs/gpus.md",
];

/// Definitions for all commands: `cargo run` means `kiln` here, and commands that CI runs anyway are skipped.
const PRELUDE: &str = r#"
failed=0
trap 'failed=$?' ERR
cargo() {
    case "$1 $2 $3" in
    "run --release --") shift 3 && kiln "$@" ;;
    *) echo "not run by this test: cargo $*" ;;
    esac
}
"#;

/// Seconds that a block may take; `timeout` ends it with code 124.
const DEADLINE: &str = "600";

#[derive(Debug, PartialEq)]
enum Kind {
    Commands,
    Output,
}

/// A block of a page.
#[derive(Debug, PartialEq)]
struct Block {
    /// The line where it starts, from 1.
    line: usize,
    kind: Kind,
    text: String,
    /// The words of the comment before the block.
    note: String,
}

/// Returns the blocks of commands and of output in a page.
fn blocks(page: &str) -> Vec<Block> {
    let mut blocks: Vec<Block> = Vec::new();
    let (mut note, mut fence) = (String::new(), None::<String>);
    let mut was_blank = true;
    for (index, line) in page.lines().enumerate() {
        let new = |kind, note: &mut String| Block {
            line: index + 1,
            kind,
            text: String::new(),
            note: std::mem::take(note),
        };
        match (&fence, line.trim_end()) {
            (Some(_), "```") => fence = None,
            (Some(language), _) if ["bash", "text"].contains(&language.as_str()) => {
                let block = blocks.last_mut().expect("a fence has begun a block");
                block.text += line;
                block.text.push('\n');
            }
            (Some(_), _) => {}
            (None, start) if start.starts_with("```") => {
                let language = start.trim_start_matches('`').to_owned();
                match language.as_str() {
                    "bash" => blocks.push(new(Kind::Commands, &mut note)),
                    "text" => blocks.push(new(Kind::Output, &mut note)),
                    _ => note.clear(),
                }
                fence = Some(language);
            }
            (None, comment) if comment.starts_with("<!-- test: ") => {
                note = comment["<!-- test: ".len()..].trim_end_matches("-->").trim().to_owned();
            }
            (None, _) if line.starts_with("    ") && !line.trim().is_empty() => {
                if was_blank {
                    blocks.push(new(Kind::Commands, &mut note));
                }
                if let Some(block) = blocks.last_mut() {
                    block.text += &line[4..];
                    block.text.push('\n');
                }
                was_blank = false;
                continue;
            }
            _ => {}
        }
        was_blank = line.trim().is_empty();
    }
    blocks
}

/// Masks figures and spaces, so that lines of different runs are equal.
fn masked(line: &str) -> String {
    let mut text = String::new();
    let mut characters = line.trim().chars().peekable();
    while let Some(character) = characters.next() {
        let is_number = |c: char| c.is_ascii_digit();
        if is_number(character) {
            while characters.next_if(|c| is_number(*c) || ['.', ',', ':'].contains(c)).is_some() {}
            if text.ends_with(['-', '+']) {
                text.pop();
            }
            if !text.ends_with('#') {
                text.push('#');
            }
        } else if character.is_whitespace() || ['█', '░'].contains(&character) {
            if !text.ends_with(' ') {
                text.push(' ');
            }
        } else {
            text.push(character);
        }
    }
    // Units of sizes, rates and times depend on the machine as well.
    let text = text.replace("#m#s", "#s");
    ["GiB", "MiB", "KiB", "TFLOP/s", "GFLOP/s", "ms", "µs"].iter().fold(text, |text, unit| match *unit {
        "ms" | "µs" => text.replace(&format!("# {unit}"), "# s"),
        "TFLOP/s" | "GFLOP/s" => text.replace(unit, "FLOP/s"),
        _ => text.replace(unit, "B"),
    })
}

/// Returns the first line of `expected` that `said` lacks. The lines must occur in this order; a line of dots
/// stands for any lines.
fn missing<'a>(expected: &'a str, said: &str) -> Option<&'a str> {
    let mut said: VecDeque<String> = said.lines().map(masked).collect();
    expected.lines().filter(|line| !["", "...", "…"].contains(&line.trim())).find(|line| {
        let wanted = masked(line);
        let found = said.iter().position(|line| line.contains(&wanted));
        found.inspect(|position| drop(said.drain(..=*position))).is_none()
    })
}

fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").canonicalize().expect("the repository")
}

/// Runs `script` in `clone`; returns its exit code and its output.
fn run(script: &str, clone: &Path, typed: Option<&str>) -> (Option<i32>, String) {
    let kiln = Path::new(env!("CARGO_BIN_EXE_kiln")).parent().expect("a folder").to_owned();
    let path = std::env::var("PATH").unwrap_or_default();
    let script = format!("set -o pipefail\n{PRELUDE}\n{script}\nexit $failed");
    // Ends the commands and whatever they have started.
    let mut command = Command::new("timeout");
    command.args(["--kill-after=10", DEADLINE]);
    match typed {
        None => command.args(["bash", "-c", &format!("{{ {script}\n}} 2>&1")]),
        Some(_) => command.args(["script", "-qefc", &script, "/dev/null"]),
    };
    command.current_dir(clone).env("PATH", format!("{}:{path}", kiln.display()));
    command.stdin(if typed.is_some() { Stdio::piped() } else { Stdio::null() });
    command.stdout(Stdio::piped()).stderr(Stdio::inherit());
    let mut child = command.spawn().expect("a shell");
    let keyboard = typed.map(|typed| {
        let (lines, mut input) = (typed.to_owned(), child.stdin.take().expect("it is piped"));
        std::thread::spawn(move || {
            for line in lines.split(';') {
                // Waits for the prompt; until then, typed text would stay in the terminal's buffer.
                std::thread::sleep(std::time::Duration::from_secs(2));
                let _ = std::io::Write::write_all(&mut input, format!("{}\n", line.trim()).as_bytes());
            }
            // The terminal stays open until the program has ended.
            input
        })
    });
    let output = child.wait_with_output().expect("its output");
    drop(keyboard.map(|thread| thread.join()));
    (output.status.code(), String::from_utf8_lossy(&output.stdout).replace('\r', ""))
}

#[test]
#[ignore = "takes ten minutes: cargo test --release -p kiln --test documents -- --ignored commands"]
fn commands_of_all_pages_do_what_the_pages_show() {
    let folder = tempfile::tempdir().expect("a folder");
    let clone = folder.path().join("kiln");
    let cloned = Command::new("git").arg("clone").arg("-q").arg(repository()).arg(&clone).status();
    assert!(cloned.expect("git").success());
    let only = std::env::var("KILN_PAGES").unwrap_or_default();
    let mut problems = Vec::new();
    for page in PAGES.into_iter().filter(|page| page.contains(&only)) {
        // Uses the page in the working tree, so that a change can be tested before it is committed.
        let text = fs::read_to_string(repository().join(page)).expect("a page");
        let mut said = String::new();
        for Block { line, kind, text, note } in blocks(&text) {
            let (word, rest) = note.split_once(' ').unwrap_or((&note, ""));
            if word == "skip" {
                continue;
            }
            match kind {
                Kind::Commands => {
                    let start = std::time::Instant::now();
                    let code;
                    (code, said) = run(&text, &clone, (word == "type").then_some(rest));
                    println!("{page}:{line}: {:.1} s, exit code {code:?}", start.elapsed().as_secs_f64());
                    let wanted = if word == "exit" { rest.parse().ok() } else { Some(0) };
                    if code != wanted {
                        problems.push(format!("{page}:{line}: exit code {code:?}\n{text}\n{said}"));
                    }
                }
                Kind::Output => {
                    if let Some(missing) = missing(&text, &said) {
                        problems.push(format!("{page}:{line}: nothing like\n{missing}\nin\n{said}"));
                    }
                }
            }
        }
    }
    assert!(problems.is_empty(), "{} problems:\n{}", problems.len(), problems.join("\n----\n"));
}

#[test]
fn blocks_are_found_with_their_notes() {
    let page = "Text.\n\n    kiln a\n    kiln b\n\n```text\n1 of 2\n```\n\n<!-- test: exit 1 -->\n```bash\nkiln c\n```\n\
                \n```toml\nkey = 1\n```\n\n- item\n\n    kiln d\n";
    let found: Vec<_> = blocks(page)
        .into_iter()
        .map(|block| (block.line, block.kind == Kind::Commands, block.text, block.note))
        .collect();
    let block =
        |line, is_command, text: &str, note: &str| (line, is_command, text.to_owned(), note.to_owned());
    assert_eq!(
        found,
        [
            block(3, true, "kiln a\nkiln b\n", ""),
            block(6, false, "1 of 2\n", ""),
            block(11, true, "kiln c\n", "exit 1"),
            block(21, true, "kiln d\n", ""),
        ]
    );
}

#[test]
fn figures_are_masked_and_words_are_not() {
    assert_eq!(
        masked("loss  3.2360 | lr 7.50e-5 |  28.1 GFLOP/s"),
        masked("loss 4.1 | lr 1.25e-3 | 3.2 TFLOP/s")
    );
    assert_eq!(missing("a 1\n...\nb 2.5 ms\n", "x\na 7\ny\nb 3 s\n"), None);
    assert_eq!(missing("b 1\na 2\n", "a 7\nb 3\n"), Some("a 2"));
    assert_eq!(missing("rank 1 waits", "rank 1 works"), Some("rank 1 waits"));
}
