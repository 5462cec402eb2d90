//! Passes that are not training steps, between training steps.

use burn::tensor::Device;
use kiln_shard::{Recompute, Reshard, ShardError, StateKind, Strategy};

use crate::support::{Rank, Run, Trace, Values, assert_values_close};

fn runs() -> Vec<Run> {
    let mut runs = Vec::new();
    for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
            for tied in [false, true] {
                let run = Run::new(strategy, 2).recompute(recompute).tied(tied).steps(3);
                runs.push(run.accumulation(2));
            }
        }
    }
    let hybrid = Run::new(Strategy::HybridShard, 4).shard_size(2).steps(3);
    runs.push(hybrid.reshard(Reshard::Always).tied(true));
    runs
}

#[test]
fn an_evaluation_changes_nothing() {
    for run in runs() {
        let expected = run.train();
        let results = run.on_ranks(|world| {
            let rank = Rank::start(&run, world)?;
            let plain = Device::flex();
            let evaluate = |step| -> Result<f32, ShardError> {
                let loss = rank.micro_batch(step, 0, &plain).loss(&rank.model.pass(&plain));
                rank.engine().finish_evaluation()?;
                Ok(loss.into_scalar())
            };
            let mut trace = Trace::default();
            for step in 1..=run.steps {
                let first = evaluate(step)?;
                rank.gradients(step)?;
                trace.gradients.push(rank.values(StateKind::Gradient)?);
                // An evaluation may also run between backward and update.
                assert_eq!(evaluate(step)?, first, "the weights are the same");
                let (loss, norm) = rank.update()?;
                trace.losses.push(loss);
                trace.norms.push(norm);
                assert_ne!(evaluate(step)?, first, "the weights have changed");
            }
            trace.weights = rank.values(StateKind::Weight)?;
            Ok(trace)
        });
        assert!(run.same_on_all(results) == expected, "{}", run.name());
    }
}

/// Returns the gradients after `passes`, which must run one backward pass.
fn gradients(run: &Run, passes: impl Fn(&Rank<'_>) -> Result<(), ShardError> + Sync) -> Values {
    run.same_on_all(run.on_ranks(|world| {
        let rank = Rank::start(run, world)?;
        rank.engine().begin_step();
        passes(&rank)?;
        rank.values(StateKind::Gradient)
    }))
}

#[test]
fn two_forwards_and_one_backward() {
    for run in runs() {
        // The second micro-batch has the same backward in all three cases.
        let loss = |rank: &Rank<'_>, index| {
            let batch = rank.micro_batch(1, index, &rank.training);
            batch.loss(&rank.model.pass(&rank.training))
        };
        let alone = gradients(&run, |rank| rank.engine().backward(loss(rank, 0), true));
        let first_dropped = gradients(&run, |rank| {
            drop(loss(rank, 0));
            rank.engine().backward(loss(rank, 0), true)
        });
        assert!(first_dropped == alone, "{}", run.name());

        let twice = |values: &Values| -> Values {
            let double = |values: &Vec<f32>| values.iter().map(|value| 2.0 * value).collect();
            values.iter().map(|(name, values)| (name.clone(), double(values))).collect()
        };
        let both = gradients(&run, |rank| {
            let sum = loss(rank, 0) + loss(rank, 0);
            rank.engine().backward(sum, true)
        });
        assert_values_close(&run.name(), &both, &twice(&alone));
    }
}

#[test]
fn an_abandoned_step_leaves_nothing_behind() {
    for run in runs() {
        let expected = run.train();
        for backward in [false, true] {
            let results = run.on_ranks(|world| {
                let rank = Rank::start(&run, world)?;
                let engine = rank.engine();
                engine.begin_step();
                let batch = rank.micro_batch(2, 0, &rank.training);
                let loss = batch.loss(&rank.model.pass(&rank.training));
                if backward {
                    // This gradient waits for another micro-batch, which never comes.
                    engine.backward(loss, false)?;
                }
                rank.train()
            });
            assert!(run.same_on_all(results) == expected, "{}", run.name());
        }
    }
}
