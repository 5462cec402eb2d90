//! Absurd numbers, and a system that cannot start more threads: immediate errors, and no leftovers.

use crate::messages::Messages;
use crate::support::Workspace;

const MOST: &str = "9223372036854775807";

#[test]
fn numbers_beyond_all_bounds_are_refused() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    let train = ["train", "run.toml", "--out", "new"];
    let mut set = |title: &str, values: &[&str]| {
        let values: Vec<_> = values.iter().flat_map(|value| ["--set", value]).collect();
        messages.refused(title, &workspace, &[&train[..], &values].concat());
    };
    set("blocks", &["model.layers=1000000000"]);
    set("width", &["model.d_model=9223372036854775804"]);
    set("vocabulary", &["model.vocab_size=4611686018427387904"]);
    set("width of all heads", &["model.head_dim=9000000"]);
    set("ranks", &["train.ranks=100000", "train.global_batch=200000"]);
    set("more ranks than any job has", &["train.ranks=9000000", "train.global_batch=9000000"]);
    set("threads", &["device.threads=100000"]);
    set("batch", &["train.global_batch=4600000000000000000"]);
    set("micro-batch", &["train.micro_batch=4611686018427387902"]);
    set("steps", &["train.steps=9223372036854775807"]);
    set("tokens of a sequence", &["data.seq_len=9223372036854775807"]);
    set("number that TOML cannot hold", &["train.steps=18446744073709551615"]);
    set("negative number that TOML cannot hold", &["train.seed=-9223372036854775809"]);
    workspace.write("large.toml", "[train]\nsteps = 18446744073709551615\n");
    let large = ["train", "large.toml", "--out", "new"];
    messages.refused("number in a file that TOML cannot hold", &workspace, &large);
    workspace.write("large.toml", "[train]\nsteps = 99999999999999999999999999999999999999999999\n");
    messages.refused("number that nothing can hold", &workspace, &large);
    insta::assert_snapshot!(messages.finish());
}

/// Far more threads than cores block each other until nothing progresses.
#[test]
fn threads_are_bounded_by_the_cores_of_this_machine() {
    let workspace = Workspace::new();
    let train = |threads: usize| {
        let set = format!("device.threads={threads}");
        workspace.kiln(&["train", "run.toml", "--out", "run", "--set", &set])
    };
    // As many threads as a machine with 256 cores may have.
    let many = train(4096);
    let cores = std::thread::available_parallelism().expect("cores").get();
    assert!(cores >= 256 || many.code == Some(2), "{many:?}");
    let Some((_, rest)) = many.stderr.split_once("device.threads = 4096: must be at most ") else {
        assert!(cores >= 256, "{many:?}");
        return;
    };
    assert!(!workspace.path("run").exists());
    let most: usize = rest.split([' ', ',']).next().and_then(|text| text.parse().ok()).expect("a number");
    assert!(most >= 64.max(16 * cores), "{many:?}");
    let refused = train(most + 1);
    assert_eq!(refused.code, Some(2), "{refused:?}");
    let most = train(most);
    assert_eq!(most.code, Some(0), "{most:?}");
}

#[test]
fn ranks_of_every_command_have_bounds() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    let mut refused = |title: &str, arguments: &[&str]| {
        messages.refused(title, &workspace, arguments);
    };
    refused("train", &["train", "run.toml", "--out", "new", "--ranks", "2000"]);
    refused("eval", &["eval", "--checkpoint", "run", "--ranks", MOST]);
    refused("launch", &["launch", "--nproc-per-node", MOST, "--", "train", "run.toml"]);
    refused("convert", &["convert", "--checkpoint", "run", "--out", "new", "--ranks", "9999999999"]);
    let bench = ["bench", "strategies", "run.toml"];
    refused("strategies", &[&bench[..], &["--ranks", "4000000000"]].concat());
    refused("rounds", &[&bench[..], &["--ranks", "1", "--rounds", MOST]].concat());
    insta::assert_snapshot!(messages.finish());
}

/// Makes Rust request stacks of a size that no machine has, so that no thread starts.
const NO_THREADS: (&str, &str) = ("RUST_MIN_STACK", "70368744177664");

#[test]
fn no_thread_is_an_error() {
    let workspace = Workspace::new();
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
    workspace.write("text.txt", "some text, and some more of it\n".repeat(50));
    let measured = ["train", "run.toml", "--out", "new", "--set", "data.text=['text.txt']"];
    for arguments in [
        &["train", "run.toml", "--out", "new"][..],
        &measured,
        &["train", "run.toml", "--out", "new", "--rank=0", "--world-size=1"],
        &["launch", "--", "train", "run.toml", "--out", "new"],
        &["eval", "--checkpoint", "run", "--prompt", "a", "--answer", "b"],
        &["generate", "--checkpoint", "run", "--prompt", "a", "--max-tokens", "1"],
        &["inspect", "--verify", "run"],
        &["convert", "--checkpoint", "run", "--out", "new"],
        &["export", "--checkpoint", "run", "--out", "new"],
        &["data", "prepare", "--input", "text.txt", "--out", "new", "--vocab-size", "300"],
        &["bench", "strategies", "run.toml", "--ranks", "2", "--rounds", "1"],
    ] {
        let (name, value) = NO_THREADS;
        let child = workspace.command(arguments).env(name, value).spawn().expect("kiln starts");
        let ended = workspace.end(child);
        assert_eq!(ended.code, Some(1), "{arguments:?}: {ended:?}");
        assert!(ended.stderr.starts_with("error: cannot start "), "{arguments:?}: {ended:?}");
        assert!(!ended.stderr.contains("panicked"), "{arguments:?}: {ended:?}");
    }
}
