//! Runs as many ranks on one machine as a large job has.

use crate::support::Run;

const RANKS: usize = 256;

#[test]
#[ignore = "takes minutes, some 16 GB of memory and 70,000 sockets: cargo test --release -p kiln --test faults -- --ignored many"]
fn many_ranks_start_train_and_end() {
    let run = Run::new();
    let train = [
        "train.steps=5",
        "train.global_batch=256",
        "eval.samples=256",
        "checkpoint.every=0",
        "comm.join_timeout_s=1200",
        "comm.timeout_s=1200",
    ];
    let train: Vec<&str> = train.iter().flat_map(|value| ["--set", value]).collect();
    let ended = run.launch(RANKS, &[], &train);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(run.losses().keys().copied().collect::<Vec<_>>(), [1, 2, 3, 4, 5]);
    assert_eq!(run.check_checkpoints(), [5]);
    for (rank, log) in run.logs(RANKS, 0).iter().enumerate() {
        assert!(!log.contains("panicked") && !log.contains("WARN"), "rank {rank}: {log}");
    }
}
