//! Invalid launches are refused with a next step, and leave nothing behind.

use crate::support::{Job, ended};

#[test]
fn wrong_arguments() {
    let train = ["--", "train", "c.toml"];
    for (arguments, says) in [
        (&[][..], "-- <train CONFIG …>"),
        (&["--", "generate", "x"], "write kiln launch … -- train CONFIG"),
        (
            &["--", "train", "c.toml", "--rank=1"],
            "--rank differs between ranks, and the launcher sets it; remove it",
        ),
        (
            &["--", "train", "c.toml", "--local_rank", "1"],
            "--local-rank differs between ranks, and the launcher sets it; remove it",
        ),
        (&["--nproc-per-node", "0"], "--nproc-per-node=0: not a whole number from 1 to 1024"),
        (&["--nproc-per-node", "gpu"], "set a number, or `cpu` for one per core"),
        (&["--nproc-per-node", "gpu"], "--nproc-per-node=gpu: cannot count GPUs ("),
        (&["--nproc-per-node", "many"], "--nproc-per-node=many: not a whole number"),
        (&["--nproc-per-node", "GPU"], "and none of `gpu`, `cpu` and `auto`"),
        (&["--", "bench", "step"], "`bench network` have ranks to launch"),
        (&["--", "bench"], "`bench network` have ranks to launch"),
        (&["--nnodes", "2"], "--node-rank is not set: there are 2 nodes"),
        (&["--nnodes", "2", "--node-rank", "0"], "--master-addr is not set"),
        (
            &["--nnodes", "2", "--node-rank", "2", "--master-addr", "a"],
            "--node-rank=2 and --nnodes=2 contradict each other",
        ),
        (&["--node-rank", "1"], "--node-rank=1 and --nnodes=1 contradict each other"),
        (&["--nnodes", "1:2"], "cannot change during a job; use 2"),
        (&["--master-port", "http"], "--master-port=http: not a port"),
        (&["--master-addr", "a b"], "--master-addr=a b: not a host name"),
        (&["--max-restarts", "-1"], "unexpected argument '-1'"),
        (&["--max-restarts", "x"], "--max-restarts=x: not a whole number"),
        (&["--grace-s=-1"], "--grace-s -1: not a number of seconds"),
        (&["--grace-s", "nan"], "--grace-s NaN: not a number of seconds"),
        (&["--ranks", "2"], "unexpected argument '--ranks'"),
    ] {
        let job = Job::new("");
        let command = match arguments {
            [] | ["--", ..] => [&["launch"], arguments].concat(),
            _ => [&["launch"], arguments, &train].concat(),
        };
        let ended = ended(kiln_testkit::run_to_end(&mut job.kiln(&command, &[])));
        assert_eq!(ended.code, Some(2), "{arguments:?}: {ended:?}");
        assert!(ended.stderr.contains(says), "{arguments:?}: {}", ended.stderr);
        assert!(!job.path("runs").exists(), "{arguments:?}");
    }
}

#[test]
fn wrong_variables() {
    let job = Job::new("");
    let ended = job.launch(&[], &[("PET_NNODES", "two")]);
    assert_eq!(ended.code, Some(2), "{ended:?}");
    assert!(ended.stderr.contains("PET_NNODES=two: not a whole number"), "{ended:?}");
}
