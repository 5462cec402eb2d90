//! Signals to the launcher.

use kiln_testkit::wait_until;

use crate::support::{Job, children_of, finish, send};

const SAVES: &str = r#"trap 'touch saved.$RANK; exit 75' TERM
trap 'touch usr1.$RANK; exit 75' USR1
touch ready.$RANK
while :; do sleep 0.01; done"#;

const READY: [&str; 2] = ["ready.0", "ready.1"];

#[test]
fn ranks_are_told_to_end_and_may_save() {
    for signal in ["TERM", "INT", "HUP", "QUIT"] {
        let job = Job::new(SAVES);
        let flags = ["--nproc-per-node", "2", "--max-restarts", "3"];
        let launcher = job.launcher(&flags, &[]).spawn().expect("the launcher starts");
        job.wait_for(&READY);
        send(signal, &launcher);
        let ended = finish(launcher);
        assert_eq!(ended.code, Some(75), "{signal}: {ended:?}");
        assert!(ended.stderr.contains("the ranks have 30 s to save and end"), "{ended:?}");
        job.wait_for(&["saved.0", "saved.1"]);
        assert_eq!(job.logs("run/logs").len(), 4);
    }
}

#[test]
fn a_preemption_is_passed_on() {
    for signal in ["USR1", "USR2", "XCPU"] {
        let job = Job::new(SAVES);
        let launcher = job.launcher(&["--nproc-per-node", "2"], &[]).spawn().expect("a launcher");
        job.wait_for(&READY);
        send(signal, &launcher);
        let ended = finish(launcher);
        assert_eq!(ended.code, Some(75), "{signal}: {ended:?}");
        job.wait_for(&["usr1.0", "usr1.1"]);
        assert!(!job.path("saved.0").exists(), "{signal}");
    }
}

#[test]
fn ranks_that_do_not_save_are_reported_as_signalled() {
    for (signal, code) in [("TERM", 143), ("INT", 130)] {
        let job = Job::new("touch ready.$RANK; while :; do sleep 0.01; done");
        let flags = ["--nproc-per-node", "2", "--max-restarts", "3"];
        let launcher = job.launcher(&flags, &[]).spawn().expect("the launcher starts");
        job.wait_for(&READY);
        send(signal, &launcher);
        let ended = finish(launcher);
        assert_eq!(ended.code, Some(code), "{ended:?}");
        assert_eq!(job.logs("run/logs").len(), 4);
    }
}

#[test]
fn a_rank_that_ignores_sigterm_is_killed_after_the_grace() {
    let job = Job::new("trap '' TERM; touch ready.$RANK; while :; do sleep 0.01; done");
    let flags = ["--nproc-per-node", "2", "--grace-s", "0.2"];
    let launcher = job.launcher(&flags, &[]).spawn().expect("the launcher starts");
    job.wait_for(&READY);
    let ranks = children_of(launcher.id());
    assert_eq!(ranks.len(), 2);
    send("TERM", &launcher);
    let ended = finish(launcher);
    assert_eq!(ended.code, Some(143), "{ended:?}");
    assert!(ended.stderr.contains("failed when asked to end: killed by SIGKILL"), "{ended:?}");
    let why = ", by this launcher: it had not ended 0.2 s after SIGTERM";
    assert!(ended.stderr.contains(why), "{ended:?}");
    for rank in ranks {
        wait_until("its end", || crate::support::parent_of(rank).is_none());
    }
}

#[test]
fn a_second_interrupt_does_not_wait() {
    let job = Job::new("trap 'touch told.$RANK' TERM; touch ready.$RANK; while :; do sleep 0.01; done");
    let flags = ["--nproc-per-node", "2", "--grace-s", "3600"];
    let launcher = job.launcher(&flags, &[]).spawn().expect("the launcher starts");
    job.wait_for(&READY);
    send("INT", &launcher);
    job.wait_for(&["told.0", "told.1"]);
    send("INT", &launcher);
    assert_eq!(finish(launcher).code, Some(130));
}

/// A stopped rank cannot exit by itself, but SIGKILL still reaches it.
#[test]
fn a_stopped_rank_does_not_hold_up_the_end() {
    let job = Job::new("touch ready.$RANK; [ $RANK = 1 ] && kill -s STOP $$; wait_for go; exit 1");
    let flags = ["--nproc-per-node", "2", "--grace-s", "0.1"];
    let launcher = job.launcher(&flags, &[]).spawn().expect("the launcher starts");
    job.wait_for(&READY);
    std::fs::write(job.path("go"), "").expect("a file");
    let ended = finish(launcher);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.contains("rank 0 (pid "), "{ended:?}");
    assert!(ended.stderr.contains("stopped by the launcher: killed by SIGKILL"), "{ended:?}");
}

/// A stopped rank gets no time to exit, because it could not use the time.
#[test]
fn a_rank_that_was_stopped_is_killed_when_all_others_have_ended() {
    let job = Job::new("put pid.$RANK $$; wait_for go; exit 1");
    let flags = ["--nproc-per-node", "3", "--grace-s", "3600"];
    let launcher = job.launcher(&flags, &[]).spawn().expect("the launcher starts");
    job.wait_for(&["pid.0", "pid.1", "pid.2"]);
    let rank: u32 = job.text("pid.1").trim().parse().expect("a number");
    let status = std::process::Command::new("kill").args(["-s", "STOP", &rank.to_string()]).status();
    assert!(status.expect("kill").success());
    let stat = || std::fs::read_to_string(format!("/proc/{rank}/stat")).expect("a process");
    wait_until("its stop", || stat().contains(") T "));
    std::fs::write(job.path("go"), "").expect("a file");
    let ended = finish(launcher);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    let rank = format!("rank 1 (pid {rank}) stopped by the launcher: killed by SIGKILL (9) after ");
    let line = ended.stderr.lines().find(|line| line.contains(&rank)).expect("a line");
    let why = ", by this launcher: its process was stopped, and all others have ended";
    assert!(line.ends_with(why), "{ended:?}");
}

/// `nohup` and shells that start background jobs ignore signals on purpose.
#[test]
fn signals_that_are_ignored_from_the_start_end_nothing() {
    let job = Job::new("touch ready.$RANK; wait_for go; exit 0");
    let launch = job.launcher(&["--nproc-per-node", "2"], &[]);
    let mut shell = std::process::Command::new("sh");
    shell.args(["-c", "trap '' HUP INT QUIT; exec \"$0\" \"$@\""]);
    shell.arg(launch.get_program()).args(launch.get_args()).current_dir(job.path(""));
    shell.stdout(std::process::Stdio::piped()).stderr(std::process::Stdio::piped());
    let launcher = shell.spawn().expect("a shell");
    job.wait_for(&READY);
    for signal in ["HUP", "INT", "QUIT"] {
        send(signal, &launcher);
    }
    std::fs::write(job.path("go"), "").expect("a file");
    let ended = finish(launcher);
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
}

/// A process that ignores SIGCHLD cannot wait for its children. Only a program can start another one in that
/// state: shells refuse to.
#[test]
fn a_launcher_learns_how_ranks_end_where_sigchld_was_ignored() {
    let job = Job::new("exit 0");
    let mut launcher = job.launcher(&["--nproc-per-node", "2"], &[]);
    let ignore = || {
        // SAFETY: one system call, between fork and exec.
        unsafe { libc::signal(libc::SIGCHLD, libc::SIG_IGN) };
        Ok(())
    };
    // SAFETY: `ignore` neither locks nor allocates.
    let launcher = unsafe { std::os::unix::process::CommandExt::pre_exec(&mut launcher, ignore) };
    let ended = finish(launcher.spawn().expect("the launcher starts"));
    assert_eq!((ended.code, ended.stderr.as_str()), (Some(0), ""), "{ended:?}");
}
