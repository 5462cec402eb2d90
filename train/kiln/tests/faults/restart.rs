//! A restarted job whose run folder is missing, or whose other nodes never arrive.

use std::fs;

use std::net::TcpListener;

use crate::support::{Run, config, undisturbed};

/// A restarted job that does not find its run folder must not start from scratch, as if there had never been a run.
#[test]
fn a_job_whose_folder_was_taken_away_is_not_begun_anew() {
    config();
    for and_then in ["", "mkdir -p OUT", "mkdir -p OUT; cp MOVED/config.toml MOVED/metrics.jsonl OUT"] {
        let run = Run::new();
        let (out, moved) = (run.out(), run.folder().join("moved"));
        let script = format!("mv OUT MOVED; {and_then}");
        let script = script.replace("OUT", &out.display().to_string());
        let script = run.script(&script.replace("MOVED", &moved.display().to_string()));
        // Rank 0 notices the missing folder when it saves step 4.
        let drill = format!("run={script}@data:3:0");
        // Saves are synchronous, so that the checkpoint of step 2 is complete when the folder is moved.
        let train = ["--fault", &drill, "--set", "checkpoint.async=false"];
        let ended = run.launch(2, &["--max-restarts", "5"], &train);
        assert_eq!(ended.code, Some(2), "{and_then}: {ended:?}");
        let says = "is not the folder that this job wrote to before its restart";
        assert!(ended.stderr.contains(says), "{and_then}: {ended:?}");
        assert!(!ended.stderr.contains("restart 2 of 5"), "{and_then}: {ended:?}");
        assert!(!out.join("checkpoints").exists(), "{and_then}");
        // The moved folder has lost no file.
        let _ = fs::remove_dir_all(&out);
        fs::rename(&moved, &out).expect("the folder");
        let resume = ["--resume", "latest", "--set", "checkpoint.async=false"];
        let ended = run.launch(2, &[], &resume);
        assert_eq!(ended.code, Some(0), "{and_then}: {ended:?}");
        assert_eq!(run.losses(), undisturbed(2), "{and_then}");
    }
}

/// If the launcher of the other node has given up or never existed, this launcher does not retry forever.
#[test]
fn a_launcher_does_not_go_on_without_the_other_node() {
    config();
    for (node, other) in [("0", "node 1"), ("1", "node 0")] {
        let run = Run::new();
        let free = TcpListener::bind("127.0.0.1:0").and_then(|listener| listener.local_addr());
        let port = free.expect("a port").port().to_string();
        let nodes = ["--nnodes", "2", "--node-rank", node, "--master-addr", "127.0.0.1"];
        let launch = [&nodes[..], &["--master-port", &port, "--max-restarts", "3"]].concat();
        let ended = run.launch(2, &launch, &["--set", "comm.join_timeout_s=1"]);
        assert_eq!(ended.code, Some(1), "{ended:?}");
        let says = format!("kiln launch: giving up: {other} did not join this restart");
        assert!(ended.stderr.contains(&says), "{ended:?}");
        assert!(!ended.stderr.contains("restart 2 of 3"), "{ended:?}");
    }
}
