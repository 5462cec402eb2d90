//! The texts that commands print, and the streams they use.

use std::fs::OpenOptions;
use std::process::{Command, Stdio};

use crate::support::Workspace;

/// Returns a stand-in for a file on a full disk.
fn full() -> Stdio {
    OpenOptions::new().write(true).open("/dev/full").expect("/dev/full").into()
}

#[test]
fn output_that_nobody_gets_is_a_failure_where_it_is_the_purpose() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    workspace.write("text.txt", "some text, and some more of it\n".repeat(50));
    for arguments in [
        &["eval", "--checkpoint", "run"][..],
        &["eval", "--checkpoint", "run", "--json"],
        &["generate", "--checkpoint", "run", "--prompt", "a", "--max-tokens", "3"],
        &["inspect", "run"],
        &["replay", "run", "--step", "2"],
        &["inspect", "--verify", "run"],
        &["doctor"],
        &["data", "prepare", "--input", "text.txt", "--out", "new", "--vocab-size", "300"],
        &["convert", "--checkpoint", "run", "--out", "full"],
        &["completions", "bash"],
        &["train", "--help"],
        &["--version"],
    ] {
        let child = workspace.command(arguments).stdout(full()).spawn().expect("kiln starts");
        let ended = workspace.end(child);
        assert_eq!(ended.code, Some(1), "{arguments:?}: {ended:?}");
        assert!(ended.stderr.contains("standard output: No space left"), "{arguments:?}: {ended:?}");
        // A reader that closes the pipe early causes no error.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let again = arguments.iter().map(|argument| match *argument {
            "new" => "newer",
            "full" => "fuller",
            argument => argument,
        });
        let again: Vec<_> = again.collect();
        let child = workspace.command(&again).stdout(writer).spawn().expect("kiln starts");
        let ended = workspace.end(child);
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{again:?}");
    }
    // The error is reported as usual, and the exit code stays the same.
    let child = workspace.command(&["inspect", "none"]).stdout(full()).spawn().expect("kiln starts");
    assert_eq!(workspace.end(child).code, Some(2));
}

#[test]
fn a_log_level_that_is_none_is_refused() {
    let workspace = Workspace::new();
    for (level, code) in [("loud", 2), ("kiln=loud", 2), ("warn,", 2), ("ERROR", 0), ("", 0)] {
        let mut command = workspace.command(&["train", "run.toml", "--out", "run"]);
        let child = command.env("KILN_LOG", level).spawn().expect("kiln starts");
        let ended = workspace.end(child);
        assert_eq!(ended.code, Some(code), "{level}: {ended:?}");
        let refused = format!("error: KILN_LOG={level}: ");
        assert_eq!(ended.stderr.starts_with(&refused), code == 2, "{level}: {ended:?}");
        assert_eq!(ended.stderr.contains("use off, error, warn, info"), code == 2, "{ended:?}");
        assert_eq!(workspace.path("run").exists(), code == 0, "{level}");
        let _ = std::fs::remove_dir_all(workspace.path("run"));
    }
}

#[test]
fn strategies_are_spelt_alike_everywhere() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    for name in ["FULL_SHARD", "full_shard", "Full-Shard", "no-shard", "NO_SHARD"] {
        let folder = format!("run-{name}");
        let set = format!("shard.strategy={name}");
        workspace.succeed(&["train", "run.toml", "--out", &folder, "--set", &set]);
        let eval = ["eval", "--checkpoint", "run", "--ranks", "2", "--strategy", name, "--json"];
        let report: serde_json::Value = serde_json::from_str(&workspace.succeed(&eval)).expect("JSON");
        let canonical = name.to_uppercase().replace('-', "_");
        assert_eq!(report["strategy"], canonical);
        let resolved = workspace.text(format!("{folder}/config.toml"));
        assert!(resolved.contains(&format!("strategy = \"{canonical}\"")), "{resolved}");
    }
}

#[test]
fn the_version_names_commit_and_features() {
    let workspace = Workspace::new();
    let version = workspace.succeed(&["--version"]);
    assert_eq!(workspace.succeed(&["-V"]), version);
    let version = version.trim_end();
    let start = concat!("kiln ", env!("CARGO_PKG_VERSION"), " (commit ");
    let rest = version.strip_prefix(start).expect(version);
    let (commit, features) = rest.split_once("; features: ").expect(version);
    let commit = commit.strip_suffix(", modified").unwrap_or(commit);
    // Outside a repository, the commit is unknown.
    assert!(commit == "unknown" || commit.len() == 12, "{version}");
    let features = features.strip_suffix(')').expect(version);
    for (name, has) in [("cuda", cfg!(feature = "cuda")), ("parquet", cfg!(feature = "parquet"))] {
        assert_eq!(features.split(", ").any(|feature| feature == name), has, "{version}");
    }
    assert_eq!(workspace.succeed(&["doctor", "--json"]).matches(rest).count(), 1);
}

#[test]
fn shells_complete_and_manuals_tell_of_every_command() {
    let workspace = Workspace::new();
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = workspace.succeed(&["completions", shell]);
        assert!(script.contains("allow-missing"), "{shell}");
        workspace.write(shell, script);
    }
    let parsed = Command::new("bash").arg("-n").arg(workspace.path("bash")).status();
    assert!(parsed.expect("bash").success());
    let ended = workspace.kiln(&["completions", "dos"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");

    workspace.succeed(&["man", "--out", "share/man/man1"]);
    for command in ["", "-train", "-launch", "-data-prepare", "-bench-strategies", "-doctor"] {
        let page = workspace.text(format!("share/man/man1/kiln{command}.1"));
        assert!(page.contains(".SH SYNOPSIS"), "{command}: {page}");
    }
    assert!(workspace.text("share/man/man1/kiln-train.1").contains("allow\\-missing"));
    // A file already has this name.
    let ended = workspace.kiln(&["man", "--out", "run.toml"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.starts_with("error: cannot write run.toml"), "{ended:?}");
}

#[test]
fn errors_lead_to_a_page_about_them() {
    let workspace = Workspace::new();
    let list = workspace.succeed(&["explain"]);
    for line in list.lines() {
        let name = line.split_whitespace().next().expect("a name");
        let page = workspace.succeed(&["explain", name]);
        let parts = ["\n\nCause: ", "\n\nCheck: ", "\n\nFix: "];
        let at: Vec<_> = parts.iter().map(|part| page.find(part).expect(name)).collect();
        assert!(page.starts_with(&format!("{name}: ")) && at.is_sorted(), "{page}");
    }
    // The line below the message names a command.
    let ended = workspace.kiln(&["train", "run.toml", "--set", "train.sed=1"]);
    let last = ended.stderr.lines().last().expect("a line");
    let command = last.strip_prefix("more: kiln ").expect(last);
    assert!(workspace.succeed(&command.split(' ').collect::<Vec<_>>()).starts_with("configuration: "));
    let ended = workspace.kiln(&["explain", "out-of-memry"]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("a similar value exists: 'out-of-memory'"), "{ended:?}");
    // Shells complete the names.
    assert!(workspace.succeed(&["completions", "bash"]).contains("checkpoint-damaged"));
    // Errors of the command line itself have no page.
    assert!(!workspace.kiln(&["train"]).stderr.contains("more: "));
}

/// A run prints its header before it loads weights, which takes a minute for a large model.
#[test]
fn a_run_is_introduced_before_its_weights_are_read() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run", "--set", "train.steps=2"]);
    let file = "run/checkpoints/fsdp_cpt2/model-part-00001-of-00002.safetensors";
    let mut damaged = workspace.read(file);
    *damaged.last_mut().expect("a byte") ^= 1;
    workspace.write(file, damaged);
    let ended = workspace.kiln(&["train", "run.toml", "--out", "run", "--resume", "latest"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stdout.contains("\nmodel: 0.01M parameters, "), "{ended:?}");
    let from = ["--set", "init.from=run", "--out", "new"];
    let ended = workspace.kiln(&[&["train", "run.toml"][..], &from].concat());
    assert!(ended.stdout.contains("\nloading the weights of run/checkpoints"), "{ended:?}");
}
