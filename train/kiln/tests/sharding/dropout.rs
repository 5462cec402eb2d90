//! Dropout depends on the samples, not on the ranks that process them.

use kiln_shard::{Recompute, Strategy};

use crate::reference;
use crate::support::{Run, assert_close, distance};

fn with_dropout(mut run: Run) -> Run {
    run.model.dropout = 0.1;
    run
}

#[test]
fn dropout_is_the_same_however_the_batch_is_split() {
    let expected = reference::train(&with_dropout(Run::new(Strategy::FullShard, 1)));
    for (strategy, ranks) in
        [(Strategy::FullShard, 1), (Strategy::FullShard, 2), (Strategy::FullShard, 4), (Strategy::NoShard, 2)]
    {
        for accumulation in [1, 2] {
            for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
                let run = Run::new(strategy, ranks).accumulation(accumulation);
                let run = with_dropout(run.recompute(recompute));
                assert_close(&run.name(), &run.train(), &expected);
            }
        }
    }
    let without = reference::standard(false);
    for (with, without) in expected.losses.iter().zip(&without.losses) {
        assert!((with - without).abs() > 1e-4, "{with} with and {without} without dropout");
    }
    for (with, without) in expected.gradients.iter().zip(&without.gradients) {
        for (name, with) in with {
            assert!(distance(with, &without[name]) > 0.1, "`{name}` is that without dropout");
        }
    }
}
