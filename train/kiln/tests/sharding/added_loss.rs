//! Losses that layers add to the training loss, and tensors that blocks capture.

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use kiln_model::decoder::{Decoder, Modules, WithLoss};
use kiln_model::layers::{AnyLayer, Context, Embed, Head, Layer, RmsNorm};
use kiln_shard::ranks::RanksError;
use kiln_shard::{Recompute, ShardError, Strategy};

use crate::reference;
use crate::support::{Rank, Run, Trace, assert_close, assert_scalars_close, block};

/// A block with an added loss that keeps its output small.
#[derive(Module, Debug)]
struct Restrained {
    norm: RmsNorm,
    block: AnyLayer,
}

impl Layer for Restrained {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        // The loss also depends on an inner tensor, so that its gradient reaches the weights by a separate path.
        let normed = self.norm.forward(x.clone());
        context.add_loss("norm", normed.powi_scalar(2).mean().mul_scalar(0.1));
        let y = self.block.forward(x, context);
        context.add_loss("output", y.clone().powi_scalar(2).mean().mul_scalar(0.5));
        y
    }
}

fn decoder(run: &Run, device: &Device) -> Decoder {
    run.with_blocks(device, |init| Restrained {
        norm: RmsNorm::new(init.model.d_model, init.model.norm_eps, init.device),
        block: block(init),
    })
}

fn train(run: &Run) -> Trace {
    run.same_on_all(
        run.on_ranks(|world| Rank::with_decoder(run, world, decoder(run, &(run.device)()))?.train()),
    )
}

fn settings() -> Vec<Run> {
    let mut runs = Vec::new();
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
        for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
            runs.push(Run::new(strategy, 3).recompute(recompute).accumulation(2));
        }
        runs.push(Run::new(Strategy::HybridShard, 4).shard_size(2).recompute(recompute));
        runs.push(Run::new(Strategy::FullShard, 1).recompute(recompute));
    }
    runs
}

#[test]
fn they_train_like_one_device_also_where_blocks_run_again() {
    let run = Run::new(Strategy::NoShard, 1);
    let expected = reference::train_decoder(&run, decoder(&run, &Device::flex().autodiff()));
    for run in settings() {
        assert_close(&run.name(), &train(&run), &expected);
    }
    // The loss without the added ones, with the same weights.
    let plain = reference::standard(false);
    assert!(expected.losses[0] > plain.losses[0] * 1.01, "they count");
}

#[test]
fn they_do_not_count_in_an_evaluation() {
    let run = Run::new(Strategy::FullShard, 2);
    let losses = run.on_ranks(|world| {
        let device = (run.device)();
        let rank = Rank::with_decoder(&run, world, decoder(&run, &device))?;
        let stock = run.decoder(&device);
        let batch = || run.samples(0, 4, &device).for_evaluation();
        let loss = batch().loss(&rank.model.pass(&device));
        rank.engine().finish_evaluation()?;
        Ok([loss, batch().loss(&stock)].map(|loss| f64::from(loss.into_scalar::<f32>())))
    });
    for [loss, stock] in losses {
        assert_scalars_close("loss", &[loss], &[stock]);
    }
}

/// The tensor that a block captures.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Captured {
    /// A tensor that the embedding computes.
    Tracked,
    /// The tensor that the embedding computes, detached.
    Detached,
    /// A constant on the device of the pass.
    Constant,
}

/// Modules whose blocks add a captured tensor to their input.
struct Capturing<'a, P> {
    modules: &'a P,
    what: Captured,
}

impl<P: Modules> Modules for Capturing<'_, P> {
    fn num_blocks(&self) -> usize {
        self.modules.num_blocks()
    }

    fn embed(&self, run: impl FnOnce(&Embed) -> Tensor<3>) -> Tensor<3> {
        self.modules.embed(run)
    }

    fn block(
        &self,
        index: usize,
        x: Tensor<3>,
        run: impl Fn(&AnyLayer, Tensor<3>) -> WithLoss + Send + Sync + 'static,
    ) -> WithLoss {
        let half = match self.what {
            Captured::Tracked => x.clone().mul_scalar(0.5),
            Captured::Detached => x.clone().mul_scalar(0.5).detach(),
            Captured::Constant => Tensor::full(x.dims(), 0.5, &x.device()),
        };
        self.modules.block(index, x, move |block, x| run(block, x + half.clone()))
    }

    fn head<const D: usize>(
        &self,
        x: Tensor<3>,
        run: impl FnOnce(&Head, Option<&Embed>, Tensor<3>) -> Tensor<D>,
    ) -> Tensor<D> {
        self.modules.head(x, run)
    }
}

/// Loss and norm of one step whose blocks capture `what`.
fn capture(run: &Run, what: Captured) -> Result<Vec<(f64, f64)>, RanksError<ShardError>> {
    run.try_on_ranks(|world| {
        let rank = Rank::start(run, world)?;
        let engine = rank.engine();
        engine.begin_step();
        let pass = rank.model.pass(&rank.training);
        let modules = Capturing { modules: &pass, what };
        let loss = rank.micro_batch(1, 0, &rank.training).loss(&modules);
        engine.check()?;
        engine.backward(loss, true)?;
        rank.update()
    })
}

#[test]
fn blocks_that_run_again_capture_constants_and_refuse_what_needs_a_gradient() {
    for ranks in [1, 2] {
        let run = Run::new(Strategy::FullShard, ranks);
        let again = run.clone().recompute(Recompute::Block);
        for what in [Captured::Detached, Captured::Constant] {
            let expected = capture(&run, what).expect("a step");
            assert_eq!(capture(&again, what).expect("a step"), expected, "{what:?}");
        }
        assert!(capture(&run, Captured::Tracked).is_ok());
        let error = capture(&again, Captured::Tracked).expect_err("no gradient goes that way");
        let error = error.to_string();
        assert!(error.contains("block `layers.0`"), "{error}");
        assert!(error.contains("detach it, or set shard.recompute = \"none\""), "{error}");
    }
}
