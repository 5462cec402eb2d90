//! The planned memory of a run, compared with its actual use and with the available memory.

use std::path::Path;
use std::process::Child;
use std::time::{Duration, Instant};

use serde_json::Value;

use crate::messages::Messages;
use crate::support::{Ended, VOCAB, Workspace, example};

/// Returns the planned bytes and the actual bytes of a rank, from the summary of a run.
fn planned_and_taken(workspace: &Workspace, arguments: &[&str]) -> (f64, f64) {
    let said = workspace.succeed(arguments);
    let line = said.lines().find(|line| line.starts_with("memory of a rank "));
    let line = line.unwrap_or_else(|| panic!("no line about memory: {said}"));
    let mut sizes = line.split_whitespace().filter_map(|word| word.parse::<f64>().ok());
    let [taken, planned] = [(); 2].map(|()| sizes.next().unwrap_or_else(|| panic!("{line}")));
    (planned, taken)
}

/// Runs print planned and actual memory. The plan is within 5 % of the actual memory, and at most 2 % too low.
/// `--test memory planned` tests the calculation itself.
#[test]
fn runs_take_what_was_planned() {
    let check = |name: &str, (planned, taken): (f64, f64)| {
        let difference = planned / taken - 1.0;
        println!("{name}: {taken} MiB, {planned} planned, {:+.2} %", 100.0 * difference);
        // Both are read from the summary, which has one decimal.
        assert!((-0.02..0.05).contains(&difference), "{name}: {taken} and {planned}");
    };
    let model =
        [("model.d_model", "192"), ("model.d_ff", "512"), ("model.layers", "5"), ("data.seq_len", "48")];
    for strategy in ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"] {
        for recompute in ["'none'", "'block'"] {
            for processes in [false, true] {
                let workspace = Workspace::new();
                let name = format!("'{strategy}'");
                let changes = [("shard.strategy", name.as_str()), ("shard.recompute", recompute)];
                workspace.config("run.toml", &[&model[..], &changes].concat());
                let train = ["train", "run.toml", "--out", "run"];
                let arguments = match processes {
                    true => [&["launch", "--nproc-per-node", "2", "--"][..], &train].concat(),
                    false => [&train[..], &["--ranks", "2"]].concat(),
                };
                let name = format!("{strategy} {recompute}, processes: {processes}");
                let (planned, taken) = planned_and_taken(&workspace, &arguments);
                check(&name, (planned, taken));
                // Before the run, `kiln plan` predicts the same.
                let mut arguments = vec!["plan", "run.toml", "--ranks", "2", "--json"];
                arguments.extend(processes.then_some("--processes"));
                let plan: Value = serde_json::from_str(&workspace.succeed(&arguments)).expect("JSON");
                let is = |row: &&Value| {
                    row["strategy"] == strategy && row["recompute"] == recompute.trim_matches('\'')
                };
                let row = plan["rows"].as_array().and_then(|rows| rows.iter().find(is)).expect("a row");
                let mib = row["peak_bytes"].as_f64().expect("bytes") / f64::from(1 << 20);
                assert!((mib - planned).abs() < 0.06, "{name}: {mib} MiB, {planned} said by the run");
            }
        }
    }
    for changes in [
        &[("precision.compute", "'bf16'")][..],
        &[("train.ranks", "1"), ("shard.communicate_alone", "true")],
        &[("shard.reshard", "'always'"), ("model.tie_embeddings", "false")],
        &[("shard.reshard", "'never'")],
        &[("train.freeze", "['embed_tokens.', 'layers.0.', 'layers.2.']")],
        &[("train.freeze", "['layers.']"), ("shard.recompute", "'block'")],
    ] {
        let workspace = Workspace::new();
        workspace.config("run.toml", &[&model[..], changes].concat());
        let arguments = ["train", "run.toml", "--out", "run"];
        check(&format!("{changes:?}"), planned_and_taken(&workspace, &arguments));
    }
}

/// A rank's peak counts its own allocations only, not those for measuring the processor's peak or preparing
/// data in the same process.
#[test]
fn what_prepares_a_run_is_no_rank_s() {
    let workspace = Workspace::new();
    let words: Vec<_> =
        (0..20_000u32).map(|i| format!("{:x}", i.wrapping_mul(2_654_435_761) >> 12)).collect();
    workspace.write("text.txt", words.join(" "));
    workspace.config(
        "run.toml",
        &[("data.path", "'prepared'"), ("data.text", "['text.txt']"), ("data.vocab_size", "400")],
    );
    workspace.replace("run.toml", "peak_tflops = 1.0\n", "");
    let mut command = workspace.command(&["train", "run.toml", "--out", "run"]);
    let ended = workspace.end(command.env("XDG_CACHE_HOME", workspace.path("cache")).spawn().expect("a run"));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    let steps = workspace.metrics("run");
    let taken = steps.iter().filter_map(|line| line["peak_bytes"].as_u64()).max().expect("a peak");
    let plan: Value =
        serde_json::from_str(&workspace.succeed(&["plan", "run.toml", "--json"])).expect("JSON");
    let planned = plan["rows"][0]["peak_bytes"].as_u64().expect("bytes");
    // Some KiB of a tiny run are not tensors: lines of the log, buffers of files.
    assert!(taken < planned + (64 << 10), "{taken} bytes, {planned} were planned");
}

/// Runs of impossible sizes are refused. `device.memory` replaces the size of the machine's memory.
#[test]
fn runs_that_cannot_fit_are_refused() {
    let mut messages = Messages::default();
    let workspace = Workspace::new();
    let refused = |messages: &mut Messages, title: &str, memory: &str, changes: &[(&str, &str)]| {
        workspace.config("run.toml", &[changes, &[("device.memory", memory)]].concat());
        messages.refused(title, &workspace, &["train", "run.toml", "--out", "run"]);
    };
    let large = [("model.d_model", "4096"), ("model.d_ff", "11008"), ("model.layers", "32")];
    refused(&mut messages, "a large model", "'64GiB'", &large);
    let replicated = [&large[..], &[("shard.strategy", "'NO_SHARD'")]].concat();
    refused(&mut messages, "a large model, replicated", "'64GiB'", &replicated);
    refused(
        &mut messages,
        "a large micro-batch",
        "'1.5 GB'",
        &[("train.micro_batch", "1000000"), ("train.global_batch", "4000000")],
    );
    refused(&mut messages, "a size of nothing", "'1B'", &[]);
    // The size is checked before the missing data is noticed.
    refused(&mut messages, "no data either", "'64GiB'", &[&large[..], &[("data.path", "'none'")]].concat());
    // Numbers that overflow.
    let most = "9000000000000000000";
    refused(&mut messages, "a mistyped number", "'64GiB'", &[("model.layers", most)]);
    refused(
        &mut messages,
        "several mistyped numbers",
        "'64GiB'",
        &[("model.d_ff", most), ("model.vocab_size", most)],
    );
    workspace.config("run.toml", &[]);
    let arguments = ["train", "run.toml", "--out", "run", "--set", "device.memory=64"];
    messages.refused("a size without a unit", &workspace, &arguments);
    let arguments = ["train", "run.toml", "--out", "run", "--set", "device.memory=much"];
    messages.refused("no size", &workspace, &arguments);
    let bench = ["bench", "strategies", "run.toml", "--ranks", "2"];
    workspace.config("run.toml", &[("device.memory", "'1KB'")]);
    messages.refused("a benchmark", &workspace, &bench);
    insta::assert_snapshot!(messages.finish());

    workspace.config("run.toml", &[("device.memory", "'1GiB'")]);
    workspace.succeed(&["train", "run.toml", "--out", "run"]);
}

/// Where the preset fits, it is refused because its data has not been prepared.
#[test]
fn the_largest_preset_is_refused_where_it_cannot_fit() {
    let path = crate::presets::folder().join("7b.toml");
    let workspace = Workspace::new();
    let config = path.to_str().expect("UTF-8");
    for (memory, fits) in [("64GiB", false), ("200GiB", true)] {
        let memory = format!("device.memory={memory}");
        let ended = workspace.kiln(&["train", config, "--out", "run", "--set", &memory]);
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert_eq!(!ended.stderr.contains("error: this run takes 1"), fits, "{ended:?}");
    }
}

/// The first fix in a refusal makes the run fit.
#[test]
fn the_first_mend_works() {
    let vocab_size = VOCAB.to_string();
    let model = [
        ("model.d_model", "384"),
        ("model.d_ff", "1024"),
        ("model.layers", "4"),
        ("data.seq_len", "64"),
        ("train.steps", "1"),
        ("optim.warmup_steps", "0"),
        ("data.vocab_size", vocab_size.as_str()),
    ];
    // Processors have different bf16 instructions, so matrix products take different amounts of memory.
    let run = |workspace: &Workspace, arguments: &[&str]| {
        let mut command = workspace.command(arguments);
        workspace.end(command.env("KILN_BF16", "none").spawn().expect("the binary starts"))
    };
    let strategy = |name| ("shard.strategy", name);
    let (full, grad_op, none) =
        (strategy("'FULL_SHARD'"), strategy("'SHARD_GRAD_OP'"), strategy("'NO_SHARD'"));
    let batch = |micro, global| [("train.micro_batch", micro), ("train.global_batch", global)];
    // Each case has a different largest part: activations, weights and state, or gradients of earlier micro-batches.
    for (changes, batch) in [
        (&[full][..], batch("16", "32")),
        (&[full], batch("8", "32")),
        (&[full], batch("2", "32")),
        (&[full, ("model.tie_embeddings", "false")], batch("8", "16")),
        (&[full, ("train.ranks", "4")], batch("4", "32")),
        (&[grad_op], batch("4", "8")),
        (&[grad_op], batch("8", "32")),
        (&[grad_op], batch("16", "32")),
        (&[none], batch("1", "8")),
        (&[none], batch("4", "8")),
        (&[none, ("train.ranks", "4")], batch("2", "16")),
        (&[none], batch("16", "32")),
    ] {
        let workspace = Workspace::new();
        let train = ["train", "run.toml", "--out", "run"];
        let refused = |memory: &str| {
            let size = format!("'{memory}'");
            let memory = [("device.memory", size.as_str())];
            workspace.config("run.toml", &[&model[..], changes, &batch, &memory].concat());
            let ended = run(&workspace, &train);
            assert_eq!(ended.code, Some(2), "{changes:?} {batch:?}: {ended:?}");
            ended.stderr
        };
        let needs = refused("1KB");
        let needed = needs.split_once("this run takes ").and_then(|(_, size)| size.split_once(" MiB"));
        let needed: f64 = needed.and_then(|(size, _)| size.parse().ok()).expect("a size in MiB");
        let said = refused(&format!("{:.0}MiB", 0.9 * needed));
        let mend = said.lines().find_map(|line| line.trim().split_once(": takes "));
        let (mend, _) = mend.unwrap_or_else(|| panic!("no fix: {said}"));
        println!("{changes:?} {batch:?}: {mend}");
        let mend: Vec<_> = mend.split_whitespace().collect();
        let ended = run(&workspace, &[&train[..], &mend].concat());
        assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{changes:?} {batch:?}: {mend:?}");
    }
}

/// A refusal predicts the right size for each fix, even if the sequence length determines the micro-batch.
#[test]
fn mends_come_to_what_they_say() {
    let workspace = Workspace::new();
    let changes = [
        ("model.d_model", "384"),
        ("model.d_ff", "1024"),
        ("data.seq_len", "256"),
        ("train.micro_batch", "'auto'"),
        ("train.global_batch", "16"),
        ("shard.recompute", "'block'"),
        ("device.memory", "'1KB'"),
    ];
    workspace.config("run.toml", &changes);
    let train = ["train", "run.toml", "--out", "run"];
    let refused = |mend: &[&str]| {
        let ended = workspace.kiln(&[&train[..], mend].concat());
        assert_eq!(ended.code, Some(2), "{ended:?}");
        ended.stderr
    };
    let said = refused(&[]);
    let mends: Vec<_> = said.lines().filter_map(|line| line.trim().split_once(": takes ")).collect();
    let names = |key: &str| mends.iter().any(|(mend, _)| mend.contains(key));
    assert!(names("data.seq_len=128 ") && names("--set train.micro_batch=4"), "{said}");
    for (mend, comes_to) in &mends {
        let (takes, _) = comes_to.split_once(", saves ").expect("what it saves");
        let mended = refused(&mend.split_whitespace().collect::<Vec<_>>());
        assert!(
            mended.contains(&format!("this run takes {takes} of memory")),
            "{mend}: {takes}, and {mended}"
        );
    }
}

/// `auto` takes the least recomputation that is planned to leave 5 % of the memory free.
#[test]
fn auto_recomputes_what_does_not_fit() {
    let workspace = Workspace::new();
    let large = [
        ("model.d_model", "128"),
        ("model.d_ff", "384"),
        ("model.layers", "8"),
        ("data.seq_len", "128"),
        ("train.ranks", "1"),
        ("train.global_batch", "8"),
        ("train.micro_batch", "8"),
    ];
    workspace.config("run.toml", &large);
    let plan = ["plan", "run.toml", "--ranks", "1", "--json"];
    let plan: Value = serde_json::from_str(&workspace.succeed(&plan)).expect("JSON");
    let needed = |recompute: &str| {
        let rows = plan["rows"].as_array().expect("rows");
        let row = rows.iter().find(|row| row["strategy"] == "NO_SHARD" && row["recompute"] == recompute);
        row.and_then(|row| row["needed_bytes"].as_u64()).unwrap_or_else(|| panic!("no {recompute}: {plan}"))
    };
    let [none, selective, block] = ["none", "selective", "block"].map(needed);
    assert!(block < selective && selective < none, "{block}, {selective}, {none}");
    for (fits, expected) in [(none, "none"), (selective, "selective"), (block, "block")] {
        // A little more than the plan and its margin.
        let memory = format!("device.memory={}B", (fits as f64 / 0.95 * 1.002) as u64);
        let arguments =
            ["train", "run.toml", "--set", "shard.strategy=NO_SHARD", "--set", "shard.recompute=auto"];
        let out = ["--set", "train.steps=1", "--out", expected, "--set", &memory];
        let said = workspace.succeed(&[&arguments[..], &out].concat());
        let line = format!("shard.recompute = \"{expected}\"");
        assert!(said.contains(&line), "{said}");
        assert!(
            workspace
                .text(format!("{expected}/config.toml"))
                .contains(&format!("recompute = \"{expected}\""))
        );
    }
}

/// If a plan is wrong, or another program uses memory, the run ends with a list of what holds most of the memory.
#[test]
fn who_holds_how_much_is_told_at_the_end() {
    let workspace = Workspace::new();
    workspace.config("run.toml", &[("model.d_model", "128"), ("model.d_ff", "384"), ("train.ranks", "1")]);
    for (phase, owner) in [
        ("forward", "weights"),
        ("backward", "gradients"),
        ("optimizer", "optimizer state"),
        ("data", "activations"),
    ] {
        let fault = format!("memory=1MiB@{phase}:2:0");
        let out = format!("out-{phase}");
        let arguments = ["train", "run.toml", "--out", &out, "--fault", &fault, "--ranks", "2"];
        let ended = workspace.kiln(&arguments);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        for part in
            ["error: out of memory: rank ", "may hold 1.0 MiB", owner, "What would help:", "out-of-memory"]
        {
            assert!(ended.stderr.contains(part), "{phase}: no {part}: {ended:?}");
        }
    }
    let processes = ["launch", "--nproc-per-node", "2", "--", "train", "run.toml", "--out", "processes"];
    let ended = workspace.kiln(&[&processes[..], &["--fault", "memory=1MiB@forward:2:1"]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("error: out of memory: rank 1 asks for"), "{ended:?}");
}

/// Waits for the end of `child`, for at most two minutes.
fn end_in_time(workspace: &Workspace, mut child: Child, what: &str) -> Ended {
    let begun = Instant::now();
    while child.try_wait().expect("a child").is_none() {
        if begun.elapsed() > Duration::from_secs(120) {
            child.kill().expect("it is there");
            panic!("{what} hangs: {:?}", workspace.end(child));
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    workspace.end(child)
}

/// Runs with an address space limited to `kib` KiB, and returns how the run ends.
fn with_address_space(workspace: &Workspace, kib: u64) -> Ended {
    let limited = "ulimit -v \"$0\"; exec \"$@\"";
    let limit = kib.to_string();
    let train = ["train", "run.toml", "--out", "limited", "--ranks", "2"];
    let arguments = [&["-c", limited, &limit, crate::PROGRAM][..], &train].concat();
    let child = workspace.command_of(Path::new("sh"), &arguments).spawn().expect("a shell");
    let ended = end_in_time(workspace, child, &format!("a run with {kib} KiB of address space"));
    if workspace.path("limited").exists() {
        workspace.remove("limited");
    }
    ended
}

/// A panic without free memory is reported without allocating, and without the lock that the standard library
/// holds while it resolves a backtrace.
#[test]
fn a_panic_without_memory_ends_the_run() {
    let workspace = Workspace::new();
    let train = ["train", "run.toml", "--ranks", "2", "--set", "model.feed_forward=mine", "--out", "run"];
    for left in [0].into_iter().chain((9..20).map(|power| 1_usize << power)) {
        let mut command = workspace.command_of(&example("planted"), &train);
        command.env("PLANTED", format!("exhausted:{left}"));
        let child = command.spawn().expect("the program starts");
        let ended = end_in_time(&workspace, child, &format!("a panic with {left} bytes left"));
        assert!([Some(1), None].contains(&ended.code), "{left}: {ended:?}");
        let reports: Vec<_> = crate::support::names(&workspace.path("run/crash"))
            .iter()
            .map(|folder| workspace.text(format!("run/crash/{folder}/crash.txt")))
            .collect();
        let what =
            |report: &String| report.contains("without memory") || report.contains("no memory to report");
        assert!(reports.iter().any(what), "{left}: {reports:?} {ended:?}");
        let is_told =
            |report: &String| report.contains("out of memory: rank ") || report.contains("backtrace");
        assert!(reports.iter().any(is_told), "{left}: {reports:?}");
        workspace.remove("run");
    }
}

/// Wherever memory runs out, the run ends: code that reports it must wait neither for memory nor for a lock.
#[test]
fn a_run_without_memory_ends() {
    let workspace = Workspace::new();
    // Limits between the lowest at which the program starts at all and the lowest at which it can train.
    let mut enough = 32 << 10;
    while with_address_space(&workspace, enough).code != Some(0) {
        enough *= 2;
        assert!(enough < 64 << 20, "it does not train with 64 GiB of address space");
    }
    const STARTS: u64 = 24;
    let mut ends = std::collections::BTreeMap::<_, usize>::new();
    for start in 0..STARTS {
        let kib = enough / 2 + enough / 2 * start / STARTS;
        let Ended { code, stderr, .. } = with_address_space(&workspace, kib);
        *ends.entry(code).or_default() += 1;
        // The run may be refused, fail, be aborted by the standard library, or succeed after all.
        assert!([Some(0), Some(1), Some(2), None].contains(&code), "{kib} KiB: {code:?} {stderr}");
    }
    println!("{enough} KiB are enough; exit codes with less: {ends:?}");
    assert!(ends.iter().any(|(code, _)| *code != Some(0)), "no start was short of memory");
}

/// The limits of a process are checked before a run starts.
#[test]
fn a_run_that_cannot_fit_into_its_address_space_is_refused() {
    let workspace = Workspace::new();
    let large = [("model.d_model", "2048"), ("model.d_ff", "8192"), ("model.layers", "16")];
    workspace.config("run.toml", &large);
    let ended = with_address_space(&workspace, 4 << 20);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(
        ended.stderr.contains("of memory, and the address space of this process (ulimit -v) has "),
        "{ended:?}"
    );
    assert!(ended.stderr.contains("What would help:"), "{ended:?}");
}
