//! Checkpoints that are interrupted or cannot be written: earlier checkpoints stay complete.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;

use kiln_testkit::run_to_end;

use crate::support::{Ended, Run, config, end, kiln};

/// The ways of saving.
pub const WAYS: [&[&str]; 3] =
    [&[], &["--set", "checkpoint.async=false"], &["--set", "checkpoint.format=full"]];

pub fn checkpoints(run: &Run) -> PathBuf {
    run.out().join("checkpoints")
}

/// Returns `true` while a checkpoint is being written.
pub fn is_saving(run: &Run) -> bool {
    let entries = fs::read_dir(checkpoints(run)).into_iter().flatten().flatten();
    entries.into_iter().any(|entry| {
        let name = entry.file_name().to_string_lossy().into_owned();
        name.starts_with(".fsdp_cpt") && name.ends_with(".partial")
    })
}

/// Returns the output of `kiln inspect --verify` for a checkpoint or run, every byte of which must be valid.
fn verify(path: &Path) -> String {
    let path = path.display().to_string();
    let ended = Ended::from(run_to_end(&mut kiln(["inspect", "--verify", &path])));
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stdout.contains("all checksums match"), "{ended:?}");
    ended.stdout
}

/// Returns the step of the newest checkpoint; `None` if there is none. Every byte of this checkpoint and all others
/// must be valid.
pub fn verified(run: &Run) -> Option<u64> {
    let latest = checkpoints(run).join("latest");
    let there = fs::read_dir(checkpoints(run)).into_iter().flatten().flatten();
    // Hidden folders are checkpoints being written or removed.
    let is_visible = |path: &PathBuf| {
        path.file_name().is_some_and(|name| name.as_encoded_bytes().starts_with(b"fsdp_cpt"))
    };
    let all: Vec<_> = there.map(|entry| entry.path()).filter(is_visible).collect();
    if !latest.exists() && all.is_empty() {
        return None;
    }
    all.iter().for_each(|checkpoint| drop(verify(checkpoint)));
    let said = verify(&run.out());
    let (_, after) = said.split_once("fsdp_cpt").expect("a step");
    after.split_whitespace().next().and_then(|step| step.parse().ok())
}

/// Returns a run of two steps with a checkpoint of each, and more steps to come.
fn two_steps() -> Run {
    config();
    let run = Run::new();
    let ended = run.train_alone(2, &["--set", "train.steps=2"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(verified(&run), Some(2));
    run
}

/// Runs `before` and then `kiln train --resume latest` in a shell.
fn resumed_in_shell(run: &Run, before: &str, more: &[&str]) -> Ended {
    let arguments = run.train_arguments(&[&["--ranks", "2", "--resume", "latest"], more].concat());
    let mut command = Command::new("sh");
    command.arg("-c").arg(format!("{before}; exec \"$0\" \"$@\"")).arg(env!("CARGO_BIN_EXE_kiln"));
    command.args(arguments);
    run_to_end(&mut command).into()
}

/// As on a full disk: no file may exceed some kilobytes.
#[test]
fn a_checkpoint_that_finds_no_room_leaves_the_others_whole() {
    // The child also ignores the signal, so the write fails instead of killing the process.
    let limit = "trap '' XFSZ; ulimit -f 16";
    let run = two_steps();
    let ended = resumed_in_shell(&run, limit, &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    for part in ["cannot write", ".fsdp_cpt4.partial/model-part-0000", "File too large"] {
        assert!(ended.stderr.contains(part), "{ended:?}");
    }
    assert_eq!(verified(&run), Some(2));
    assert!(!is_saving(&run), "its room is free again");
    // The run ended when it detected the failed save, not at once.
    assert!(run.losses().len() < 8, "{:?}", run.losses());

    // With `continue`, the run trains to its end and reports there that the last save failed.
    let run = two_steps();
    let ended = resumed_in_shell(&run, limit, &["--set", "checkpoint.on_failure=continue"]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("training continues without this checkpoint"), "{ended:?}");
    assert!(ended.stderr.contains("error: cannot write"), "{ended:?}");
    assert_eq!(run.losses().len(), 8, "{:?}", run.losses());
    assert_eq!(verified(&run), Some(2));
    assert!(!is_saving(&run));

    // With enough space, the run resumes as if nothing had happened.
    let ended = run.train_alone(2, &["--resume", "latest"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(verified(&run), Some(8));
}

/// Writes a program for a fault drill to run.
fn script(folder: &Path, text: &str) -> String {
    let path = folder.join("drill.sh");
    fs::write(&path, format!("#!/bin/sh\nset -e\n{text}\n")).expect("a script");
    fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).expect("it can be run");
    path.display().to_string()
}

#[test]
fn a_save_that_fails_is_one_checkpoint_less() {
    for way in WAYS {
        let run = two_steps();
        // A file blocks the path of one checkpoint.
        fs::write(checkpoints(&run).join(".fsdp_cpt4.partial"), "no folder").expect("a file");
        let goes_on = ["--resume", "latest", "--set", "checkpoint.on_failure=continue"];
        let keep = ["--set", "checkpoint.keep=0"];
        let ended = run.train_alone(2, &[&goes_on[..], &keep, way].concat());
        assert_eq!(ended.code, Some(0), "{way:?}: {ended:?}");
        assert!(ended.stderr.contains("cannot remove"), "{way:?}: {ended:?}");
        assert!(ended.stderr.contains(".fsdp_cpt4.partial"), "{way:?}: {ended:?}");
        assert_eq!(run.check_checkpoints(), [2, 6, 8], "{way:?}");
        assert_eq!(verified(&run), Some(8), "{way:?}");
    }
}

#[test]
fn a_folder_that_vanishes_is_made_again_and_one_that_cannot_be_is_an_error() {
    let run = two_steps();
    let place = tempfile::tempdir().expect("a temporary folder");
    let folder = checkpoints(&run).display().to_string();
    let drill = format!("run={}@data:5:0", script(place.path(), &format!("rm -r '{folder}'")));
    // Saves are synchronous, so that the drill does not run during a save and make it fail.
    let resume = ["--resume", "latest", "--set", "checkpoint.async=false", "--fault"];
    let ended = run.train_alone(2, &[&resume[..], &[&drill]].concat());
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(run.check_checkpoints(), [6, 8]);

    let run = two_steps();
    let folder = checkpoints(&run).display().to_string();
    let text = format!("mv '{folder}' '{folder}.away'; echo > '{folder}'");
    let drill = format!("run={}@data:5:0", script(place.path(), &text));
    let ended = run.train_alone(2, &[&resume[..], &[&drill]].concat());
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("checkpoints/.fsdp_cpt"), "{ended:?}");
    fs::remove_file(&folder).expect("the file");
    fs::rename(format!("{folder}.away"), &folder).expect("the folder");
    assert_eq!(verified(&run), Some(4));
}

/// Runs two ranks as processes, each in its own folder, which contains a path to the run folder. Rank 1 sees the
/// folder of every save except that of step `lost`, for which it has another folder, as on machines that do not
/// share a file system. Returns how rank 0 and rank 1 ended.
fn with_a_save_that_is_not_shared(run: &Run, lost: u64, on_failure: &str) -> [Ended; 2] {
    let config = config().display().to_string();
    let other = tempfile::tempdir().expect("a temporary folder");
    let elsewhere = other.path().join("run/checkpoints");
    for step in [2, 4, 6, 8] {
        let name = format!(".fsdp_cpt{step}.partial");
        fs::create_dir_all(&elsewhere).expect("a folder");
        if step == lost {
            fs::create_dir(elsewhere.join(name)).expect("a folder");
        } else {
            symlink(checkpoints(run).join(&name), elsewhere.join(name)).expect("a link");
        }
    }
    let home = run.out().parent().expect("a parent").to_owned();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").expect("a port");
    let port = listener.local_addr().expect("an address").port().to_string();
    drop(listener);
    let on_failure = format!("checkpoint.on_failure={on_failure}");
    // A rank may wait longer for the save than for a collective.
    let sets = ["comm.timeout_s=2", "checkpoint.timeout_s=5", "checkpoint.keep=0", &on_failure];
    let ranks = [(0, &home), (1, &other.path().to_owned())].map(|(rank, folder)| {
        let arguments = ["train", &config, "--out", "run"];
        let mut command = kiln([&arguments[..], &sets.map(|set| ["--set", set]).concat()].concat());
        command.current_dir(folder).env("RANK", rank.to_string()).env("MASTER_PORT", &port);
        for (name, value) in [
            ("LOCAL_RANK", rank.to_string()),
            ("WORLD_SIZE", "2".to_owned()),
            ("LOCAL_WORLD_SIZE", "2".to_owned()),
            ("MASTER_ADDR", "127.0.0.1".to_owned()),
            ("KILN_JOB_SECRET", "between us".to_owned()),
        ] {
            command.env(name, value);
        }
        command.spawn().expect("kiln starts")
    });
    ranks.map(end)
}

#[test]
fn parts_that_are_not_seen_fail_their_save_and_no_more() {
    let missing = "the parts of ranks [1] are not all in run/checkpoints/.fsdp_cpt";
    // Training continues with the earlier and later checkpoints.
    let run = Run::new();
    let ended = with_a_save_that_is_not_shared(&run, 4, "continue");
    for rank in &ended {
        assert_eq!(rank.code, Some(0), "{ended:?}");
    }
    assert!(ended[0].stderr.contains(&format!("{missing}4.partial, 5 s")), "{ended:?}");
    assert!(ended[0].stderr.contains("training continues without this checkpoint"), "{ended:?}");
    assert_eq!(run.losses().len(), 8, "{ended:?}");
    assert_eq!(run.check_checkpoints(), [2, 6, 8]);
    assert_eq!(verified(&run), Some(8));
    assert!(!is_saving(&run), "its room is free again");

    // The last save of a run must succeed.
    let run = Run::new();
    let ended = with_a_save_that_is_not_shared(&run, 8, "continue");
    assert_eq!(ended[0].code, Some(1), "{ended:?}");
    assert!(ended[0].stderr.contains(&format!("error: {missing}8.partial")), "{ended:?}");
    assert_eq!(run.check_checkpoints(), [2, 4, 6]);

    // With `abort`, the run ends and reports the reason.
    let run = Run::new();
    let ended = with_a_save_that_is_not_shared(&run, 4, "abort");
    assert_eq!(ended[0].code, Some(1), "{ended:?}");
    assert!(ended[0].stderr.contains(&format!("error: {missing}4.partial")), "{ended:?}");
    assert_eq!(verified(&run), Some(2));
    assert!(!is_saving(&run));
}

/// The disk never accepts rank 1's data: rank 1 waits for a reader of the FIFO that replaces its file.
#[test]
fn a_rank_that_gets_nothing_written_fails_its_save_and_no_more() {
    config();
    let place = tempfile::tempdir().expect("a temporary folder");
    let run_with = |run: &Run, on_failure: &str| {
        let folder = checkpoints(run).join(".fsdp_cpt2.partial").display().to_string();
        // At rank 0's first collective of the first save, the folder exists and no rank writes yet.
        let hang = format!("mkfifo '{folder}/model-part-00002-of-00002.safetensors'");
        let drill = format!("run={}@checkpoint:2:0", script(place.path(), &hang));
        let on_failure = format!("checkpoint.on_failure={on_failure}");
        let sets = ["comm.timeout_s=2", "checkpoint.timeout_s=3", "checkpoint.keep=0", &on_failure];
        run.train_alone(2, &[&sets.map(|set| ["--set", set]).concat()[..], &["--fault", &drill]].concat())
    };
    let said = "nothing has been written to";
    let run = Run::new();
    let ended = run_with(&run, "continue");
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains(said) && ended.stderr.contains("continues without"), "{ended:?}");
    assert_eq!(run.check_checkpoints(), [4, 6, 8]);
    assert_eq!(verified(&run), Some(8));
    assert!(!is_saving(&run), "its room is free again");

    let run = Run::new();
    let ended = run_with(&run, "abort");
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains(said) && ended.stderr.contains("error: "), "{ended:?}");
    assert_eq!(verified(&run), None);
    assert!(!is_saving(&run));
}

/// Runs with a file system of a megabyte in a private mount namespace.
fn on_small_disk(run: &Run, script: &str) -> Ended {
    fs::create_dir_all(run.out()).expect("a folder");
    let out = run.out().display().to_string();
    let kiln = env!("CARGO_BIN_EXE_kiln");
    let train = run.train_arguments(&["--ranks", "2", "--set", "checkpoint.keep=0"]);
    let train: Vec<_> = train.iter().map(|argument| format!("'{argument}'")).collect();
    let text = format!(
        "set -e\nmount -t tmpfs -o size=3m tmpfs '{out}'\nOUT='{out}'\nkiln() {{ '{kiln}' \"$@\"; }}\n\
         train() {{ kiln {} \"$@\"; }}\n{script}",
        train.join(" ")
    );
    let mut command = Command::new("unshare");
    command.args(["--map-root-user", "--mount", "sh", "-c", &text]);
    run_to_end(&mut command).into()
}

#[test]
#[ignore = "needs user and mount namespaces: cargo test --release -p kiln --test faults -- --ignored disk"]
fn disk_that_is_full_or_read_only() {
    config();
    let place = tempfile::tempdir().expect("a temporary folder");
    // The disk is full: the run ends with an error, and earlier checkpoints stay complete.
    let run = Run::new();
    let ended = on_small_disk(
        &run,
        "train --set train.steps=2\n\
         dd if=/dev/zero of=$OUT/filler bs=1k status=none || true\n\
         ! train --resume latest --set train.steps=3 || exit 3\n\
         kiln inspect --verify $OUT\n\
         rm $OUT/filler\n\
         train --resume latest --set train.steps=4\n\
         kiln inspect --verify $OUT",
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("No space left on device"), "{ended:?}");
    assert!(ended.stdout.contains("fsdp_cpt2 is intact"), "{ended:?}");
    assert!(ended.stdout.contains("fsdp_cpt4 is intact"), "{ended:?}");

    // The disk is full for a while: with `continue`, training goes on, and saves again once there is space.
    let run = Run::new();
    let free = script(place.path(), &format!("rm '{}/filler'", run.out().display()));
    let ended = on_small_disk(
        &run,
        &format!(
            "train --set train.steps=2\n\
             dd if=/dev/zero of=$OUT/filler bs=1k status=none || true\n\
             truncate -s -64k $OUT/filler\n\
             train --resume latest --set checkpoint.on_failure=continue --fault run={free}@data:7:0\n\
             kiln inspect --verify $OUT\n\
             ls $OUT/checkpoints"
        ),
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("training continues without this checkpoint"), "{ended:?}");
    assert!(ended.stdout.contains("fsdp_cpt8 is intact"), "{ended:?}");
    assert!(!ended.stdout.contains("fsdp_cpt4\n"), "{ended:?}");

    // The disk becomes read-only during the run.
    let run = Run::new();
    let folder = checkpoints(&run).display().to_string();
    let text = format!("mount --bind '{folder}' '{folder}'\nmount -o remount,bind,ro '{folder}'");
    let read_only = script(place.path(), &text);
    let ended = on_small_disk(
        &run,
        &format!(
            "train --set train.steps=2\n\
             ! train --resume latest --fault run={read_only}@data:4:0 || exit 3\n\
             kiln inspect --verify $OUT"
        ),
    );
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert!(ended.stderr.contains("Read-only file system"), "{ended:?}");
    assert!(ended.stdout.contains("fsdp_cpt2 is intact"), "{ended:?}");
}

/// The limit, in blocks of 512 bytes, is enough for everything that a run writes except checkpoints.
#[test]
fn a_limit_on_file_sizes_is_told_like_a_full_disk() {
    crate::support::config();
    let run = Run::new();
    let train = run.train_arguments(&["--set", "checkpoint.on_failure=\"continue\""]);
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "ulimit -f 40; exec \"$0\" \"$@\"", env!("CARGO_BIN_EXE_kiln")]).args(train);
    let ended = Ended::from(run_to_end(&mut shell));
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("File too large"), "{ended:?}");
    let last = run.losses().keys().last().copied();
    assert_eq!(last, Some(crate::support::STEPS), "{ended:?}");
}
