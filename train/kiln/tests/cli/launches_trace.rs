//! The launches of a step on CUDA, with the stand-ins for NVIDIA's libraries that `benches/trace.sh` sets up.

use crate::trace::{Call, run, run_as_process, third_step};

/// Sums of gradients need no separate pass: the kernel that computes the next contribution, a product or a
/// normalisation, also adds it to the sum. In forward, the norm of the second layer adds the result of the first.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn sums_are_made_by_what_makes_or_reads_them() {
    const BLOCKS: usize = 2;
    let step = third_step(run_as_process());
    let launched = |kernel: &str| {
        step.iter().filter(|call| call.name == "launch" && call.field("kernel").contains(kernel)).count()
    };
    // Only the sum after the feed-forward layer needs a kernel of its own, because the next module reads it.
    assert_eq!(launched("residual_kernel"), BLOCKS);
    assert_eq!(launched("binop"), 0);
    assert_eq!(launched("residual_norm"), BLOCKS);
    assert_eq!(launched("residual_backward"), 2 * BLOCKS);
    let adds = step.iter().filter(|call| call.name == "cublaslt_matmul" && call.field("beta") == "1");
    // Two for q, k and v, and one for gate and up.
    assert_eq!(adds.count(), 3 * BLOCKS);
}

/// If a rank holds a whole copy of the weights from forward to backward, the weights are cast once; afterwards,
/// the update casts the weights that it changes. Otherwise the cast weights are freed with the gathered ones, and
/// cast again.
#[test]
#[ignore = "needs stand-ins for the driver: benches/trace.sh"]
fn whole_weights_that_stay_are_cast_by_the_update() {
    // Parameter groups: the embedding, two blocks, the head.
    let groups = 4;
    for (strategy, ranks) in [
        ("NO_SHARD", 1),
        ("NO_SHARD", 2),
        ("FULL_SHARD", 1),
        ("FULL_SHARD", 2),
        ("SHARD_GRAD_OP", 1),
        ("SHARD_GRAD_OP", 2),
    ] {
        let (strategy_key, threads) = (format!("shard.strategy={strategy}"), ranks.to_string());
        let more = ["--ranks", &threads, "--set", &strategy_key, "--set", "precision.compute=bf16"];
        let more = [&more[..], &["--set", "train.global_batch=2", "--set", "train.micro_batch=1"]].concat();
        let calls = run(&[], &more);
        let updates: Vec<_> = (0..calls.len()).filter(|at| calls[*at].updates()).collect();
        let ends: Vec<_> = updates.chunks(updates.len() / 3).map(|step| step[step.len() - 1]).collect();
        let casts = |from: usize, to: usize| {
            let casts = |call: &&Call| call.name == "launch" && call.field("kernel").contains("convert");
            calls[from..to].iter().filter(casts).count()
        };
        let found = [casts(0, ends[0]), casts(ends[0], ends[1]), casts(ends[1], ends[2])];
        // One rank may begin a step while another is still in the previous one, so with several ranks only the sum
        // over all steps is checked.
        let sum: usize = found.iter().sum();
        let is_right = match (strategy, ranks) {
            // Freed after forward, and cast again.
            ("FULL_SHARD", 1) => found[0] > groups && found[1] > 0 && found[1] == found[2],
            ("FULL_SHARD", _) => sum > 3 * groups * ranks,
            ("SHARD_GRAD_OP", 2) => sum == 3 * groups * ranks,
            _ => found == [groups * ranks, 0, 0],
        };
        assert!(is_right, "{found:?}, {strategy} on {ranks} ranks");
    }
}
