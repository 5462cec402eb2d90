//! Parameters that are sharded and gathered like others but are not trained, and tied weights.

use std::collections::{BTreeMap, BTreeSet};

use burn::module::{Param, ParamId};
use burn::tensor::Tensor;
use kiln_collectives::{DType, Operation, Phase};
use kiln_model::decoder::{Modules, WithLoss};
use kiln_model::layers::{AnyLayer, Embed, Head};
use kiln_shard::{Recompute, Reshard, StateKind, Strategy};

use crate::reference;
use crate::support::{Rank, Run, Trace, Values, assert_close, distance};

/// Selects attention's queries and values and the gates, so that frozen parameters are between trained ones in
/// every block.
fn interleaved(name: &str) -> bool {
    ["q_proj", "v_proj", "gate_proj"].iter().any(|frozen| name.contains(frozen))
}

fn embedding(name: &str) -> bool {
    name == "embed_tokens.weight"
}

fn all_but_one_norm(name: &str) -> bool {
    name != "layers.1.ffn_norm.weight"
}

fn first_blocks(name: &str) -> bool {
    embedding(name) || name.starts_with("layers.0.") || name.starts_with("layers.1.")
}

const FROZEN: [fn(&str) -> bool; 4] = [interleaved, embedding, all_but_one_norm, first_blocks];

/// Returns all settings that can be combined with frozen groups.
fn settings(frozen: fn(&str) -> bool, tied: bool) -> Vec<Run> {
    let mut runs = Vec::new();
    for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
            for accumulation in [1, 4] {
                let run = Run::new(strategy, 3).steps(3).frozen(frozen).tied(tied);
                runs.push(run.recompute(recompute).accumulation(accumulation));
            }
        }
    }
    let full = || Run::new(Strategy::FullShard, 3).steps(3).frozen(frozen).tied(tied);
    runs.push(full().reshard(Reshard::Always));
    runs.push(full().reshard(Reshard::Always).recompute(Recompute::Block));
    let hybrid = Run::new(Strategy::HybridShard, 4).shard_size(2);
    runs.push(hybrid.steps(3).frozen(frozen).tied(tied).accumulation(4));
    runs
}

fn initial(run: &Run) -> Values {
    run.same_on_all(run.on_ranks(|world| Rank::start(run, world)?.values(StateKind::Weight)))
}

/// Checks that trained parameters equal those of one device, and that frozen ones keep their initial bits.
fn check(run: &Run, expected: &Trace, initial: &Values) {
    let trace = run.train();
    assert_close(&run.name(), &trace, expected);
    for (name, weights) in &trace.weights {
        assert_eq!(weights == &initial[name], (run.frozen)(name), "{}: `{name}`", run.name());
    }
}

#[test]
fn frozen_parameters_stay_and_the_others_train_like_one_device() {
    for frozen in FROZEN {
        for tied in [false, true] {
            let runs = settings(frozen, tied);
            let expected = reference::train(&runs[0]);
            let initial = initial(&runs[0]);
            for run in runs {
                check(&run, &expected, &initial);
            }
        }
    }
}

#[test]
fn frozen_parameters_stay_in_bf16_too() {
    for strategy in [Strategy::FullShard, Strategy::NoShard] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
            let mut run = Run::new(strategy, 2).frozen(interleaved).recompute(recompute);
            run.policy.compute_dtype = DType::BF16;
            let (trace, initial) = (run.train(), initial(&run));
            for (name, weights) in &trace.weights {
                assert_eq!(weights == &initial[name], interleaved(name), "{}", run.name());
            }
        }
    }
}

/// Returns the parameter groups that a step reduced.
fn reduced(run: &Run) -> BTreeSet<String> {
    let groups = run.on_ranks(|world| {
        let recorder = world.recorder().clone();
        let rank = Rank::start(run, world)?;
        recorder.reset_totals();
        rank.step(1)?;
        let totals = recorder.totals();
        let reductions = totals
            .iter()
            .filter(|total| total.operation != Operation::AllGather && total.phase == Phase::Backward);
        Ok(reductions
            .map(|total| {
                assert_eq!(total.calls, 1, "{}", total.scope);
                total.scope.to_string()
            })
            .collect())
    });
    run.same_on_all(groups)
}

#[test]
fn frozen_units_are_not_reduced() {
    for strategy in [Strategy::FullShard, Strategy::NoShard] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
            for (frozen, expected) in [
                (interleaved as fn(&str) -> bool, &["embed", "head", "layers.0", "layers.1", "layers.2"][..]),
                (embedding, &["head", "layers.0", "layers.1", "layers.2"]),
                (all_but_one_norm, &["layers.1"]),
                (first_blocks, &["head", "layers.2"]),
            ] {
                let run = Run::new(strategy, 2).frozen(frozen).recompute(recompute);
                let expected = expected.iter().map(|group| (*group).to_owned()).collect();
                assert_eq!(reduced(&run), expected, "{}", run.name());
            }
        }
    }
}

/// Returns the gathers of one step after the first, such as `F layers.0.frozen`, with their counts, and the
/// largest number of streamed groups that were unsharded at the same time.
fn gathers(run: &Run) -> (BTreeMap<String, u64>, usize) {
    let results = run.on_ranks(|world| {
        let recorder = world.recorder().clone();
        let rank = Rank::start(run, world)?;
        rank.step(1)?;
        recorder.reset_totals();
        rank.engine().take_peak_unsharded();
        rank.step(2)?;
        let totals = recorder.totals();
        let gathers = totals.iter().filter(|total| total.operation == Operation::AllGather);
        let letter = |phase| if phase == Phase::Forward { 'F' } else { 'B' };
        let counts = gathers.map(|t| (format!("{} {}", letter(t.phase), t.scope), t.calls));
        Ok((counts.collect(), rank.engine().take_peak_unsharded()))
    });
    run.same_on_all(results)
}

#[test]
fn frozen_weights_are_freed_between_forward_and_backward() {
    for accumulation in [1, 4] {
        let micro_batches = accumulation as u64;
        let run = Run::new(Strategy::FullShard, 2).frozen(interleaved).accumulation(accumulation);
        let mut expected = BTreeMap::from([("F head".to_owned(), 1)]);
        expected.insert("F embed".to_owned(), micro_batches);
        for group in ["layers.0", "layers.1", "layers.2"] {
            for phase in ["F", "B"] {
                expected.insert(format!("{phase} {group}"), micro_batches);
                expected.insert(format!("{phase} {group}.frozen"), micro_batches);
            }
        }
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
            let run = run.clone().recompute(recompute);
            // Two modules with two groups each.
            assert_eq!(gathers(&run), (expected.clone(), 2 * 2), "{}", run.name());
        }
    }
}

#[test]
fn a_frozen_beginning_has_no_backward() {
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
        let run = Run::new(Strategy::FullShard, 2).frozen(first_blocks).recompute(recompute);
        let (gathers, peak) = gathers(&run);
        assert_eq!(gathers.get("F layers.0.frozen"), Some(&1), "{gathers:?}");
        assert_eq!(gathers.get("B layers.0.frozen"), None, "{gathers:?}");
        assert_eq!(peak, 2, "{}", run.name());
    }
}

#[test]
fn frozen_values_have_no_optimizer_state() {
    let run = Run::new(Strategy::FullShard, 2).frozen(interleaved);
    run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        rank.step(1)?;
        let moments = rank.values(StateKind::Slot("exp_avg"))?;
        for (group, parameter) in rank.engine().layout().parameters() {
            let frozen = interleaved(&parameter.name);
            assert_eq!(group.trainable, !frozen);
            assert_eq!(moments.contains_key(&parameter.name), !frozen, "{}", parameter.name);
        }
        Ok(())
    });
}

/// A decoder whose head or whose input uses a detached embedding, so that only one of the two uses of tied weights
/// has a gradient.
struct OneUse<'a, P> {
    modules: &'a P,
    as_input: bool,
}

impl<P: Modules> Modules for OneUse<'_, P> {
    fn num_blocks(&self) -> usize {
        self.modules.num_blocks()
    }

    fn embed(&self, run: impl FnOnce(&Embed) -> Tensor<3>) -> Tensor<3> {
        let x = self.modules.embed(run);
        if self.as_input { x } else { x.detach() }
    }

    fn block(
        &self,
        index: usize,
        x: Tensor<3>,
        run: impl Fn(&AnyLayer, Tensor<3>) -> WithLoss + Send + Sync + 'static,
    ) -> WithLoss {
        self.modules.block(index, x, run)
    }

    fn head<const D: usize>(
        &self,
        x: Tensor<3>,
        run: impl FnOnce(&Head, Option<&Embed>, Tensor<3>) -> Tensor<D>,
    ) -> Tensor<D> {
        let as_input = self.as_input;
        self.modules.head(x, move |head, embed, x| {
            let mut embed = embed.cloned();
            if as_input && let Some(embed) = &mut embed {
                let weight = embed.embed_tokens.weight.val().detach();
                embed.embed_tokens.weight = Param::initialized(ParamId::new(), weight);
            }
            run(head, embed.as_ref(), x)
        })
    }
}

#[test]
fn tied_weights_are_one_parameter_whose_gradient_is_the_sum_of_both_uses() {
    const NAME: &str = "embed_tokens.weight";
    let whole = &reference::standard(true).gradients[0][NAME];
    for reshard in [Reshard::Default, Reshard::Always] {
        let run = Run::new(Strategy::FullShard, 3).tied(true).reshard(reshard);
        let gradients = [true, false].map(|as_input| {
            let gradient = run.on_ranks(|world| {
                let rank = Rank::start(&run, world)?;
                let engine = rank.engine();
                let matrices = engine
                    .layout()
                    .parameters()
                    .filter(|(_, p)| p.shape == [run.model.vocab_size, run.model.d_model]);
                assert_eq!(matrices.count(), 1, "one storage");
                engine.begin_step();
                let pass = rank.model.pass(&rank.training);
                let modules = OneUse { modules: &pass, as_input };
                let loss = rank.micro_batch(1, 0, &rank.training).loss(&modules);
                engine.backward(loss, true)?;
                Ok(engine.gather_parameter(NAME, StateKind::Gradient)?.expect("it is trained"))
            });
            run.same_on_all(gradient)
        });
        let sum: Vec<f32> = gradients[0].iter().zip(&gradients[1]).map(|(a, b)| a + b).collect();
        let off = distance(&sum, whole);
        assert!(off <= crate::support::TOLERANCE, "{}: off by {off:.2e}", run.name());
        for gradient in &gradients {
            assert!(distance(gradient, whole) > 0.01, "each use counts");
        }
    }
}
