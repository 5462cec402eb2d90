//! A run that is killed repeatedly ends like an undisturbed run.

use std::fs;
use std::process::Child;
use std::time::{Duration, Instant};

use crate::support::{Run, config};

const RANKS: usize = 2;

/// Number of processes killed.
const KILLS: usize = 200;

/// Number of steps: enough for that many kills.
const STEPS: u64 = 12_000;

/// Longest duration of the whole soak; a hang takes longer.
const LIMIT: Duration = Duration::from_secs(3000);

/// Returns a pseudo-random number for `counter`, so that every soak is alike, as far as the machine allows.
fn random(counter: u64) -> u64 {
    let mut value = counter.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x1234_5678);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

/// Returns the process ids of a launcher's living ranks.
fn ranks_of(launcher: &Child) -> Vec<u32> {
    let path = format!("/proc/{0}/task/{0}/children", launcher.id());
    let text = fs::read_to_string(path).unwrap_or_default();
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

#[test]
#[ignore = "takes a quarter of an hour: cargo test --release -p kiln --test faults -- --ignored soak"]
fn soak() {
    config();
    let steps = format!("train.steps={STEPS}");
    let sets = ["--set", &steps, "--set", "checkpoint.every=5", "--set", "comm.timeout_s=30"];
    let run = Run::new();
    let restarts = (2 * KILLS).to_string();
    let mut launcher = run
        .launcher(RANKS, &["--max-restarts", &restarts], &sets)
        .stdout(std::process::Stdio::null())
        .stderr(std::process::Stdio::null())
        .spawn()
        .expect("kiln starts");
    let started = Instant::now();
    let mut kills = 0;
    let code = loop {
        if let Some(status) = launcher.try_wait().expect("the launcher's state") {
            break status.code();
        }
        assert!(started.elapsed() < LIMIT, "{kills} kills in {:?}", started.elapsed());
        // Kills at any time between the start of a life and some steps and a checkpoint later.
        let pause = random(kills as u64) % 2000;
        std::thread::sleep(Duration::from_millis(pause + 50));
        let ranks = ranks_of(&launcher);
        if kills < KILLS && !ranks.is_empty() {
            let victim = ranks[random(1000 + kills as u64) as usize % ranks.len()];
            let status = std::process::Command::new("kill").args(["-9", &victim.to_string()]).status();
            kills += usize::from(status.is_ok_and(|status| status.success()));
            if kills.is_multiple_of(20) {
                eprintln!("{kills} kills, step {:?}", run.losses().keys().last());
            }
        }
    };
    eprintln!("{kills} kills, {:?}", started.elapsed());
    assert_eq!(code, Some(0));
    assert_eq!(kills, KILLS, "the run ended before it had been killed often enough");
    let calm = Run::new();
    let ended = calm.train_alone(RANKS, &sets);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(run.losses(), calm.losses());
    assert_eq!(run.losses().len() as u64, STEPS);
}
