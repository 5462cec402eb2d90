//! Shapes that no number of ranks divides: padding, and shards that hold only padding.

use std::collections::BTreeSet;

use kiln_model::{AttentionBias, ModelConfig, PARALLEL_RESIDUAL, RopeScaling};
use kiln_shard::{AdamW, Recompute, StateKind, Strategy};

use crate::reference;
use crate::support::{Rank, Run, Values, assert_close, small_model};

const VOCAB: usize = 17;
const WIDTH: usize = 20;
/// Number of ids that occur in the data; other ids are never seen.
const SEEN: usize = 15;

fn run(strategy: Strategy, ranks: usize, heads: usize, tied: bool) -> Run {
    let model = ModelConfig {
        vocab_size: VOCAB,
        d_model: WIDTH,
        heads,
        kv_heads: heads / 2,
        d_ff: 28,
        layers: 2,
        ..small_model(tied)
    };
    // Without decay, a weight changes only through its gradient.
    let adamw = AdamW { weight_decay: 0.0, ..AdamW::default() };
    Run { model, adamw, tokens: SEEN, batch: 24, seq: 5, ..Run::new(strategy, ranks) }
}

#[test]
fn odd_shapes_train_like_one_device() {
    for tied in [false, true] {
        for heads in [2, 10] {
            let expected = reference::train(&run(Strategy::FullShard, 1, heads, tied));
            for (strategy, ranks) in
                [(Strategy::FullShard, 3), (Strategy::FullShard, 8), (Strategy::NoShard, 3)]
            {
                let run = run(strategy, ranks, heads, tied).recompute(Recompute::Block);
                assert_close(&run.name(), &run.train(), &expected);
            }
            let hybrid = run(Strategy::HybridShard, 6, heads, tied).shard_size(3);
            assert_close(&hybrid.name(), &hybrid.train(), &expected);
        }
    }
}

/// Biases, norms inside attention, and an explicit head width.
#[test]
fn shapes_of_other_models_train_like_one_device() {
    let run = |strategy, ranks, tied| {
        let run = run(strategy, ranks, 4, tied);
        let model = ModelConfig {
            head_dim: Some(6),
            attention_bias: AttentionBias::All,
            feed_forward_bias: true,
            qk_norm: true,
            rope_scaling: Some(RopeScaling::Linear { factor: 2.0 }),
            ..run.model
        };
        Run { model, ..run }
    };
    for tied in [false, true] {
        let expected = reference::train(&run(Strategy::FullShard, 1, tied));
        for (strategy, ranks) in [(Strategy::FullShard, 3), (Strategy::NoShard, 3)] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
                let run = run(strategy, ranks, tied).recompute(recompute);
                assert_close(&run.name(), &run.train(), &expected);
            }
        }
    }
}

/// Blocks with a window between others, and blocks whose layers read the same input.
#[test]
fn windows_and_parallel_blocks_train_like_one_device() {
    let run = |strategy, ranks, parallel: bool| {
        let run = run(strategy, ranks, 2, false);
        let model = ModelConfig {
            window: Some(2),
            window_pattern: Some("wf".to_owned()),
            block: parallel.then(|| PARALLEL_RESIDUAL.to_owned()),
            ..run.model
        };
        Run { model, ..run }
    };
    for parallel in [false, true] {
        let expected = reference::train(&run(Strategy::FullShard, 1, parallel));
        for (strategy, ranks) in [(Strategy::FullShard, 3), (Strategy::NoShard, 3)] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
                let run = run(strategy, ranks, parallel).recompute(recompute);
                assert_close(&run.name(), &run.train(), &expected);
            }
        }
    }
}

#[test]
fn some_shards_hold_padding_only() {
    let run = run(Strategy::FullShard, 8, 2, true);
    let empty = run.on_ranks(|world| {
        let rank = world.rank();
        let model = Rank::start(&run, world)?;
        let engine = model.engine();
        let groups = engine.layout().groups.iter();
        Ok(groups
            .filter(|group| {
                let shard = group.shard_range(&engine.mesh(), rank);
                group.parameters.iter().all(|parameter| {
                    parameter.range().end <= shard.start || shard.end <= parameter.range().start
                })
            })
            .map(|group| group.name.clone())
            .collect::<Vec<_>>())
    });
    assert_eq!(empty[0], Vec::<String>::new());
    assert!(empty[7].contains(&"head".to_owned()), "{empty:?}");
    assert!(empty[7].contains(&"embed".to_owned()), "{empty:?}");
}

/// Returns row `row` of a `[rows, width]` parameter, or column `row` of a `[width, rows]` parameter.
fn line(values: &Values, name: &str, row: usize) -> Vec<f32> {
    let values = &values[name];
    if name == "lm_head.weight" {
        (0..WIDTH).map(|at| values[at * VOCAB + row]).collect()
    } else {
        values[row * WIDTH..(row + 1) * WIDTH].to_vec()
    }
}

#[test]
fn every_row_that_occurs_learns() {
    for tied in [false, true] {
        for ranks in [3, 8] {
            let run = run(Strategy::FullShard, ranks, 2, tied);
            let trace = run.train();
            let decoder = run.on_ranks(|world| Rank::start(&run, world)?.values(StateKind::Weight));
            let initial = run.same_on_all(decoder);
            let (mut inputs_ever, names) = (BTreeSet::new(), ["embed_tokens.weight", "lm_head.weight"]);
            for (step, gradients) in trace.gradients.iter().enumerate() {
                let samples = step * run.batch..(step + 1) * run.batch;
                let inputs: BTreeSet<usize> = samples
                    .flat_map(|sample| (0..run.seq).map(move |at| (sample, at)))
                    .map(|(sample, at)| run.token(sample, at) as usize)
                    .collect();
                for row in 0..VOCAB {
                    // The softmax gives every row of the head a gradient.
                    for name in names.iter().filter(|name| gradients.contains_key(**name)) {
                        let learns = tied || *name == names[1] || inputs.contains(&row);
                        let gradient = line(gradients, name, row);
                        let zero = gradient.iter().all(|value| *value == 0.0);
                        assert_eq!(zero, !learns, "{name}, row {row}, step {}", step + 1);
                    }
                }
                inputs_ever.extend(inputs);
            }
            assert_eq!(inputs_ever, (0..SEEN).collect());
            for row in 0..VOCAB {
                for name in names.iter().filter(|name| initial.contains_key(**name)) {
                    let (before, after) = (line(&initial, name, row), line(&trace.weights, name, row));
                    if tied || *name == names[1] || row < SEEN {
                        let same = before.iter().zip(&after).filter(|(a, b)| a == b).count();
                        assert_eq!(same, 0, "{name}, row {row}, {ranks} ranks");
                    } else {
                        assert_eq!(before, after, "{name}, row {row} was never seen");
                    }
                }
            }
        }
    }
}
