//! A mixture of experts, sharded: as on one device, and with the same bits under every strategy.

use kiln_model::{MOE, MoeConfig};
use kiln_shard::{Recompute, Strategy};

use crate::bits::assert_same_bits;
use crate::reference;
use crate::support::{Run, assert_close};

const PURE: [Strategy; 3] = [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard];

/// Five experts, so that their weights do not end where chunks do, and a dense block between two with
/// experts.
fn run(strategy: Strategy, ranks: usize, router_aux_loss_coef: f64) -> Run {
    let mut run = Run::new(strategy, ranks);
    run.model.feed_forward = MOE.to_owned();
    run.model.moe = Some(MoeConfig {
        experts: 5,
        experts_per_token: 2,
        expert_d_ff: 12,
        shared_expert_d_ff: Some(8),
        router_aux_loss_coef,
        dense_layers: vec![1],
        ..MoeConfig::default()
    });
    run
}

/// Without the balance loss, which is a mean over the tokens of a micro-batch and depends on how the batch is
/// split.
#[test]
fn experts_train_as_on_one_device() {
    let whole = run(Strategy::NoShard, 1, 0.0);
    let expected = reference::train(&whole);
    for strategy in PURE {
        for (ranks, accumulation) in [(1, 1), (3, 2)] {
            let run = run(strategy, ranks, 0.0).accumulation(accumulation);
            assert_close(&run.name(), &run.train(), &expected);
        }
    }
}

#[test]
fn strategies_and_recomputation_agree_bit_for_bit_on_experts() {
    for (ranks, accumulation) in [(2, 1), (3, 2)] {
        let first = run(PURE[0], ranks, 0.01).accumulation(accumulation).train();
        for strategy in PURE {
            for recompute in [Recompute::None, Recompute::Block] {
                let run = run(strategy, ranks, 0.01).accumulation(accumulation).recompute(recompute);
                assert_same_bits(&run.name(), &run.train(), &first);
            }
        }
    }
}
