//! `kiln warmup` on stand-ins for NVIDIA's libraries, as `benches/trace.sh` sets them up.

use crate::support::{Workspace, names};

/// A run after a warm-up compiles nothing, neither here nor where the kernels were carried to.
#[test]
#[ignore = "benches/trace.sh"]
fn a_run_after_a_warm_up_compiles_nothing() {
    let workspace = Workspace::new();
    let changes = [
        ("train.nonfinite", "'skip'"),
        ("model.dropout", "0.1"),
        ("model.window", "4"),
        ("model.window_pattern", "'fw'"),
        ("model.layers", "6"),
        ("sample.prompt", "'ab'"),
        ("device.backend", "'cuda'"),
        ("device.verify_kernels", "false"),
    ];
    workspace.config("run.toml", &changes);
    workspace.replace("run.toml", "threads = 1\n", "");
    let said = |cache: &str, arguments: &[&str]| {
        let mut command = workspace.command(arguments);
        command.env("XDG_CACHE_HOME", workspace.path(cache)).env_remove("FAKE_CUDA_PTX_DIR");
        let ended = workspace.end(command.spawn().expect("the binary starts"));
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
        ended.stdout
    };
    let count = |said: &str, before: &str, after: &str| -> usize {
        let is_it = |line: &&str| line.starts_with(before) && line.contains(after);
        let line = said.lines().find(is_it).unwrap_or_else(|| panic!("no {before}…{after} in {said}"));
        let digits = |c: char| !c.is_ascii_digit();
        line[before.len()..].trim_start().split(digits).next().and_then(|n| n.parse().ok()).expect("a number")
    };
    let warm = said("cache", &["warmup", "run.toml", "--pack", "kernels.tar"]);
    let compiled = count(&warm, "warm: 0 kernels from the cache,", " compiled in ");
    assert_eq!(count(&warm, "packed ", " kernels into kernels.tar"), compiled);
    let again = said("cache", &["warmup", "run.toml"]);
    assert_eq!(count(&again, "warm: ", " kernels from the cache, 0 compiled"), compiled);
    let kept = |cache: &str| names(&workspace.path(cache).join("kiln/kernels"));
    let warm = kept("cache");
    let run = said("cache", &["train", "run.toml", "--out", "run"]);
    assert!(count(&run, "", " from the cache, 0 compiled") > 10, "{run}");
    // Nor later than in the first step.
    assert_eq!(kept("cache"), warm);

    let unpacked = said("other", &["warmup", "--unpack", "kernels.tar"]);
    let all_new = format!("unpacked {compiled} kernels, {compiled} of them new, from kernels.tar\n");
    assert_eq!(unpacked, all_new);
    let run = said("other", &["train", "run.toml", "--out", "elsewhere"]);
    assert!(count(&run, "", " from the cache, 0 compiled") > 10, "{run}");
    assert_eq!(kept("other"), warm);
}
