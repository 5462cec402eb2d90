//! Runs commands that must fail, and collects their messages.

use crate::support::{Ended, Workspace};

/// The messages of one group of commands, for a snapshot that reviewers read.
#[derive(Default)]
pub struct Messages {
    text: String,
}

impl Messages {
    /// Runs a command that must be refused before any work: exit code 2, and no change on disk.
    pub fn refused(&mut self, title: &str, workspace: &Workspace, arguments: &[&str]) {
        let before = workspace.tree();
        // The plan depends on bf16 instructions, which differ between processors.
        let mut command = workspace.command(arguments);
        let ended = workspace.end(command.env("KILN_BF16", "none").spawn().expect("the binary starts"));
        let after = workspace.tree();
        self.record(title, &ended, 2);
        let changed: Vec<_> =
            before.keys().chain(after.keys()).filter(|path| before.get(*path) != after.get(*path)).collect();
        assert!(changed.is_empty(), "{title}: changed {changed:?}");
    }

    /// Runs a command that must fail during its work: exit code 1, and no half-written folder remains.
    pub fn fails(&mut self, title: &str, workspace: &Workspace, arguments: &[&str]) -> Ended {
        let ended = workspace.kiln(arguments);
        self.record(title, &ended, 1);
        for path in workspace.tree().keys() {
            let name = path.file_name().unwrap_or_default().to_string_lossy();
            let unfinished = [".partial", ".kiln-"].iter().any(|part| name.contains(part));
            assert!(!unfinished, "{title}: left {}", path.display());
        }
        ended
    }

    /// Adds the message of a command that must end with `code`.
    pub fn record(&mut self, title: &str, ended: &Ended, code: i32) {
        assert_eq!(ended.code, Some(code), "{title}: {ended:?}");
        assert_reads_well(title, &ended.stderr);
        self.text.push_str(&format!("# {title} (exit code {code})\n{}\n", ended.stderr));
    }

    /// Returns all messages under their titles.
    pub fn finish(self) -> String {
        self.text
    }
}

/// Fails if a message contains text that a user should never see.
fn assert_reads_well(title: &str, message: &str) {
    assert!(message.starts_with("error: ") && message.ends_with('\n'), "{title}: {message}");
    for unwanted in [
        "panicked",
        "RUST_BACKTRACE",
        "stack backtrace",
        "error: error",
        "Error {",
        "Error(",
        "Some(",
        "Os {",
        "rank 0: rank",
        "expected f64",
        "usize",
        "\\\"",
        "::",
        "struct Index",
        "/tmp/",
    ] {
        assert!(!message.contains(unwanted), "{title}: {message}");
    }
}
