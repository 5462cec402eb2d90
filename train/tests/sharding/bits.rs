//! What must agree bit for bit.

use kiln_collectives::DType;
use kiln_shard::{Recompute, Strategy};

use crate::support::{Run, Trace};

const PURE: [Strategy; 3] = [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard];

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
    for ranks in [2, 3, 4] {
        for accumulation in [1, 2] {
            let first = Run::new(PURE[0], ranks).accumulation(accumulation).train();
            for strategy in PURE {
                for recompute in [Recompute::None, Recompute::Block] {
                    let run = Run::new(strategy, ranks).accumulation(accumulation).recompute(recompute);
                    assert_same_bits(&run.name(), &run.train(), &first);
                }
            }
        }
    }
}

/// Where a sum that is rounded twice is another one.
#[test]
fn strategies_and_recomputation_agree_bit_for_bit_in_bf16() {
    let in_bf16 = |strategy, recompute| {
        let mut run = Run::new(strategy, 2).recompute(recompute);
        run.policy.compute_dtype = DType::BF16;
        run
    };
    let first = in_bf16(PURE[0], Recompute::None).train();
    for strategy in PURE {
        for recompute in [Recompute::None, Recompute::Block] {
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
    for run in [Run::new(Strategy::FullShard, 4), hybrid] {
        let run = run.accumulation(2).steps(2);
        let first = run.train();
        assert_same_bits(&run.name(), &run.train(), &first);
        for seed in 1..4 {
            let delayed = Run { delay_seed: Some(seed), ..run.clone() };
            let what = format!("{} with delays {seed}", run.name());
            assert_same_bits(&what, &delayed.train(), &first);
        }
    }
}
