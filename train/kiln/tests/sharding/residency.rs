//! The number of groups that are unsharded at the same time, and the tensors that keep groups unsharded.

use burn::module::{Module, Param};
use burn::tensor::{Device, Tensor};
use kiln_model::decoder::Decoder;
use kiln_model::layers::{Context, Layer, LayerInit, normal_parameter};
use kiln_shard::{Recompute, Reshard, ShardError, Strategy};

use crate::reference;
use crate::support::{Rank, Run, assert_close};

const RECOMPUTE: [Recompute; 2] = [Recompute::None, Recompute::Block];

/// Returns a run with enough blocks for "at most two" to be meaningful.
fn deep(run: Run) -> Run {
    let mut run = Run { batch: 48, ..run };
    run.model.layers = 6;
    run
}

/// Returns the largest number of streamed groups that were unsharded at the same time: during forward, and during
/// whole later steps.
fn peaks(run: &Run) -> (usize, usize) {
    let peaks = run.on_ranks(|world| {
        let rank = Rank::start(run, world)?;
        let engine = rank.engine();
        engine.take_peak_unsharded();
        let plain = Device::flex();
        drop(rank.micro_batch(1, 0, &plain).loss(&rank.model.pass(&plain)));
        engine.finish_evaluation()?;
        let forward = engine.take_peak_unsharded();
        rank.step(1)?;
        rank.step(2)?;
        let step = engine.take_peak_unsharded();
        assert_eq!(engine.take_peak_unsharded(), 0, "all are sharded again");
        assert_eq!(engine.pinned_groups(), Vec::<String>::new(), "{}", run.name());
        Ok((forward, step))
    });
    run.same_on_all(peaks)
}

#[test]
fn two_units_at_most_when_resharding() {
    for recompute in RECOMPUTE {
        for (tied, accumulation) in [(false, 1), (true, 1), (false, 4), (true, 4)] {
            let run = |strategy, ranks| {
                deep(Run::new(strategy, ranks)).recompute(recompute).tied(tied).accumulation(accumulation)
            };
            let hybrid = run(Strategy::HybridShard, 4).shard_size(2);
            let always = run(Strategy::ShardGradOp, 2).reshard(Reshard::Always);
            for run in [run(Strategy::FullShard, 2), run(Strategy::FullShard, 3), hybrid, always] {
                let (forward, step) = peaks(&run);
                assert_eq!((forward, step), (2, 2), "{}", run.name());
            }
        }
    }
}

#[test]
fn all_units_when_not_resharding() {
    for recompute in RECOMPUTE {
        let run = deep(Run::new(Strategy::ShardGradOp, 2)).recompute(recompute);
        // Six blocks and the embedding.
        assert_eq!(peaks(&run), (7, 7));
        let never = deep(Run::new(Strategy::FullShard, 2)).recompute(recompute);
        assert_eq!(peaks(&never.reshard(Reshard::Never)), (7, 7));
    }
}

/// `x + x Wᵀ` through burn's own operations, which keep the transposed view of the weight for
/// backward.
#[derive(Module, Debug)]
struct Transposing {
    weight: Param<Tensor<2>>,
}

impl Layer for Transposing {
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        let [batch, seq, width] = x.dims();
        let rows = x.clone().reshape([batch * seq, width]);
        x + rows.matmul(self.weight.val().transpose()).reshape([batch, seq, width])
    }
}

fn transposing(run: &Run, device: &Device) -> Decoder {
    run.with_blocks(device, |LayerInit { model, key, device, .. }| Transposing {
        weight: normal_parameter([model.d_model; 2], model.init_std, key, device),
    })
}

#[test]
fn a_block_that_keeps_a_view_is_reported_and_trains() {
    let run = Run::new(Strategy::FullShard, 3);
    let expected = reference::train_decoder(&run, transposing(&run, &Device::flex().autodiff()));
    for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
        for recompute in RECOMPUTE {
            let run = Run::new(strategy, 3).recompute(recompute);
            let results = run.on_ranks(|world| {
                let rank = Rank::with_decoder(&run, world, transposing(&run, &Device::flex()))?;
                let trace = rank.train()?;
                Ok((trace, rank.engine().pinned_groups()))
            });
            let (trace, pinned) = run.same_on_all(results);
            assert_close(&run.name(), &trace, &expected);
            // Recomputed blocks keep nothing from forward to backward; without resharding, the weights stay
            // gathered in any case.
            let keeps = strategy == Strategy::FullShard && recompute == Recompute::None;
            let blocks = ["layers.0", "layers.1", "layers.2"];
            assert_eq!(pinned, if keeps { &blocks[..] } else { &[] }, "{}", run.name());
        }
    }
}

#[test]
fn the_optimizer_refuses_weights_that_are_still_read() {
    // On a single rank, the master itself serves as the weights.
    let run = Run::new(Strategy::NoShard, 1);
    run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        rank.gradients(1)?;
        let plain = Device::flex();
        drop(rank.micro_batch(1, 0, &plain).loss(&rank.model.pass(&plain)));
        // An evaluation is still in progress.
        let refused = rank.update();
        assert!(matches!(refused, Err(ShardError::Pinned { .. })), "{refused:?}");
        Ok(())
    });
}
