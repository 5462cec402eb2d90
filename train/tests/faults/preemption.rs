//! Processes that are asked to stop save at a step boundary, all of them, and go on later.

use std::process::{Child, Command};
use std::time::{Duration, Instant};

use crate::support::{Ended, Run, config, undisturbed};

const RANKS: usize = 2;

/// Longer than anything here takes.
const PATIENCE: Duration = Duration::from_secs(60);

fn wait_for_step(run: &Run, step: u64) {
    let start = Instant::now();
    while run.losses().keys().all(|known| *known < step) {
        assert!(start.elapsed() < PATIENCE, "step {step} did not come");
        std::thread::sleep(Duration::from_millis(10));
    }
}

fn signal(name: &str, process: &Child) {
    let status = Command::new("kill").args(["-s", name, &process.id().to_string()]).status();
    assert!(status.expect("kill").success());
}

#[test]
fn a_job_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bits() {
    config();
    for name in ["USR1", "TERM"] {
        let run = Run::new();
        // Rank 1 is late in step 4, so that the signal comes while the others wait for it.
        let slow = ["--fault", "slow=2@data:4:1"];
        let launcher =
            run.launcher(RANKS, &["--grace-s", "30"], &slow).spawn().expect("kiln starts");
        wait_for_step(&run, 3);
        signal(name, &launcher);
        let ended: Ended = launcher.wait_with_output().expect("an end").into();
        assert_eq!(ended.code, Some(75), "{name}: {ended:?}");
        let saved = run.check_checkpoints();
        let last = run.losses().keys().last().copied();
        assert_eq!(saved.last().copied(), last, "{name}");
        assert!(last < Some(crate::support::STEPS), "{name}: it ran to its end");
        let ended = run.launch(RANKS, &[], &["--resume", "latest"]);
        assert_eq!(ended.code, Some(0), "{name}: {ended:?}");
        assert_eq!(run.losses(), undisturbed(RANKS), "{name}");
        assert_eq!(run.orphans(), Vec::<String>::new());
    }
}
