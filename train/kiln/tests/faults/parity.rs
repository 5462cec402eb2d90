//! Ranks that are processes train exactly like ranks that are threads.

use crate::support::{Run, config, undisturbed};

/// Strategies whose losses are compared; the last one needs four ranks.
const STRATEGIES: [&str; 4] = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD"];

#[test]
fn losses_of_processes_equal_those_of_threads() {
    config();
    for ranks in [2, 4] {
        let threads = Run::new();
        let ended = threads.train_alone(ranks, &[]);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        // Every backend sums in the same order, so all bits agree and not only the first digits.
        assert_eq!(undisturbed(ranks), threads.losses(), "{ranks} ranks");
    }
}

#[test]
fn so_do_all_strategies() {
    config();
    for strategy in STRATEGIES {
        let set = [format!("shard.strategy={strategy}"), "shard.shard_size=2".to_owned()];
        let is_hybrid = strategy == "HYBRID_SHARD";
        let mut more = vec!["--set", set[0].as_str()];
        if is_hybrid {
            more.extend(["--set", set[1].as_str()]);
        }
        let ranks = if is_hybrid { 4 } else { 2 };
        let (threads, processes) = (Run::new(), Run::new());
        let ended = threads.train_alone(ranks, &more);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        let ended = processes.launch(ranks, &[], &more);
        assert_eq!(ended.code, Some(0), "{ended:?}");
        assert_eq!(processes.losses(), threads.losses(), "{strategy}");
    }
}

/// Sealing messages changes no bit of the results.
#[test]
fn so_do_ranks_that_seal_what_they_say() {
    let run = Run::new();
    let ended = run.launch(2, &[], &["--set", "comm.seal=encrypt"]);
    assert_eq!(ended.code, Some(0), "{ended:?}");
    assert_eq!(run.losses(), undisturbed(2));
}
