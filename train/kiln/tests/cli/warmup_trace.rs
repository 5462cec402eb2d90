//! `kiln warmup` with the stand-ins for NVIDIA's libraries that `benches/trace.sh` sets up.

use std::path::Path;

use crate::support::{Workspace, names};

/// Returns the names of kernels in `after` that are not in the sorted `before`, without their final hash; `folder`
/// holds the kernels.
fn new_kernels(folder: &Path, before: &[String], after: &[String]) -> Vec<String> {
    let entry = |file: &String| {
        let bytes = std::fs::read(folder.join(file)).expect("a kernel");
        let text = String::from_utf8_lossy(&bytes);
        let name = text.split(".entry ").nth(1).and_then(|rest| rest.split('(').next());
        let name = name.unwrap_or_else(|| panic!("no kernel in {file}"));
        name.rsplit_once('_').map_or(name, |(name, _)| name).to_owned()
    };
    after.iter().filter(|file| before.binary_search(file).is_err()).map(entry).collect()
}

/// After a warm-up, a run of a model without experts compiles nothing, on this machine or where the kernels were
/// copied to.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn a_run_after_a_warm_up_compiles_nothing() {
    compiles_nothing(&[
        ("model.dropout", "0.1"),
        ("model.window", "4"),
        ("model.window_pattern", "'fw'"),
        ("model.layers", "6"),
        ("sample.prompt", "'ab'"),
    ]);
    compiles_nothing(&[("model.feed_forward", "'geglu'"), ("model.block", "'parallel_residual'")]);
    compiles_nothing(&[("model.feed_forward", "'squared_relu'")]);
}

fn compiles_nothing(changes: &[(&str, &str)]) {
    let workspace = Workspace::new();
    let on_gpu =
        [("train.nonfinite", "'skip'"), ("device.backend", "'cuda'"), ("device.verify_kernels", "false")];
    workspace.config("run.toml", &[&on_gpu, changes].concat());
    workspace.replace("run.toml", "threads = 1\n", "");
    let said = |cache: &str, arguments: &[&str]| {
        let mut command = workspace.command(arguments);
        command.env("XDG_CACHE_HOME", workspace.path(cache)).env_remove("FAKE_CUDA_PTX_DIR");
        // Loads machine code, as NVIDIA's driver does. If an archive has the machine code of a kernel, it omits
        // the PTX.
        command.env("FAKE_CUDA_CUBIN", "1");
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
    let kept = |cache: &str| names(&workspace.path(cache).join("kiln/kernels"));
    let warm = kept("cache");
    let check = |cache: &str| {
        let new = new_kernels(&workspace.path(cache).join("kiln/kernels"), &warm, &kept(cache));
        assert!(new.is_empty(), "compiled after a warm-up: {new:?}");
    };
    let again = said("cache", &["warmup", "run.toml"]);
    check("cache");
    assert_eq!(count(&again, "warm: ", " kernels from the cache, 0 compiled"), compiled);
    let run = said("cache", &["train", "run.toml", "--out", "run"]);
    check("cache");
    assert!(count(&run, "", " from the cache, 0 compiled") > 10, "{run}");

    let unpacked = said("other", &["warmup", "--unpack", "kernels.tar"]);
    let all_new = format!("unpacked {compiled} kernels, {compiled} of them new, from kernels.tar\n");
    assert_eq!(unpacked, all_new);
    let run = said("other", &["train", "run.toml", "--out", "elsewhere"]);
    check("other");
    assert!(count(&run, "", " from the cache, 0 compiled") > 10, "{run}");
}

/// `--products` measures once which algorithm is the fastest for each product. Runs here, and on a machine that
/// imports the result, use it and report that.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn products_are_measured_once() {
    let workspace = Workspace::new();
    let changes =
        [("train.nonfinite", "'skip'"), ("device.backend", "'cuda'"), ("device.verify_kernels", "false")];
    workspace.config("run.toml", &changes);
    workspace.replace("run.toml", "threads = 1\n", "");
    let said = |cache: &str, arguments: &[&str], slowest: &str| {
        let mut command = workspace.command(arguments);
        command.env("XDG_CACHE_HOME", workspace.path(cache)).env_remove("FAKE_CUDA_PTX_DIR");
        command.env("FAKE_CUBLASLT_SLOWEST", slowest).env("FAKE_CUDA_DEVICES", "2");
        let ended = workspace.end(command.spawn().expect("the binary starts"));
        assert_eq!(ended.code, Some(0), "{arguments:?}: {ended:?}");
        format!("{}{}", ended.stdout, ended.stderr)
    };
    let line = |said: &str, part: &str| -> String {
        said.lines()
            .find(|line| line.contains(part))
            .unwrap_or_else(|| panic!("no {part} in {said}"))
            .to_owned()
    };
    let measured = "of matrix products with algorithms that kiln warmup has measured";
    let plain = said("cache", &["train", "run.toml", "--out", "before"], "3");
    assert!(!plain.contains(measured), "{plain}");

    // The first algorithm takes three times as long as the last.
    let warm = said("cache", &["warmup", "run.toml", "--products", "--pack", "kernels.tar"], "3");
    let told = line(&warm, "measured ");
    let all = "faster than cuBLASLt's first choice, by a median factor of 2.98 and at most 2.98";
    assert!(told.contains(all) && told.ends_with("kept in cache/kiln/kernels"), "{told}");
    let count: usize = told.split(' ').nth(1).and_then(|n| n.parse().ok()).expect("a number");
    assert!(count > 5 && told.contains(&format!("{count} matrix products: {count} faster")), "{told}");

    let run = said("cache", &["train", "run.toml", "--out", "run"], "0");
    let used = line(&run, measured);
    let unpacked = said("other", &["warmup", "--unpack", "kernels.tar"], "0");
    line(&unpacked, &format!("it also contains algorithms for {count} matrix products"));
    let elsewhere = said("other", &["train", "run.toml", "--out", "elsewhere"], "0");
    assert_eq!(line(&elsewhere, measured), used);
    let doctor = said("other", &["doctor"], "0");
    line(&doctor, &format!("products: measured algorithms for {count} products are kept in "));

    // An unreadable file is reported, and cuBLASLt's first choices are used.
    std::fs::write(workspace.path("other").join("kiln/kernels/products.json"), "{").expect("the file");
    let damaged = said("other", &["train", "run.toml", "--out", "damaged"], "0");
    line(&damaged, "cannot read measured algorithms from ");
    assert!(!damaged.contains(measured), "{damaged}");

    // All algorithms are equally fast.
    let even = said("even", &["warmup", "run.toml", "--products"], "0");
    line(&even, "matrix products: cuBLASLt's first choice is the fastest for all; kept in ");

    // Ranks that are processes combine their measurements, and one of the ranks stores the result.
    let launched = ["launch", "--nproc-per-node", "2", "--", "warmup", "run.toml", "--products"];
    let launched = said("launched", &launched, "3");
    let told = format!("measured {count} matrix products: {count} faster");
    assert_eq!(launched.lines().filter(|line| line.contains(&told)).count(), 1, "{launched}");
}
