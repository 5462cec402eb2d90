//! Muon for the matrices of blocks, and AdamW for all other parameters: compared with Muon's formulas in f64, and
//! bit for bit between strategies, with the state that each parameter needs.

use burn::tensor::{Device, Tensor, TensorData};
use kiln_shard::{AdjustLr, Choice, Muon, ParamGroupLayout, Policy, Recompute, Rule, StateKind, Strategy};

use crate::reference;
use crate::support::{LEARNING_RATE, Rank, Run, Trace, assert_close, assert_within, distance};

const PURE: [Strategy; 3] = [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard];

/// Tolerance between f32 and f64 after large updates with five iterations whose polynomial is steep near zero.
const TOLERANCE: f64 = 1e-4;

fn muon() -> Muon {
    Muon { learning_rate: 20.0, ..Muon::default() }
}

fn run(strategy: Strategy, ranks: usize) -> Run {
    Run { muon: Some(muon()), ..Run::new(strategy, ranks) }
}

/// One step of Muon computed from its formulas in f64: `weight` is `[d_in, d_out]`, `moments` holds the
/// momentum.
pub fn step_muon(
    muon: &Muon,
    [rows, columns]: [usize; 2],
    weight: &mut [f64],
    gradient: &[f64],
    moments: &mut [(f64, f64)],
) {
    let mut direction = Vec::new();
    for ((momentum, _), gradient) in moments.iter_mut().zip(gradient) {
        *momentum += (1.0 - muon.momentum) * (gradient - *momentum);
        let blend = gradient + muon.momentum * (*momentum - gradient);
        direction.push(if muon.nesterov { blend } else { *momentum });
    }
    let norm = direction.iter().map(|value| value * value).sum::<f64>().sqrt().max(1e-7);
    let mut x: Vec<_> = direction.iter().map(|value| value / norm).collect();
    let [a, b, c] = muon.ns_coefficients;
    // X (a + b XᵀX + c (XᵀX)²).
    for _ in 0..muon.ns_steps {
        let transposed: Vec<_> = (0..columns * rows).map(|at| x[at % rows * columns + at / rows]).collect();
        let gram = product(&transposed, &x, [columns, rows, columns]);
        let square = product(&gram, &gram, [columns, columns, columns]);
        let identity = |at: usize| if at / columns == at % columns { a } else { 0.0 };
        let polynomial: Vec<_> =
            (0..columns * columns).map(|at| identity(at) + b * gram[at] + c * square[at]).collect();
        x = product(&x, &polynomial, [rows, columns, columns]);
    }
    let (d_in, d_out) = (rows as f64, columns as f64);
    let adjusted = match muon.adjust_lr {
        AdjustLr::Original => (d_out / d_in).max(1.0).sqrt(),
        AdjustLr::MatchRmsAdamw => 0.2 * d_in.max(d_out).sqrt(),
    };
    let rate = LEARNING_RATE * muon.learning_rate;
    for (weight, update) in weight.iter_mut().zip(x) {
        *weight -= rate * muon.weight_decay * *weight;
        *weight -= rate * adjusted * update;
    }
}

fn product(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let mut out = vec![0.0; m * n];
    for (i, row) in out.chunks_mut(n).enumerate() {
        for (j, value) in row.iter_mut().enumerate() {
            *value = (0..k).map(|at| a[i * k + at] * b[at * n + j]).sum();
        }
    }
    out
}

fn assert_same_bits(what: &str, a: &Trace, b: &Trace) {
    let bits = |values: &[f64]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&a.losses), bits(&b.losses), "{what}: losses");
    for (name, weights) in &a.weights {
        let bits = |values: &[f32]| values.iter().map(|value| value.to_bits()).collect::<Vec<_>>();
        assert!(bits(weights) == bits(&b.weights[name]), "{what}: `{name}`");
    }
    assert!(a == b, "{what}: gradients and norms");
}

#[test]
fn every_strategy_computes_its_formulas() {
    for (nesterov, adjust_lr) in [(true, AdjustLr::Original), (false, AdjustLr::MatchRmsAdamw)] {
        let muon = Some(Muon { nesterov, adjust_lr, ..muon() });
        let expected = reference::train(&Run { muon, ..run(Strategy::FullShard, 1) });
        for (strategy, ranks) in
            [(Strategy::NoShard, 1), (Strategy::FullShard, 4), (Strategy::ShardGradOp, 3)]
        {
            let run = Run { muon, ..run(strategy, ranks) };
            assert_within(TOLERANCE, &run.name(), &run.train(), &expected);
        }
        let hybrid = Run { muon, ..run(Strategy::HybridShard, 4) }.shard_size(2);
        assert_within(TOLERANCE, &hybrid.name(), &hybrid.train(), &expected);
    }
}

#[test]
fn strategies_agree_bit_for_bit() {
    for ranks in [2, 3, 4] {
        let first = run(PURE[0], ranks).train();
        for strategy in PURE {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
                let run = run(strategy, ranks).recompute(recompute);
                assert_same_bits(&run.name(), &run.train(), &first);
            }
        }
    }
}

/// A parameter may hold several matrices, as for the experts of a layer.
#[test]
fn a_batch_of_matrices_is_updated_matrix_by_matrix() {
    let [matrices, rows, columns] = [3, 4, 6];
    let values: Vec<f32> = (0..matrices * rows * columns).map(|at| (at as f32 * 0.7).sin()).collect();
    let batch = Tensor::<3>::from_data(TensorData::new(values, [matrices, rows, columns]), &Device::flex());
    let updates = |tensor: Tensor<3>| muon().transform(tensor).into_data().try_to_vec::<f32>().expect("f32");
    let whole = updates(batch.clone());
    for (index, expected) in whole.chunks(rows * columns).enumerate() {
        for (update, expected) in updates(batch.clone().narrow(0, index, 1)).iter().zip(expected) {
            assert!(
                (update - expected).abs() <= 1e-5 * expected.abs().max(0.1),
                "{index}: {update} {expected}"
            );
        }
    }
}

#[test]
fn bits_do_not_depend_on_timing() {
    for run in [run(Strategy::FullShard, 4), run(Strategy::HybridShard, 4).shard_size(2)] {
        let run = run.steps(2);
        let first = run.train();
        for seed in 1..4 {
            let delayed = Run { delay_seed: Some(seed), ..run.clone() };
            assert_same_bits(&format!("{} with delays {seed}", run.name()), &delayed.train(), &first);
        }
    }
}

/// A single rank that communicates nevertheless sends the same bytes, but to itself.
#[test]
fn a_rank_alone_may_communicate() {
    let alone = run(Strategy::FullShard, 1);
    let policy = Policy { communicate_alone: true, ..alone.policy.clone() };
    assert_same_bits("alone", &Run { policy, ..alone.clone() }.train(), &alone.train());
}

#[test]
fn each_parameter_has_the_slots_of_its_rule() {
    let run = run(Strategy::FullShard, 2).steps(1);
    run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        rank.step(1)?;
        let is_matrix = |name: &str| name.starts_with("layers.") && !name.contains("norm");
        let (momentum, first) =
            (rank.values(StateKind::Slot("momentum_buffer"))?, rank.values(StateKind::Slot("exp_avg"))?);
        let all = rank.values(StateKind::Weight)?;
        assert!(all.keys().all(|name| momentum.contains_key(name) == is_matrix(name)));
        assert!(all.keys().all(|name| first.contains_key(name) != is_matrix(name)));
        let groups: Vec<_> = rank.engine().layout().groups.iter().map(|group| group.name.as_str()).collect();
        assert_eq!(groups[..3], ["embed", "layers.0", "layers.0.muon"]);
        let of_block = &rank.engine().layout().groups[2];
        assert_eq!(ParamGroupLayout::numel(of_block), 2 * 16 * 16 + 2 * 16 * 8 + 3 * 16 * 24);
        Ok(())
    });
}

#[test]
fn frozen_matrices_stay() {
    let frozen = |name: &str| name.starts_with("layers.1.") || name.ends_with("q_proj.weight");
    let run = run(Strategy::FullShard, 3).frozen(frozen);
    assert_within(TOLERANCE, &run.name(), &run.train(), &reference::train(&run));
}

/// Parameters selected by name have a factor of the learning rate and a weight decay of their own.
#[test]
fn parameters_can_have_settings_of_their_own() {
    let with = |choose: fn(&str, Choice) -> Choice| {
        let run = Run::new(Strategy::FullShard, 2).steps(1);
        let before = run.on_ranks(|world| Rank::start(&run, world)?.values(StateKind::Weight)).swap_remove(0);
        let after = run.on_ranks(|world| {
            let optimizer = run.optimizer().choosing(move |name, _, choice| choose(name, choice));
            let rank = Rank::with_optimizer(&run, world, optimizer)?;
            rank.step(1)?;
            rank.values(StateKind::Weight)
        });
        (before, after.into_iter().next().expect("two ranks"))
    };
    let (before, stock) = with(|_, choice| choice);
    let (_, changed) = with(|name, choice| match name {
        "layers.0.attention.q_proj.weight" => Choice { learning_rate: Some(0.5), ..choice },
        "layers.0.attention.k_proj.weight" => Choice { learning_rate: Some(0.0), ..choice },
        "layers.0.attention_norm.weight" => Choice { weight_decay: Some(1.0), ..choice },
        _ => choice,
    });
    for (name, values) in &changed {
        let (was, stock) = (&before[name], &stock[name]);
        match name.as_str() {
            "layers.0.attention.q_proj.weight" => {
                let half: Vec<_> = was.iter().zip(stock).map(|(was, is)| (was + is) / 2.0).collect();
                assert!(distance(values, &half) < 1e-6, "{name}");
            }
            "layers.0.attention.k_proj.weight" => assert_eq!(values, was),
            "layers.0.attention_norm.weight" => {
                let decayed: Vec<_> =
                    was.iter().zip(stock).map(|(was, is)| is - LEARNING_RATE as f32 * was).collect();
                assert!(distance(values, &decayed) < 1e-6, "{name}");
            }
            _ => assert_eq!(values, stock, "{name}"),
        }
    }
}

/// A different number of ranks changes only the order of sums.
#[test]
fn numbers_of_ranks_agree() {
    // Newton–Schulz iterations amplify small singular values, and so the rounding errors in them.
    let first = run(Strategy::FullShard, 1).steps(2).train();
    for ranks in [2, 4] {
        let run = run(Strategy::FullShard, ranks).steps(2);
        assert_close(&run.name(), &run.train(), &first);
    }
}
