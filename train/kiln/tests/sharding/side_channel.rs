//! Values that layers record, under every strategy.

use std::collections::BTreeMap;

use burn::module::Module;
use burn::tensor::{Device, Tensor};
use kiln::config::CROSS_ENTROPY;
use kiln::run::{RecordedStep, TrainError};
use kiln_model::decoder::Decoder;
use kiln_model::layers::{AnyLayer, Context, Layer, Records};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{Recompute, ShardError, StateKind, Strategy, ValueHistogram};

use crate::support::{Rank, Run, TOLERANCE, block};

/// A block with an added loss that records values of its input, its output and its weights.
#[derive(Module, Debug)]
struct Telling {
    block: AnyLayer,
    /// True if ranks record different values. A block does not know its rank, so it records `input` only if the
    /// mean of its first sample is positive.
    #[module(skip)]
    is_partial: bool,
}

impl Layer for Telling {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let y = self.block.forward(x.clone(), context);
        let tokens = x.dims()[0] * x.dims()[1];
        let size = y.clone().powi_scalar(2).mean_dim(2).reshape([tokens]);
        let ffn = context.fork("ffn");
        ffn.add_loss("size", size.clone().mean().mul_scalar(0.1));
        context.add_loss("input", x.clone().powi_scalar(2).mean().mul_scalar(0.2));
        // The layer records one value per token.
        ffn.record("size", size);
        let says = !self.is_partial || x.clone().narrow(0, 0, 1).mean().into_scalar::<f32>() > 0.0;
        if context.is_recording() && says {
            context.record("input", x.mean());
        }
        y
    }
}

fn decoder(run: &Run, device: &Device, is_partial: bool) -> Decoder {
    run.with_blocks(device, move |init| Telling { block: block(init), is_partial })
}

type Logged = Vec<(String, f64)>;

/// Returns the logged values of two steps, and the norms of their gradients.
fn train(run: &Run, is_partial: bool) -> Vec<Logged> {
    let results = run_ranks(run.ranks, 1, |world| {
        let rank = Rank::with_decoder(run, world, decoder(run, &(run.device)(), is_partial))?;
        let engine = rank.engine();
        let mut steps = Vec::new();
        for step in 1..=2 {
            let records = Records::new(true);
            engine.begin_step();
            for index in 0..run.accumulation {
                let mut batch = rank.micro_batch(step, index, &rank.training);
                batch.context = batch.context.with_z_loss(Some(1e-2)).recording(&records);
                let loss = batch.loss(&rank.model.pass(&rank.training));
                engine.check()?;
                engine.backward(loss, index + 1 == run.accumulation)?;
            }
            let norms = engine.grad_norms()?;
            assert_eq!(engine.grad_norms()?, norms, "looking changes nothing");
            let recorded = RecordedStep::start(engine, &records)?;
            let (loss, norm) = rank.update()?;
            let squares: f64 = norms.iter().map(|(_, norm)| norm * norm).sum();
            assert!((squares.sqrt() / norm - 1.0).abs() < 1e-6, "{squares} and {norm}");
            let values = recorded.finish(engine, loss, CROSS_ENTROPY)?;
            let values = values.iter().map(|(name, value)| (name.to_owned(), value));
            steps.push(values.chain(norms).chain([("loss".to_owned(), loss)]).collect());
        }
        Ok::<_, TrainError>(steps)
    });
    run.same_on_all(results.expect("a run"))
}

fn small() -> Run {
    let mut run = Run::new(Strategy::NoShard, 1);
    run.model.logit_softcap = Some(4.0);
    run
}

fn with(strategy: Strategy, ranks: usize) -> Run {
    let mut run = small();
    (run.policy.strategy, run.ranks) = (strategy, ranks);
    run
}

/// Checks the names, and that values differ by at most [`TOLERANCE`], relative to the expected value or, where
/// values are near 0, to the largest value of the same kind.
fn assert_same(what: &str, actual: &[Logged], expected: &[Logged]) {
    for (actual, expected) in actual.iter().zip(expected) {
        let names = |logged: &Logged| logged.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
        assert_eq!(names(actual), names(expected), "{what}");
        for ((name, actual), (_, expected)) in actual.iter().zip(expected) {
            let bound = TOLERANCE * expected.abs().max(1e-2);
            assert!((actual - expected).abs() <= bound, "{what}: {name} is {actual}, not {expected}");
        }
    }
}

#[test]
fn what_layers_record_is_the_same_under_every_strategy() {
    let expected = train(&small(), false);
    let first: BTreeMap<_, _> = expected[0].iter().cloned().collect();
    for layer in 0..3 {
        for name in ["ffn.size", "input"] {
            assert!(first.contains_key(&format!("layers.{layer}.{name}")), "{first:?}");
            assert!(first[&format!("losses.layers.{layer}.{name}")] != 0.0);
        }
        assert!(
            (first[&format!("losses.layers.{layer}.ffn.size")] / first[&format!("layers.{layer}.ffn.size")]
                - 0.1)
                .abs()
                < 1e-6
        );
        assert!(first[&format!("activation_rms.layers.{layer}")] > 0.0);
    }
    let mean: f64 = (0..3).map(|layer| first[&format!("layers.{layer}.ffn.size")]).sum::<f64>() / 3.0;
    assert!((first["layers.mean.ffn.size"] / mean - 1.0).abs() < 1e-12);
    let added = first["losses.size"] + first["losses.input"] + first["losses.z_loss"];
    assert!((first["cross_entropy"] + added - first["loss"]).abs() < 1e-12);
    assert!(first["losses.z_loss"] > 0.0 && first["activation_rms.embed"] > 0.0);

    for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
        for accumulation in [1, 2] {
            for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
                for ranks in [1, 3] {
                    let run = with(strategy, ranks).recompute(recompute).accumulation(accumulation);
                    assert_same(&run.name(), &train(&run, false), &expected);
                }
            }
            let run = with(Strategy::HybridShard, 4).shard_size(2);
            let run = run.recompute(recompute).accumulation(accumulation);
            assert_same(&run.name(), &train(&run, false), &expected);
        }
    }
}

/// The mean is taken only over the passes that recorded the value.
#[test]
fn ranks_and_passes_may_record_different_values() {
    let run = with(Strategy::FullShard, 4).accumulation(4).steps(2);
    let some = train(&run, true);
    let all: BTreeMap<_, _> = train(&run, false)[0].iter().cloned().collect();
    let some: BTreeMap<_, _> = some[0].iter().cloned().collect();
    assert!(some["layers.0.input"] != all["layers.0.input"], "not all passes have told it");
    for name in ["layers.0.ffn.size", "losses.input", "loss"] {
        assert!((some[name] / all[name] - 1.0).abs() < TOLERANCE, "{name}");
    }
}

/// Norms of gradients are recorded even if there is no gradient; norms of weights always are.
#[test]
fn norms_are_those_of_whole_parameters() {
    for (strategy, ranks) in [(Strategy::FullShard, 3), (Strategy::NoShard, 2), (Strategy::HybridShard, 4)] {
        let mut run = with(strategy, ranks);
        run.shard_size = (strategy == Strategy::HybridShard).then_some(2);
        run.on_ranks(|world| {
            let rank = Rank::start(&run, world)?;
            let engine = rank.engine();
            assert!(engine.grad_norms()?.iter().all(|(_, norm)| *norm == 0.0));
            for (name, norm) in engine.weight_norms()? {
                let whole = engine.gather_parameter(&name, StateKind::Weight)?.expect("weights");
                let squares: f64 = whole.iter().map(|value| f64::from(*value).powi(2)).sum();
                assert!((norm - squares.sqrt()).abs() <= 1e-12 * norm, "{name}: {norm}");
            }
            Ok::<_, ShardError>(())
        });
    }
}

/// The histogram over the ranks' shards equals that of the whole parameters. Each value is counted once, even with
/// replicas, and the padding of flat buffers is not counted.
#[test]
fn histograms_are_those_of_whole_parameters() {
    let limits = ValueHistogram::limits();
    for (strategy, ranks) in [(Strategy::FullShard, 3), (Strategy::NoShard, 2), (Strategy::HybridShard, 4)] {
        let mut run = with(strategy, ranks);
        run.shard_size = (strategy == Strategy::HybridShard).then_some(2);
        run.on_ranks(|world| {
            let rank = Rank::start(&run, world)?;
            let engine = rank.engine();
            assert_eq!(engine.grad_histograms()?, [], "there is no gradient yet");
            rank.gradients(1)?;
            for (kind, histograms) in [
                (StateKind::Weight, engine.weight_histograms()?),
                (StateKind::Gradient, engine.grad_histograms()?),
            ] {
                let groups = &engine.layout().groups;
                assert_eq!(histograms.len(), groups.len());
                for (group, (name, found)) in groups.iter().zip(histograms) {
                    let mut values = Vec::new();
                    for parameter in &group.parameters {
                        values.extend(engine.gather_parameter(&parameter.name, kind)?.expect("values"));
                    }
                    let values: Vec<f64> = values.into_iter().map(f64::from).collect();
                    let mut counts = vec![0.0; limits.len()];
                    for value in &values {
                        // A value at the limit between two buckets belongs to the bucket farther from 0.
                        let is_below = |limit: &f64| *limit < *value || (*limit == *value && *value > 0.0);
                        counts[limits.partition_point(is_below)] += 1.0;
                    }
                    assert_eq!((&name, &found.counts), (&group.name, &counts), "{kind:?}");
                    let ends = (found.min, found.max);
                    let (lowest, highest) = (f64::INFINITY, f64::NEG_INFINITY);
                    let expected = values.iter().fold((lowest, highest), |(a, b), v| (a.min(*v), b.max(*v)));
                    assert_eq!(ends, expected, "{kind:?} {name}");
                    let squares: f64 = values.iter().map(|value| value * value).sum();
                    assert!((found.sum_squares - squares).abs() <= 1e-12 * squares, "{kind:?} {name}");
                    let near = 1e-9 * values.iter().map(|value| value.abs()).sum::<f64>();
                    assert!((found.sum - values.iter().sum::<f64>()).abs() <= near, "{kind:?} {name}");
                }
            }
            Ok::<_, ShardError>(())
        });
    }
}
