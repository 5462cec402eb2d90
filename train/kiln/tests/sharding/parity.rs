//! Every combination of settings against the unsharded run: losses, gradients before clipping,
//! norms, and weights after five steps with clipping and weight decay.

use std::num::NonZeroUsize;

use kiln_shard::{Accumulate, Recompute, Reshard, Strategy};

use crate::pairwise::{pairwise, product};
use crate::reference;
use crate::support::{Run, assert_close};

const RANKS: [usize; 5] = [1, 2, 3, 4, 8];
const RESHARD: [Reshard; 3] = [Reshard::Default, Reshard::Always, Reshard::Never];
const RECOMPUTE: [Recompute; 4] = [
    Recompute::None,
    Recompute::Selective,
    Recompute::Block,
    Recompute::Every(NonZeroUsize::new(2).unwrap()),
];
const ACCUMULATION: [(usize, Accumulate); 3] =
    [(1, Accumulate::Sharded), (4, Accumulate::Sharded), (4, Accumulate::Unsharded)];
const TIED: [bool; 2] = [false, true];
const SIZES: [usize; 6] = [Strategy::ALL.len(), RANKS.len(), 3, RECOMPUTE.len(), 3, 2];

fn run(case: &[usize]) -> Run {
    let (strategy, ranks) = (Strategy::ALL[case[0]], RANKS[case[1]]);
    let (accumulation, accumulate) = ACCUMULATION[case[4]];
    let run = Run::new(strategy, ranks)
        .reshard(RESHARD[case[2]])
        .recompute(RECOMPUTE[case[3]])
        .accumulation(accumulation)
        .accumulate(accumulate)
        .tied(TIED[case[5]]);
    // Meshes of one row, of one column, and of both: 1x1, 2x1, 1x3, 2x2, 2x4 and 4x2.
    match (strategy, ranks) {
        (Strategy::HybridShard, 8) => run.shard_size(4),
        (Strategy::HybridShardGradOp, 8) => run.shard_size(2),
        _ if strategy.is_hybrid() => run.shard_size([1, 1, 3, 2][case[1]]),
        _ => run,
    }
}

fn check(cases: Vec<Vec<usize>>) {
    for case in cases {
        let run = run(&case);
        let expected = reference::standard(run.model.tie_embeddings);
        assert_close(&run.name(), &run.train(), expected);
    }
}

#[test]
fn every_pair_of_settings_trains_like_one_device() {
    check(pairwise(&SIZES));
}

#[test]
#[ignore = "all 1800 combinations: cargo test --release -p kiln --test sharding -- --ignored"]
fn every_combination_of_settings_trains_like_one_device() {
    check(product(&SIZES));
}

#[test]
fn the_reference_has_gradients_everywhere_and_clips() {
    for tied in TIED {
        let trace = reference::standard(tied);
        assert!(trace.norms.iter().all(|norm| *norm > 0.5), "clips: {:?}", trace.norms);
        for gradients in &trace.gradients {
            for (name, gradient) in gradients {
                let alive = gradient.iter().filter(|value| value.abs() > 1e-7).count();
                assert!(alive * 10 > gradient.len() * 9, "{name}: {alive} of {}", gradient.len());
            }
        }
        assert!(trace.losses.windows(2).all(|pair| pair[0] != pair[1]), "{:?}", trace.losses);
    }
}
