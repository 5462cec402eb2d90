//! Results that must agree bit for bit.

use kiln_collectives::DType;
use kiln_shard::{Accumulate, Recompute, Strategy};

use crate::support::{Run, Trace, assert_close};

const PURE: [Strategy; 3] = [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard];
const ACCUMULATE: [Accumulate; 2] = [Accumulate::Sharded, Accumulate::Unsharded];

pub fn assert_same_bits(what: &str, a: &Trace, b: &Trace) {
    let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&a.losses), bits(&b.losses), "{what}: losses");
    assert_eq!(bits(&a.norms), bits(&b.norms), "{what}: norms");
    for (name, weights) in &a.weights {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert!(bits(weights) == bits(&b.weights[name]), "{what}: `{name}`");
    }
    assert!(a == b, "{what}: gradients");
}

#[test]
fn strategies_and_recomputation_agree_bit_for_bit() {
    let sharded = Accumulate::Sharded;
    for ranks in [2, 3, 4] {
        for (accumulation, accumulate) in [(1, sharded), (2, sharded), (2, Accumulate::Unsharded)] {
            let run = |strategy| Run::new(strategy, ranks).accumulation(accumulation).accumulate(accumulate);
            let first = run(PURE[0]).train();
            for strategy in PURE {
                for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
                    let run = run(strategy).recompute(recompute);
                    assert_same_bits(&run.name(), &run.train(), &first);
                }
            }
        }
    }
}

/// Four micro-batches, so that the sums pass through every stage; a head that shares the embedding's weights, so
/// that both uses in a micro-batch are added before the reduction; and gradients sent in bf16.
#[test]
fn strategies_accumulate_alike() {
    for accumulate in ACCUMULATE {
        for (ranks, tied, reduce_dtype) in
            [(2, true, DType::F32), (3, false, DType::BF16), (4, true, DType::BF16)]
        {
            let run = |strategy| {
                let mut run =
                    Run::new(strategy, ranks).steps(3).accumulation(4).accumulate(accumulate).tied(tied);
                run.policy.reduce_dtype = reduce_dtype;
                run
            };
            let first = run(PURE[0]).train();
            for strategy in &PURE[1..] {
                let run = run(*strategy);
                assert_same_bits(&format!("{}, {reduce_dtype}", run.name()), &run.train(), &first);
            }
            // A single row of ranks equals FULL_SHARD, a single column NO_SHARD.
            for shard_size in [1, ranks] {
                let run = run(Strategy::HybridShard).shard_size(shard_size);
                assert_same_bits(&format!("{}, {reduce_dtype}", run.name()), &run.train(), &first);
            }
        }
    }
}

/// Both hybrid strategies on a mesh with two axes.
#[test]
fn hybrids_accumulate_alike() {
    for accumulate in ACCUMULATE {
        for reduce_dtype in [DType::F32, DType::BF16] {
            let run = |strategy| {
                let mut run =
                    Run::new(strategy, 4).shard_size(2).steps(3).accumulation(4).accumulate(accumulate);
                run.policy.reduce_dtype = reduce_dtype;
                run
            };
            let first = run(Strategy::HybridShard).train();
            let other = run(Strategy::HybridShardGradOp).recompute(Recompute::Block);
            assert_same_bits(&format!("{}, {reduce_dtype}", other.name()), &other.train(), &first);
        }
    }
}

/// The two values of `shard.accumulate` add the same numbers in different orders.
#[test]
fn sharded_and_unsharded_sums_round_differently() {
    let [sharded, unsharded] =
        ACCUMULATE.map(|accumulate| Run::new(PURE[0], 2).accumulation(4).accumulate(accumulate).train());
    assert_close("sharded", &sharded, &unsharded);
    assert!(sharded.gradients != unsharded.gradients, "one of the two is not what it says");
    // Without accumulation there is nothing to add, and on a single rank nothing to reduce.
    for (ranks, accumulation) in [(2, 1), (1, 4)] {
        let [a, b] = ACCUMULATE.map(|accumulate| {
            Run::new(PURE[0], ranks).tied(true).accumulation(accumulation).accumulate(accumulate).train()
        });
        assert_same_bits(&format!("{ranks} ranks, {accumulation} micro-batches"), &a, &b);
    }
}

/// In bf16, a sum that is rounded twice has a different value.
#[test]
fn strategies_and_recomputation_agree_bit_for_bit_in_bf16() {
    let in_bf16 = |strategy, recompute| {
        let mut run = Run::new(strategy, 2).recompute(recompute);
        run.policy.compute_dtype = DType::BF16;
        run
    };
    let first = in_bf16(PURE[0], Recompute::None).train();
    for strategy in PURE {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
            let run = in_bf16(strategy, recompute);
            assert_same_bits(&run.name(), &run.train(), &first);
        }
    }
}

#[test]
fn strategies_agree_bit_for_bit_with_tied_weights() {
    let first = Run::new(PURE[0], 3).tied(true).train();
    for strategy in &PURE[1..] {
        let run = Run::new(*strategy, 3).tied(true);
        assert_same_bits(&run.name(), &run.train(), &first);
    }
}

#[test]
fn bits_do_not_depend_on_timing() {
    let hybrid = Run::new(Strategy::HybridShard, 4).shard_size(2);
    for run in [Run::new(Strategy::FullShard, 4), hybrid, Run::new(Strategy::NoShard, 4)] {
        let run = run.accumulation(3).steps(2);
        let first = run.train();
        assert_same_bits(&run.name(), &run.train(), &first);
        for seed in 1..4 {
            let delayed = Run { delay_seed: Some(seed), ..run.clone() };
            let what = format!("{} with delays {seed}", run.name());
            assert_same_bits(&what, &delayed.train(), &first);
        }
    }
}
