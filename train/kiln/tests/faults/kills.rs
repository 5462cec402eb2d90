//! Runs that are killed while saving: earlier checkpoints stay complete, and the runs resume from them.

use std::fs;
use std::process::{Child, Stdio};
use std::time::{Duration, Instant};

use kiln_testkit::{PATIENCE, status_of, wait_for};

use crate::saving::{WAYS, checkpoints, is_saving, verified};
use crate::support::{Run, config, freeze, kiln, signal};

/// A model whose checkpoint takes a while, saved after every step.
const LARGER: [&str; 10] = [
    "--set",
    "model.d_model=128",
    "--set",
    "model.d_ff=512",
    "--set",
    "checkpoint.every=1",
    "--set",
    "optim.schedule=constant",
    "--set",
    "device.peak_tflops=1.0",
];

/// Returns a pseudo-random number for `counter`.
fn random(counter: u64) -> u64 {
    let mut value = counter.wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_add(0x2468_ace0);
    value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

fn start(run: &Run, sets: &[&str], resume: bool) -> Child {
    let resume: &[&str] = if resume { &["--resume", "latest"] } else { &[] };
    let arguments = run.train_arguments(&[&["--ranks", "2"], sets, resume].concat());
    let mut command = kiln(arguments);
    command.stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("kiln starts")
}

/// Stops a process some microseconds after a save begins. If the save has already ended, the process continues,
/// and the next attempt waits half as long.
fn stop_while_saving(run: &Run, process: &Child, mut micros: u64) {
    loop {
        // Polls without a pause, because a whole save might fit into a pause.
        let started = Instant::now();
        while !is_saving(run) {
            assert!(started.elapsed() < PATIENCE, "no save in {PATIENCE:?}");
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_micros(micros));
        freeze(process);
        if is_saving(run) {
            return;
        }
        signal("CONT", process);
        micros /= 2;
    }
}

/// Kills runs at random moments of a save. After each kill `latest` verifies, no step is lost, and the final
/// losses are those of an undisturbed run.
fn kill_while_saving(kills: u64) {
    config();
    let run = Run::new();
    let mut newest = None;
    for kill in 0..kills {
        let way = WAYS[kill as usize % WAYS.len()];
        if newest.is_none() {
            // The process was killed before its first checkpoint was complete, so there is nothing to resume from.
            let _ = fs::remove_dir_all(run.out());
        }
        let forever = ["--set", "train.steps=1000000"];
        let sets = [&LARGER[..], way, &forever].concat();
        let mut process = start(&run, &sets, newest.is_some());
        // The start removes the leftovers of the previous life; then the first save begins.
        let steps = run.losses().len();
        wait_for("a save", || {
            assert!(process.try_wait().expect("its state").is_none(), "kill {kill}: it ended");
            let logged = run.losses().len();
            let begun = logged > steps && is_saving(&run);
            if begun {
                Ok(())
            } else {
                Err(format!("kill {kill}: {logged} steps after {steps}, and no save"))
            }
        });
        // Lets the run continue for some saves, and then kills it at any point of a save.
        std::thread::sleep(Duration::from_micros(random(1000 + kill) % 1_000_000));
        stop_while_saving(&run, &process, random(kill) % 30_000);
        process.kill().expect("a signal");
        status_of(&mut process);
        assert!(is_saving(&run), "kill {kill}: a save was half done");
        let now = verified(&run);
        assert!(now >= newest, "kill {kill}: step {newest:?} was there, now {now:?}");
        newest = now;
    }
    let last = newest.expect("a checkpoint") + 2;
    eprintln!("{kills} kills, each with a save half done, newest step {newest:?}");
    let steps = format!("train.steps={last}");
    let end = [&LARGER[..], &["--set", &steps]].concat();
    let ended = run.train_alone(2, &[&end[..], &["--resume", "latest"]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(verified(&run), Some(last));
    let left = |entry: &fs::DirEntry| entry.file_name().as_encoded_bytes().starts_with(b".");
    let left: Vec<_> = fs::read_dir(checkpoints(&run)).unwrap().flatten().filter(left).collect();
    assert!(left.is_empty(), "what the kills have left is gone: {left:?}");
    let calm = Run::new();
    let ended = calm.train_alone(2, &end);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(run.losses(), calm.losses());
}

#[test]
fn a_few_kills_while_saving_lose_nothing() {
    kill_while_saving(6);
}

#[test]
#[ignore = "takes minutes: cargo test --release -p kiln --test faults -- --ignored kills"]
fn kills_100_while_saving_lose_nothing() {
    kill_while_saving(100);
}
