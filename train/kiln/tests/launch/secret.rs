//! Ranks without a secret may meet only on a loopback address, however they are started.

use std::net::TcpListener;

use crate::support::{Ended, Job, ended};

/// Returns a free port on which no one listens.
fn free_port() -> String {
    let listener = TcpListener::bind(("127.0.0.1", 0)).expect("a port");
    listener.local_addr().expect("an address").port().to_string()
}

/// Returns the place of one of two ranks, in the variables of each kind of launcher.
fn ways(rank: &str) -> [Vec<(&'static str, &str)>; 4] {
    [
        vec![("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", "2"), ("LOCAL_WORLD_SIZE", "2")],
        vec![
            ("SLURM_PROCID", rank),
            ("SLURM_LOCALID", rank),
            ("SLURM_NODEID", "0"),
            ("SLURM_NTASKS", "2"),
            ("SLURM_STEP_ID", "0"),
            ("SLURM_JOB_ID", "7"),
        ],
        vec![
            ("OMPI_COMM_WORLD_RANK", rank),
            ("OMPI_COMM_WORLD_LOCAL_RANK", rank),
            ("OMPI_COMM_WORLD_SIZE", "2"),
            ("OMPI_COMM_WORLD_LOCAL_SIZE", "2"),
        ],
        vec![("PMI_RANK", rank), ("PMI_SIZE", "2"), ("MPI_LOCALRANKID", rank), ("MPI_LOCALNRANKS", "2")],
    ]
}

fn run(arguments: &[&str], variables: &[(&str, &str)]) -> Ended {
    let job = Job::new("");
    let config = concat!(env!("CARGO_MANIFEST_DIR"), "/../../configs/debug.toml");
    std::fs::copy(config, job.path("debug.toml")).expect("a configuration");
    ended(kiln_testkit::run_to_end(&mut job.kiln(arguments, variables)))
}

#[track_caller]
fn is_refused(ended: &Ended) {
    assert_eq!(ended.code, Some(2), "{ended:?}");
    for part in ["has no secret", "0.0.0.0", "KILN_JOB_SECRET", "openssl rand -hex 32", "comm.open"] {
        assert!(ended.stderr.contains(part), "{part}: {ended:?}");
    }
}

/// The unspecified address, which other machines can reach.
#[test]
fn an_open_secret_is_refused_however_ranks_are_started() {
    for rank in ["0", "1"] {
        let port = free_port();
        let meet = [("MASTER_ADDR", "0.0.0.0"), ("MASTER_PORT", port.as_str())];
        let train = ["train", "debug.toml", "--out", "run", "--set", "comm.join_timeout_s=1"];
        for variables in ways(rank) {
            is_refused(&run(&train, &[&meet[..], &variables[..]].concat()));
        }
        let flags = ["--rank", rank, "--world-size", "2", "--master-addr", "0.0.0.0"];
        is_refused(&run(&[&train[..], &flags[..]].concat(), &meet));
        let evaluate = ["eval", "--checkpoint", "none", "--data", "none"];
        is_refused(&run(&[&evaluate[..], &flags[..]].concat(), &meet));
    }
}

/// Each node's launcher reports this before it starts ranks, does not restart them, and exits as for any
/// configuration error.
#[test]
fn a_node_says_what_its_ranks_will_refuse() {
    let arguments = [
        "launch",
        "--nnodes",
        "2",
        "--node-rank",
        "1",
        "--master-addr",
        "0.0.0.0",
        "--max-restarts",
        "3",
        "--",
        "train",
        "debug.toml",
        "--out",
        "run",
    ];
    let ended = run(&arguments, &[]);
    is_refused(&ended);
    let said = ended.stderr.find("kiln launch: warning: KILN_JOB_SECRET is not set");
    assert!(said.is_some() && said < ended.stderr.find("has no secret"), "{ended:?}");
    assert!(!ended.stderr.contains("starting all ranks of this node again"), "{ended:?}");
}

/// With `comm.open`, with a secret, or on a loopback address, ranks are not refused, and wait for other ranks.
#[test]
fn what_is_meant_is_not_refused() {
    let train = ["train", "debug.toml", "--out", "run", "--set", "comm.join_timeout_s=0.1"];
    let open = [&train[..], &["--set", "comm.open=true"]].concat();
    for (arguments, host, secret) in [
        (&open[..], "0.0.0.0", None),
        (&train[..], "0.0.0.0", Some(("KILN_JOB_SECRET", "s"))),
        (&train[..], "127.0.0.2", None),
        (&train[..], "localhost", None),
    ] {
        let port = free_port();
        let mut variables = ways("0")[0].clone();
        variables.extend([("MASTER_ADDR", host), ("MASTER_PORT", port.as_str())]);
        variables.extend(secret);
        let ended = run(arguments, &variables);
        assert_eq!(ended.code, Some(1), "{host}: {ended:?}");
        assert!(ended.stderr.contains("rank 1 did not come"), "{host}: {ended:?}");
    }
}

/// `comm.seal` is refused where it would protect nothing.
#[test]
fn a_seal_needs_a_secret_and_tcp() {
    let train = ["train", "debug.toml", "--out", "run", "--set", "comm.seal=encrypt"];
    let port = free_port();
    let mut variables = ways("1")[0].clone();
    variables.extend([("MASTER_ADDR", "localhost"), ("MASTER_PORT", port.as_str())]);
    let without = run(&train, &variables);
    let mpi = run(&[&train[..], &["--set", "comm.backend=mpi"]].concat(), &variables);
    let unknown = run(&[&train[..], &["--set", "comm.seal=wax"]].concat(), &[]);
    for (ended, says) in [
        (&without, "comm.seal = \"encrypt\" would protect nothing: set KILN_JOB_SECRET"),
        (&mpi, "comm.seal = \"encrypt\" covers traffic over TCP only, and comm.backend = \"mpi\""),
        (&unknown, "`off` or `encrypt`"),
    ] {
        assert_eq!(ended.code, Some(2), "{ended:?}");
        assert!(ended.stderr.contains(says), "{says}: {ended:?}");
    }
}
