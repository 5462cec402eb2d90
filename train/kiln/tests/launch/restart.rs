//! Restarted ranks.

use kiln_testkit::Said;

use crate::support::{Job, finish, send};

#[test]
fn all_ranks_are_started_again_after_a_failure() {
    let job = Job::new(
        r#"touch life.$RANK.$TORCHELASTIC_RESTART_COUNT
wait_for life.0.$TORCHELASTIC_RESTART_COUNT
wait_for life.1.$TORCHELASTIC_RESTART_COUNT
[ $RANK = 1 ] && [ $TORCHELASTIC_RESTART_COUNT -lt 2 ] && exit 9
exit 0"#,
    );
    let ended = job.launch(&["--nproc-per-node", "2", "--max-restarts", "3"], &[]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    job.wait_for(&["life.0.2", "life.1.2"]);
    assert!(!job.path("life.0.3").exists());
    let again = "kiln launch: starting all ranks of this node again, restart 2 of 3";
    assert!(ended.stderr.lines().any(|line| line == again), "{ended:?}");
    assert_eq!(job.logs("run/logs").len(), 3 * 2 * 2);
}

#[test]
fn restarts_come_to_an_end() {
    let job = Job::new("exit 5");
    let ended = job.launch(&["--max-restarts", "2"], &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert!(ended.stderr.ends_with("kiln launch: giving up after 2 restarts\n"), "{ended:?}");
    assert_eq!(job.logs("run/logs").len(), 3 * 2);
}

/// Every signal that requests an end counts: no rank runs between two tries, and the state is saved.
#[test]
fn a_job_that_is_told_to_end_before_its_next_try_is_preempted() {
    for signal in ["TERM", "INT", "HUP", "USR1", "USR2"] {
        let job = Job::new("exit 5");
        let mut launcher = job.launcher(&["--max-restarts", "9"], &[]).spawn().expect("a launcher");
        let mut said = Said::of(launcher.stderr.take().expect("its output"));
        said.expect("the next attempt is in 4 s");
        send(signal, &launcher);
        assert_eq!(finish(launcher).code, Some(75), "{signal}");
        let said = said.all();
        assert!(said.contains("before the next attempt: not restarting the job"), "{said}");
    }
}

#[test]
fn one_restart_is_not_many() {
    let ended = Job::new("exit 5").launch(&["--max-restarts", "1"], &[]);
    assert!(ended.stderr.ends_with("kiln launch: giving up after 1 restart\n"), "{ended:?}");
}

/// The launcher counts restarts by a scheduler too, so that the run resumes from its checkpoint.
#[test]
fn restarts_by_others_count() {
    let job = Job::new("[ $TORCHELASTIC_RESTART_COUNT = 4 ]");
    let ended = job.launch(&[], &[("SLURM_RESTART_COUNT", "4")]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
}

/// A shell function that reports to the launcher, as `kiln` does, in which step and why the run has ended.
const TELL: &str = r#"tell() { printf "$1" > "/proc/self/fd/${KILN_LAUNCHER_PIPE%%:*}"; }"#;

#[test]
fn what_failed_twice_in_the_same_way_is_not_started_a_third_time() {
    let job =
        Job::new(&format!("{TELL}\n[ $RANK = 0 ] && exit 0\ntell 'T4\\0Fstep 4: loss is NaN\\0'; exit 1"));
    let ended = job.launch(&["--nproc-per-node", "2", "--max-restarts", "9"], &[]);
    assert_eq!(ended.code, Some(1), "{ended:?}");
    assert_eq!(job.logs("run/logs").len(), 2 * 2 * 2, "{ended:?}");
    let last = ended.stderr.lines().last().unwrap_or_default();
    let says = "kiln launch: giving up: rank 1 failed in step 4 with the same error as before";
    assert!(last.starts_with(says), "{ended:?}");
}

#[test]
fn what_fails_in_another_step_is_started_again() {
    let script = "tell \"T$TORCHELASTIC_RESTART_COUNT\\0Floss is NaN\\0\"; exit 1";
    let job = Job::new(&format!("{TELL}\n{script}"));
    let ended = job.launch(&["--max-restarts", "2"], &[]);
    assert_eq!(job.logs("run/logs").len(), 3 * 2, "{ended:?}");
    assert!(ended.stderr.ends_with("kiln launch: giving up after 2 restarts\n"), "{ended:?}");
}

/// The other rank ends as a consequence, with another exit code.
#[test]
fn wrong_arguments_of_one_rank_are_no_reason_to_try_again() {
    let job = Job::new(&format!(
        "{TELL}\n[ $RANK = 0 ] && {{ put pid $$; exit 2; }}\nwait_end pid\n\
         tell 'Crank 0 has ended\\0'; exit 1"
    ));
    let ended = job.launch(&["--nproc-per-node", "2", "--max-restarts", "1"], &[]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert_eq!(job.logs("run/logs").len(), 2 * 2, "{ended:?}");
    // Rank 0 is on another node, and its error applies to all ranks.
    let job = Job::new(&format!("{TELL}\ntell 'Crank 0 could not start the run\\0'; exit 2"));
    let ended = job.launch(&["--max-restarts", "1"], &[]);
    assert_eq!((ended.code, job.logs("run/logs").len()), (Some(2), 2), "{ended:?}");
}
