//! Runs that are asked to stop: they save a checkpoint, report the stop by their exit code, and later resume
//! as if nothing had happened.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::thread::sleep;
use std::time::Duration;

use kiln_testkit::wait_until;
use rustix::process::Signal;

use crate::support::{Workspace, assert_same_curve, names, signal};

const PREEMPTED: Option<i32> = Some(75);

/// Returns a workspace for ten steps, on two ranks or four, with every setting that depends on a position in the run.
fn workspace(changes: &[(&str, &str)]) -> Workspace {
    let workspace = Workspace::new();
    let common =
        [("train.steps", "10"), ("train.seed", "7"), ("model.dropout", "0.1"), ("optim.warmup_steps", "3")];
    workspace.config("run.toml", &[&common, changes].concat());
    workspace
}

#[test]
fn a_run_that_is_asked_to_stop_goes_on_to_the_same_bits() {
    let hybrid = [
        ("shard.strategy", "'HYBRID_SHARD'"),
        ("shard.shard_size", "2"),
        ("train.ranks", "4"),
        ("train.micro_batch", "1"),
    ];
    let alone = [("train.ranks", "1"), ("shard.strategy", "'NO_SHARD'")];
    for (changes, asked) in [
        (&hybrid[..], Signal::USR1),
        (&alone[..], Signal::TERM),
        (&alone[..], Signal::XCPU),
        (&[][..], Signal::USR2),
        (&[][..], Signal::INT),
    ] {
        let workspace = workspace(changes);
        workspace.succeed(&["train", "run.toml", "--out", "straight"]);
        // Step 5 is slow enough for the signal to arrive during it.
        let slow = ["train", "run.toml", "--out", "run", "--fault", "slow=4@data:5:0"];
        let child = workspace.start(&slow);
        workspace.wait_for_steps("run", 4);
        signal(&child, asked);
        let ended = workspace.end(child);
        assert_eq!(ended.code, PREEMPTED, "{ended:?}");
        assert_eq!(ended.stderr, "");
        let last = ended.stdout.lines().last().unwrap_or_default();
        let steps = workspace.steps("run").len();
        assert!((4..10).contains(&steps), "{steps}");
        assert_eq!(
            last,
            format!(
                "stopped on request: {steps} of 10 steps, checkpoint run/checkpoints/fsdp_cpt{steps}; \
                 resume with: kiln train --resume run"
            )
        );
        assert_eq!(workspace.checkpoints("run"), [format!("fsdp_cpt{steps}"), "latest".to_owned()]);
        assert!(!workspace.path("run/flight").exists());

        workspace.succeed(&["train", "--resume", "run"]);
        assert_same_curve("all", &workspace.steps("run"), &workspace.steps("straight"), 0.0);
        assert_eq!(workspace.val_loss("run"), workspace.val_loss("straight"));
        let end = |out: &str| workspace.path(out).join("checkpoints/fsdp_cpt10");
        assert_eq!(names(&end("run")), names(&end("straight")));
        for name in names(&end("run")) {
            let same = workspace.read(end("run").join(&name)) == workspace.read(end("straight").join(&name));
            assert!(same, "{name}");
        }
    }
}

#[test]
fn a_request_in_the_last_step_changes_nothing() {
    let workspace = workspace(&[]);
    let slow = ["train", "run.toml", "--out", "run", "--fault", "slow=4@data:10:0"];
    let child = workspace.start(&slow);
    workspace.wait_for_steps("run", 9);
    signal(&child, Signal::USR1);
    let ended = workspace.end(child);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("done: 10 steps"), "{ended:?}");
}

#[test]
fn a_second_request_ends_the_run_at_once() {
    for (asked, name, code) in [
        (Signal::TERM, "SIGTERM", 128 + 15),
        (Signal::INT, "SIGINT", 128 + 2),
        (Signal::HUP, "SIGHUP", 128 + 1),
    ] {
        let workspace = workspace(&[]);
        // Step 3 lasts until the run ends; the script does not keep the run's output open.
        let (script, begun) = (workspace.path("drill.sh"), workspace.path("begun"));
        let text = format!(
            "#!/bin/sh\nexec > /dev/null 2>&1\ntouch {}\nwhile kill -0 $PPID; do sleep 0.01; done\n",
            begun.display()
        );
        fs::write(&script, text).expect("a script");
        fs::set_permissions(&script, fs::Permissions::from_mode(0o755)).expect("it can be run");
        let drill = format!("run={}@data:3:1", script.display());
        let slow = ["train", "run.toml", "--out", "run", "--fault", &drill];
        let slow = [&slow[..], &["--set", "checkpoint.every=2", "--set", "checkpoint.async=false"]];
        let mut child = workspace.start(&slow.concat());
        workspace.wait_for_steps("run", 2);
        wait_until("step 3", || begun.exists());
        // `timeout` sends its signal to the process and then to its group.
        signal(&child, asked);
        sleep(Duration::from_millis(20));
        signal(&child, asked);
        // A signal after this pause counts as a second request.
        sleep(Duration::from_millis(1200));
        let status = child.try_wait().expect("a child");
        assert!(status.is_none(), "{asked:?}: the first request lets it finish its step");
        signal(&child, asked);
        let ended = workspace.end(child);
        assert_eq!(ended.code, Some(code), "{asked:?}");
        let says =
            format!("kiln: ended at once by a second {name} in step 3: nothing was saved since step 2\n");
        assert_eq!(ended.stderr, says);
        assert_eq!(workspace.steps("run").len(), 2);
    }
}
