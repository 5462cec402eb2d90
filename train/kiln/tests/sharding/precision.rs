//! Computation and reduction in bf16.

use kiln_collectives::DType;
use kiln_shard::{EngineBuilder, Recompute, ShardError, StateKind, Strategy};

use crate::reference;
use crate::support::{Rank, Run, distance};

/// bf16 has 8 bits of significand: losses around 4 move by a few thousandths.
const LOSS_TOLERANCE: f64 = 2e-2;

fn in_bf16(mut run: Run, reduce: DType) -> Run {
    run.policy.compute_dtype = DType::BF16;
    run.policy.reduce_dtype = reduce;
    run
}

#[test]
fn bf16_losses_stay_close_to_f32() {
    for tied in [false, true] {
        let expected = reference::standard(tied);
        for (strategy, ranks) in [
            (Strategy::FullShard, 1),
            (Strategy::FullShard, 4),
            (Strategy::ShardGradOp, 2),
            (Strategy::NoShard, 2),
            (Strategy::HybridShard, 4),
        ] {
            for (recompute, accumulation, reduce) in [
                (Recompute::None, 4, DType::F32),
                (Recompute::Block, 1, DType::F32),
                (Recompute::None, 1, DType::BF16),
            ] {
                let run = Run::new(strategy, ranks).tied(tied).accumulation(accumulation);
                let mut run = in_bf16(run.recompute(recompute), reduce);
                run.shard_size = strategy.is_hybrid().then_some(2);
                let trace = run.train();
                for (loss, expected) in trace.losses.iter().zip(&expected.losses) {
                    let off = (loss - expected).abs();
                    assert!(off <= LOSS_TOLERANCE, "{}: {loss} for {expected}", run.name());
                    assert!(off > 0.0, "{}: it did compute in bf16", run.name());
                }
                // Most updates of 1e-3 are less than half a unit of bf16, so the f32 master weights are needed.
                for (name, weights) in &trace.weights {
                    let off = distance(weights, &expected.weights[name]);
                    assert!(off < 3e-2, "{}: `{name}` is off by {off:.2e}", run.name());
                }
            }
        }
    }
}

#[test]
fn masters_and_moments_stay_f32() {
    for strategy in [Strategy::FullShard, Strategy::NoShard] {
        let run = in_bf16(Run::new(strategy, 2), DType::BF16);
        run.on_ranks(|world| {
            let rank = Rank::start(&run, world)?;
            let initial = rank.values(StateKind::Weight)?;
            rank.step(1)?;
            for group in 0..rank.engine().layout().groups.len() {
                for kind in [StateKind::Weight, StateKind::Slot("exp_avg"), StateKind::Slot("exp_avg_sq")] {
                    let whole = rank.engine().gather_group(group, kind)?.expect("it is trained");
                    assert_eq!(whole.dtype(), DType::F32);
                }
            }
            let rounded = |value: &f32| value.to_bits() & 0xFFFF == 0;
            for (name, weights) in rank.values(StateKind::Weight)? {
                let fine = weights.iter().filter(|value| !rounded(value)).count();
                assert!(fine * 10 > weights.len() * 9, "`{name}` has low bits");
                let still = weights.iter().zip(&initial[&name]).filter(|(a, b)| a == b).count();
                assert!(still * 10 < weights.len(), "`{name}`: {still} did not move");
            }
            Ok(())
        });
    }
}

#[test]
fn bf16_strategies_agree_bit_for_bit() {
    for reduce in [DType::F32, DType::BF16] {
        let first = in_bf16(Run::new(Strategy::FullShard, 3), reduce).train();
        for strategy in [Strategy::ShardGradOp, Strategy::NoShard] {
            let run = in_bf16(Run::new(strategy, 3), reduce);
            assert!(run.train() == first, "{}", run.name());
        }
    }
}

#[test]
fn other_dtypes_are_refused() {
    for dtype in [DType::F16, DType::F64, DType::U8] {
        let run = in_bf16(Run::new(Strategy::FullShard, 1), dtype);
        run.on_ranks(|world| match EngineBuilder::new(world, run.policy.clone(), None).map(|_| ()) {
            Err(ShardError::UnsupportedDType { what: "reduce dtype", dtype: refused }) => {
                assert_eq!(refused, dtype);
                Ok(())
            }
            other => panic!("{other:?}"),
        });
    }
}
