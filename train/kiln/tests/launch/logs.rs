//! Each rank's output is stored in files of its own, and rank 0's output is also shown on the console.

use crate::support::Job;

const SPEAK: &str = "echo out of $RANK; echo err of $RANK >&2";

#[test]
fn every_rank_has_logs_and_rank_0_the_console() {
    let job = Job::new(SPEAK);
    let ended = job.launch(&["--nproc-per-node", "2"], &[]);
    assert_eq!(ended.code, Some(0));
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("out of 0\n", "err of 0\n"));
    for rank in 0..2 {
        let log = |stream: &str| job.text(&format!("run/logs/rank_{rank}.restart_0.{stream}.log"));
        assert_eq!(log("stdout"), format!("out of {rank}\n"));
        assert_eq!(log("stderr"), format!("err of {rank}\n"));
    }
    assert_eq!(job.logs("run/logs").len(), 4);
    // Another job in the same folder keeps the earlier content.
    job.launch(&["--nproc-per-node", "2"], &[]);
    assert_eq!(job.text("run/logs/rank_1.restart_0.stdout.log"), "out of 1\nout of 1\n");
}

#[test]
fn ranks_of_other_nodes_stay_off_the_console() {
    let job = Job::new(SPEAK);
    let flags = ["--nnodes", "2", "--node-rank", "1", "--master-addr", "localhost"];
    let ended = job.launch(&flags, &[("KILN_JOB_SECRET", "s")]);
    assert_eq!((ended.stdout.as_str(), ended.stderr.as_str()), ("", ""));
    assert_eq!(job.logs("run/logs"), ["rank_1.restart_0.stderr.log", "rank_1.restart_0.stdout.log"]);
}

#[test]
fn where_logs_go() {
    let job = Job::new(SPEAK);
    job.launch(&["--log_dir", "elsewhere"], &[]);
    assert_eq!(job.logs("elsewhere").len(), 2);
    job.launch(&[], &[("PET_LOG_DIR", "pet")]);
    assert_eq!(job.logs("pet").len(), 2);
    let command = ["launch", "--program", "./rank.sh", "--rdzv-id", "a/../b", "--", "train", "c"];
    let ended = job.kiln(&command, &[]).status().expect("the launcher starts");
    assert!(ended.success());
    assert_eq!(job.logs("runs/logs/a---b").len(), 2);
    let ended = job.launch(&["--log-dir", "rank.sh"], &[]);
    assert_eq!(ended.code, Some(1));
    assert!(ended.stderr.contains("choose another folder with --log-dir"), "{ended:?}");
}

/// A rank may write faster than its pipe accepts, and until its last moment. The rank's log still contains everything.
#[test]
fn nothing_is_lost() {
    let job = Job::new("seq 1 200000; seq 1 200000 >&2");
    job.launch(&[], &[]);
    for stream in ["stdout", "stderr"] {
        let log = job.text(&format!("run/logs/rank_0.restart_0.{stream}.log"));
        assert!(log.lines().eq((1..=200_000).map(|line| line.to_string())), "{stream}");
    }
}

/// A reader gets all of the launcher's own output, up to 1 MiB per stream, however slow it is.
#[test]
fn a_slow_reader_of_a_mebibyte_gets_all_of_it() {
    // 868,895 bytes; a pipe takes 65,536.
    let job = Job::new("seq 1 140000; seq 1 140000 >&2");
    let ended = job.launch(&[], &[]);
    let last = |text: &str| text.lines().last().map(str::to_owned);
    assert_eq!(ended.stdout.lines().count(), 140_000);
    assert_eq!(last(&ended.stdout).as_deref(), Some("140000"));
    assert_eq!(last(&ended.stderr).as_deref(), Some("140000"));
    assert_eq!(job.text("run/logs/rank_0.restart_0.stdout.log"), ended.stdout);
}

/// The second launch may be refused, but its output must not mix with the logs of the first.
#[test]
fn a_second_launch_leaves_the_logs_of_one_that_lives_alone() {
    let job = Job::new("echo out of $WHO; [ $WHO = first ] && { put ready 1; wait_for go; }; echo the end");
    let first = job.launcher(&[], &[("WHO", "first")]).spawn().expect("a launcher");
    job.wait_for(&["ready"]);
    let log = "run/logs/rank_0.restart_0.stdout.log";
    let id = ["--rdzv-id", "job"];
    for (name, folder) in [("second", "runs/logs/job"), ("third", "runs/logs/job")] {
        let ended = job.launch(&id, &[("WHO", name)]);
        assert_eq!((ended.code, ended.stdout), (Some(0), format!("out of {name}\nthe end\n")));
        let says = format!("is writing its logs to run/logs; the logs of this launch are in {folder}\n");
        assert!(ended.stderr.ends_with(&says), "{}", ended.stderr);
    }
    assert!(job.text("runs/logs/job/rank_0.restart_0.stdout.log").contains("out of third"));
    put_go(&job);
    assert_eq!(crate::support::finish(first).code, Some(0));
    assert_eq!(job.text(log), "out of first\nthe end\n");
    // After the first job has ended, the next launch gets its folder.
    job.launch(&id, &[("WHO", "fourth")]);
    assert!(job.text(log).contains("out of fourth"));
}

fn put_go(job: &Job) {
    std::fs::write(job.path("go"), "").expect("a file");
}
