//! Requests that are refused before any measurement, and a system that starts no more threads.

use crate::messages::Messages;
use crate::support::Workspace;

const MOST: &str = "9223372036854775807";

#[test]
fn what_cannot_be_measured_is_refused() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    let mut refused = |title: &str, arguments: &[&str]| {
        messages.refused(title, &workspace, arguments);
    };
    let step = ["step", "--config", "run.toml"];
    refused("steps", &[&step[..], &["--ranks", "1", "--steps", MOST]].concat());
    refused("too little memory", &[&step[..], &["--set", "device.memory=1KB"]].concat());
    let checkpoint = ["checkpoint", "--folder", "new", "--config", "run.toml"];
    refused("rounds", &[&checkpoint[..], &["--ranks", "2", "--rounds", MOST]].concat());
    insta::assert_snapshot!(messages.finish());
}

/// Rust requests stacks of this size, which no machine has, so that no thread starts.
const NO_THREADS: (&str, &str) = ("RUST_MIN_STACK", "70368744177664");

#[test]
fn no_thread_is_an_error() {
    let workspace = Workspace::new();
    let (name, value) = NO_THREADS;
    let step = ["step", "--config", "run.toml", "--steps", "1"];
    let child = workspace.command(&step).env(name, value).spawn().expect("the binary starts");
    let ended = workspace.end(child);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.starts_with("error: cannot start "), "{ended:?}");
    assert!(!ended.stderr.contains("panicked"), "{ended:?}");
}
