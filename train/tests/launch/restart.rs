//! Ranks that are started again.

use crate::support::Job;

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

/// A scheduler that starts the job again counts too, so that the run goes on from its checkpoint.
#[test]
fn restarts_by_others_count() {
    let job = Job::new("[ $TORCHELASTIC_RESTART_COUNT = 4 ]");
    let ended = job.launch(&[], &[("SLURM_RESTART_COUNT", "4")]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
}
