//! A sharded mixture of experts: equal to training on one device, with the same bits under every strategy.

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;
use kiln_model::decoder::Decoder;
use kiln_model::layers::{Moe, Records};
use kiln_model::{BalanceOver, Layers, MOE, ModelConfig, MoeConfig};
use kiln_shard::{Muon, Optimizer, Recompute, Sign, StateKind, Strategy};

use crate::bits::assert_same_bits;
use crate::reference;
use crate::support::{Rank, Run, Trace, assert_close};

const PURE: [Strategy; 3] = [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard];

/// Returns a run with five experts, so that their weights do not end at chunk boundaries, and with a dense block
/// between two blocks with experts.
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

/// The balance loss is off, because it is a mean over the tokens of a micro-batch and so depends on how the batch
/// is split.
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
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
                let run = run(strategy, ranks, 0.01).accumulation(accumulation).recompute(recompute);
                assert_same_bits(&run.name(), &run.train(), &first);
            }
        }
    }
}

/// In backward, the gradient of the balance over all layers is known only after the last layer, even if blocks are
/// recomputed.
#[test]
fn strategies_and_recomputation_agree_bit_for_bit_on_the_balance_of_all_layers() {
    let run = |strategy, ranks, over| {
        let mut run = run(strategy, ranks, 0.5);
        run.model.moe.as_mut().expect("experts").router_aux_loss_over = Some(over);
        run.accumulation(2)
    };
    for ranks in [1, 3] {
        let first = run(PURE[0], ranks, BalanceOver::AllLayers).train();
        let of_each = run(PURE[0], ranks, BalanceOver::EachLayer).train();
        assert_ne!(first.gradients, of_each.gradients);
        for strategy in PURE {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
                let run = run(strategy, ranks, BalanceOver::AllLayers).recompute(recompute);
                assert_same_bits(&run.name(), &run.train(), &first);
            }
        }
    }
}

/// Returns the same run with biases that balance the experts.
fn biased(strategy: Strategy, ranks: usize, router_aux_loss_coef: f64) -> Run {
    let mut run = run(strategy, ranks, router_aux_loss_coef);
    run.model.moe.as_mut().expect("experts").expert_bias = true;
    run
}

fn is_bias(name: &str) -> bool {
    name.ends_with(Moe::BIAS)
}

/// Returns the optimizer of `run`, with `rate` as the rate of the biases.
fn optimizer(run: &Run, rate: f64) -> Optimizer {
    run.optimizer().with_rule(Sign { rate }, |name, _| is_bias(name))
}

fn train(run: &Run, rate: f64) -> Trace {
    run.same_on_all(run.on_ranks(|world| Rank::with_optimizer(run, world, optimizer(run, rate))?.train()))
}

#[test]
fn strategies_and_recomputation_agree_bit_for_bit_on_biases() {
    for (ranks, accumulation) in [(2, 2), (3, 1)] {
        let first = train(&biased(PURE[0], ranks, 0.01).accumulation(accumulation), 0.01);
        for strategy in PURE {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
                let run = biased(strategy, ranks, 0.01).accumulation(accumulation).recompute(recompute);
                assert_same_bits(&run.name(), &train(&run, 0.01), &first);
            }
        }
    }
}

fn without_biases(mut trace: Trace) -> Trace {
    trace.weights.retain(|name, _| !is_bias(name));
    trace.gradients.iter_mut().for_each(|values| values.retain(|name, _| !is_bias(name)));
    trace
}

/// Returns the loads of the experts in all layers and all steps, derived from the gradients of the biases.
fn loads(run: &Run, trace: &Trace) -> Vec<f64> {
    let passes = (run.ranks * run.accumulation) as f64;
    let choices = (run.batch * run.seq * 2) as f64;
    let load = |gradient: &f32| (f64::from(*gradient) * 2f64.powi(80) * passes + choices) / 5.0;
    let biases = trace.gradients.iter().flatten().filter(|(name, _)| is_bias(name));
    biases.flat_map(|(_, gradient)| gradient.iter().map(load)).collect()
}

/// However a step is split, each choice of an expert counts once, and biases move by the rate towards the mean load.
#[test]
fn the_load_is_that_of_the_whole_step() {
    let rate = 0.01;
    let alone = biased(Strategy::NoShard, 1, 0.0);
    let first = train(&alone, rate);
    let expected = loads(&alone, &first);
    assert_eq!(expected.len(), 5 * 2 * 5, "steps, layers with experts, experts");
    for of_layer in expected.chunks(5) {
        assert!(of_layer.iter().all(|load| load.fract() == 0.0 && *load >= 0.0), "{of_layer:?}");
        assert_eq!(of_layer.iter().sum::<f64>(), (96 * 6 * 2) as f64);
    }
    let biases = |trace: &Trace| {
        let biases = trace.weights.iter().filter(|(name, _)| is_bias(name));
        biases.map(|(_, values)| values.clone()).collect::<Vec<_>>()
    };
    // The expected movement, computed by hand.
    let mut by_hand = vec![vec![0.0f32; 5]; 2];
    for (at, of_layer) in expected.chunks(5).enumerate() {
        for (bias, load) in by_hand[at % 2].iter_mut().zip(of_layer) {
            let below_mean = (96 * 6 * 2) as f64 / 5.0 - load;
            *bias += if below_mean == 0.0 { 0.0 } else { rate as f32 * below_mean.signum() as f32 };
        }
    }
    assert_eq!(biases(&first), by_hand);
    for (strategy, ranks, accumulation, recompute) in [
        (Strategy::FullShard, 1, 4, Recompute::Block),
        (Strategy::FullShard, 2, 1, Recompute::Block),
        (Strategy::ShardGradOp, 2, 2, Recompute::None),
        (Strategy::FullShard, 4, 2, Recompute::None),
        (Strategy::HybridShard, 4, 1, Recompute::None),
    ] {
        let run = biased(strategy, ranks, 0.0).accumulation(accumulation).recompute(recompute);
        let run = if strategy.is_hybrid() { run.shard_size(2) } else { run };
        let trace = train(&run, rate);
        assert_eq!(loads(&run, &trace), expected, "{}", run.name());
        assert_eq!(biases(&trace), by_hand, "{}", run.name());
    }
}

/// With biases that do not move, losses, norms, clipping and all other trained parameters have the same bits as
/// without biases. Also tested under Muon.
#[test]
fn what_steers_biases_touches_nothing_else() {
    for muon in [None, Some(Muon { learning_rate: 20.0, ..Muon::default() })] {
        for ranks in [1, 2] {
            let plain = Run { muon, ..run(Strategy::FullShard, ranks, 0.01) };
            let with = Run { muon, ..biased(Strategy::FullShard, ranks, 0.01) };
            let trace = train(&with, 0.0);
            let of_biases = trace.gradients.iter().flatten().filter(|(name, _)| is_bias(name));
            assert!(of_biases.flat_map(|(_, values)| values).any(|value| *value != 0.0));
            // A rule without parameters changes nothing either.
            assert_same_bits(&plain.name(), &train(&plain, 0.01), &plain.train());
            assert_same_bits(&with.name(), &without_biases(trace), &plain.train());
        }
    }
}

#[test]
fn biases_have_no_state_and_a_parameter_group_of_their_own() {
    let run = biased(Strategy::FullShard, 2, 0.0).steps(1);
    run.on_ranks(|world| {
        let rank = Rank::with_optimizer(&run, world, optimizer(&run, 0.01))?;
        rank.step(1)?;
        for slot in rank.engine().optimizer().slots() {
            let values = rank.values(StateKind::Slot(slot))?;
            assert!(values.keys().all(|name| !is_bias(name)), "{slot}");
        }
        let groups = &rank.engine().layout().groups;
        let of_biases: Vec<_> = groups.iter().filter(|group| is_bias(&group.parameters[0].name)).collect();
        assert_eq!(of_biases.len(), 2);
        assert!(of_biases.iter().all(|group| group.parameters.len() == 1));
        Ok(())
    });
}

/// Returns the largest load divided by the mean load, averaged over layers and passes, at the start and at the end
/// of a run whose routers strongly prefer the first experts.
fn skewed(rate: f64) -> [f64; 2] {
    let run = biased(Strategy::FullShard, 2, 0.0).steps(120);
    let moe = run.model.moe.clone().expect("experts");
    let layers = Layers::default().feed_forward("skewed", move |init| {
        let mut layer = Moe::new(init, &moe);
        let logits = Tensor::from_data([2.0f32, 1.0, 0.0, -1.0, -2.0], init.device);
        layer.router.bias = Some(Param::initialized(ParamId::new(), logits));
        Ok(layer)
    });
    let model = ModelConfig { feed_forward: "skewed".to_owned(), moe: None, ..run.model.clone() };
    let run = Run { model, ..run };
    let loads = run.on_ranks(|world| {
        let decoder = Decoder::new(&layers, &run.model, run.key(), &(run.device)()).expect("a decoder");
        let rank = Rank::made_of(&run, world, decoder, optimizer(&run, rate))?;
        let mut loads = Vec::new();
        for step in 1..=run.steps {
            let records = Records::default();
            let mut batch = rank.micro_batch(step, 0, &rank.training);
            batch.context = batch.context.recording(&records);
            let engine = rank.engine();
            engine.begin_step();
            let loss = batch.loss(&rank.model.pass(&rank.training));
            engine.backward(loss, true)?;
            rank.update()?;
            let records = records.take();
            let values = records.iter().filter(|record| record.name == "largest_load");
            let values: Vec<_> =
                values.map(|record| f64::from(record.value.clone().into_scalar::<f32>())).collect();
            loads.push(values.iter().sum::<f64>() / values.len() as f64);
        }
        Ok([loads[0], loads[loads.len() - 1]])
    });
    [0, 1].map(|at| loads.iter().map(|of_rank| of_rank[at]).sum::<f64>() / loads.len() as f64)
}

/// Two of five experts for each token: an expert chosen by every token has 2.5 times the mean.
#[test]
fn biases_balance_a_skewed_router() {
    let ([start, without], [start_too, with]) = (skewed(0.0), skewed(0.01));
    assert_eq!(start, start_too);
    assert!(start > 2.2 && without > 2.2, "{start} {without}");
    assert!(with < 1.7, "{with} with biases, {without} without");
}
