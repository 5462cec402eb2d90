//! When collectives are issued: the next group is gathered while the current group is used.

use kiln_collectives::{Operation, Phase};
use kiln_shard::{Accumulate, Recompute, Reshard, Strategy};

use crate::support::{Rank, Run};

/// Returns the gathers and reductions of one step in the order in which this rank issued them, such as `F embed`, `B
/// layers.0` and `R head`.
fn issued(run: &Run) -> Vec<String> {
    let results = run.on_ranks(|world| {
        let recorder = world.recorder().clone();
        let rank = Rank::start(run, world)?;
        let before = recorder.records().len();
        rank.gradients(1)?;
        let step = recorder.records().split_off(before);
        let letter = |operation, phase| match (operation, phase) {
            (Operation::AllGather, Phase::Forward) => Some('F'),
            (Operation::AllGather, Phase::Backward) => Some('B'),
            (Operation::ReduceScatter, _) => Some('R'),
            (Operation::AllReduce, Phase::Backward) => Some('A'),
            _ => None,
        };
        Ok(step
            .iter()
            .filter_map(|record| {
                let letter = letter(record.operation, record.label.phase)?;
                Some(format!("{letter} {}", record.label.scope))
            })
            .collect())
    });
    run.same_on_all(results)
}

#[test]
fn gathers_run_ahead_of_compute_and_reductions() {
    for recompute in [Recompute::None, Recompute::Block] {
        let run = Run::new(Strategy::FullShard, 2).recompute(recompute);
        let expected = [
            "F embed",
            "F layers.0",
            "F layers.1",
            "F layers.2",
            "F head",
            // The head reads its weight: the gather of the last block starts before the head is reduced.
            "B layers.2",
            "R head",
            "B layers.1",
            "R layers.2",
            "B layers.0",
            "R layers.1",
            "R layers.0",
            "R embed",
        ];
        assert_eq!(issued(&run), expected, "{}", run.name());
    }
}

/// With `communicate_alone`, one rank gathers and reduces in the same order as many ranks, and the results do not
/// change.
#[test]
fn a_rank_alone_communicates_if_it_is_told_to() {
    for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
        let silent = Run::new(strategy, 1).steps(2);
        let mut run = silent.clone();
        run.policy.communicate_alone = true;
        let as_one_of_two = issued(&Run::new(strategy, 2));
        let expected = if strategy == Strategy::NoShard { Vec::new() } else { as_one_of_two };
        assert_eq!(issued(&run), expected, "{strategy}");
        assert_eq!(issued(&silent), Vec::<String>::new(), "{strategy}");
        assert!(run.train() == silent.train(), "{strategy}");
    }
    // More ranks communicate in any case.
    let mut run = Run::new(Strategy::HybridShard, 2).shard_size(1);
    let before = issued(&run);
    run.policy.communicate_alone = true;
    assert_eq!(issued(&run), before);
}

#[test]
fn a_head_that_is_freed_is_gathered_first() {
    let run = Run::new(Strategy::FullShard, 2).reshard(Reshard::Always).tied(true);
    let expected = [
        "F embed",
        "F layers.0",
        "F layers.1",
        "F layers.2",
        "F head",
        "F embed",
        "B head",
        "B layers.2",
        "R head",
        "B layers.1",
        "R layers.2",
        "B layers.0",
        "R layers.1",
        "R layers.0",
        "R embed",
    ];
    assert_eq!(issued(&run), expected);
}

#[test]
fn replicas_are_summed_behind_the_shards() {
    let run = Run::new(Strategy::HybridShardGradOp, 4).shard_size(2);
    // A reduced shard is summed over the replicas when the next group requests a buffer.
    let expected = [
        "F embed",
        "F layers.0",
        "F layers.1",
        "F layers.2",
        "F head",
        "R head",
        "A head",
        "R layers.2",
        "A layers.2",
        "R layers.1",
        "A layers.1",
        "R layers.0",
        "A layers.0",
        "R embed",
        "A embed",
    ];
    assert_eq!(issued(&run), expected);
}

#[test]
fn unsharded_micro_batches_reduce_in_the_last_backward_only() {
    let run = Run::new(Strategy::FullShard, 2).accumulation(2).accumulate(Accumulate::Unsharded);
    let issued = issued(&run);
    let backwards = issued.iter().position(|entry| entry.starts_with('R')).expect("a reduction");
    let second = issued.iter().rposition(|entry| entry == "F embed").expect("a forward");
    assert!(second < backwards, "{issued:?}");
    assert_eq!(issued.iter().filter(|entry| entry.starts_with('R')).count(), 5, "{issued:?}");
}

/// Every backward is like that of a step with one micro-batch, except that the head's weights stay gathered.
#[test]
fn sharded_micro_batches_reduce_in_every_backward() {
    for recompute in [Recompute::None, Recompute::Block] {
        let run = Run::new(Strategy::FullShard, 2).recompute(recompute);
        let once = issued(&run);
        let again = once.iter().filter(|entry| *entry != "F head").cloned();
        let twice: Vec<_> = once.iter().cloned().chain(again).collect();
        let run = run.accumulation(2);
        assert_eq!(issued(&run), twice, "{}", run.name());
    }
}

/// Shards are added over the micro-batches first, and then summed over the replicas once.
#[test]
fn replicas_of_shards_are_summed_once() {
    let run = Run::new(Strategy::HybridShardGradOp, 4).shard_size(2).accumulation(3);
    let issued = issued(&run);
    let count = |what: &str| issued.iter().filter(|entry| entry.starts_with(what)).count();
    assert_eq!((count("R "), count("A ")), (3 * 5, 5), "{issued:?}");
    let first = issued.iter().position(|entry| entry.starts_with('A')).expect("a sum over replicas");
    let before = issued[..first].iter().filter(|entry| entry.starts_with('R')).count();
    assert_eq!(before, 2 * 5 + 1, "the last micro-batch: {issued:?}");
}

/// Whole gradients are summed over the ranks as often as shards are.
#[test]
fn replicas_of_whole_gradients_are_summed_in_every_backward() {
    let modules = ["head", "layers.2", "layers.1", "layers.0", "embed"];
    for (accumulate, times) in [(Accumulate::Sharded, 3), (Accumulate::Unsharded, 1)] {
        let run = Run::new(Strategy::NoShard, 2).accumulation(3).accumulate(accumulate);
        let once = modules.map(|module| format!("A {module}"));
        let expected: Vec<_> = (0..times).flat_map(|_| once.clone()).collect();
        assert_eq!(issued(&run), expected, "{}", run.name());
    }
}
