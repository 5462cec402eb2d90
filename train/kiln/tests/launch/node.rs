//! `kiln train` started once per node: it launches the node's ranks itself.

use crate::support::{Ended, Job, ended};

/// Trains on one node. The ranks are the real program, which finds no configuration, so all of them exit with 2.
fn train(variables: &[(&str, &str)]) -> (Job, Ended) {
    let job = Job::new("");
    let command = ["train", "none.toml", "--out", "run"];
    let ended = ended(kiln_testkit::run_to_end(&mut job.kiln(&command, variables)));
    (job, ended)
}

#[test]
fn a_node_starts_its_ranks() {
    for variables in [
        &[("RANK", "0"), ("WORLD_SIZE", "1"), ("PET_NPROC_PER_NODE", "2")][..],
        &[("PET_NNODES", "1"), ("PET_NPROC_PER_NODE", "2")],
        &[("PET_NPROC_PER_NODE", "2")],
        &[("JOB_COMPLETION_INDEX", "0"), ("WORLD_SIZE", "1"), ("PET_NPROC_PER_NODE", "2")],
    ] {
        let (job, ended) = train(variables);
        assert_eq!(ended.code, Some(2), "{variables:?}: {ended:?}");
        assert!(ended.stderr.contains("kiln launch: rank "), "{ended:?}");
        assert_eq!(job.logs("run/logs").len(), 4, "{variables:?}");
        let log = job.text("run/logs/rank_1.restart_0.stderr.log");
        assert!(log.contains("none.toml"), "{log}");
    }
}

#[test]
fn a_process_by_itself_starts_none() {
    let (job, ended) = train(&[]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.starts_with("error: "), "{ended:?}");
    assert!(!job.path("run").exists());
}

#[test]
fn a_place_that_cannot_be_is_a_usage_error() {
    let (job, ended) = train(&[("RANK", "one")]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.starts_with("error: RANK=one: not a whole number"), "{ended:?}");
    assert!(!job.path("run").exists());
}
