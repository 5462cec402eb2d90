//! The collectives that a step issues, counted by the recorder.
//!
//! For a decoder of B blocks between an embedding and a head, in one optimizer step of M
//! micro-batches:
//!
//! | policy                    | embed fwd | block fwd | head fwd | block bwd | head bwd |
//! |---------------------------|-----------|-----------|----------|-----------|----------|
//! | `FULL_SHARD`, untied      | M         | M         | 1 (kept) | M         | 0        |
//! | `FULL_SHARD`, tied        | 1 (kept)  | M         | 1 (kept) | M         | 0        |
//! | reshard always, untied    | M         | M         | M        | M         | M        |
//! | reshard always, tied      | 2M        | M         | M        | M         | M        |
//! | `SHARD_GRAD_OP` or never  | 1         | 1         | 1        | 0         | 0        |
//! | `NO_SHARD`                | 0         | 0         | 0        | 0         | 0        |
//!
//! An embedding is never gathered for backward, which reads none of its rows. Groups marked as kept stay gathered
//! over the micro-batches. If a block is recomputed, backward gathers it just as often. Each group is reduced M
//! times if gradients accumulate sharded, otherwise once: scattered over the shard axis and all-reduced over the
//! replica axis, the latter once if both exist. The norm of the gradient takes one all-reduce over the shard axis.

use std::collections::BTreeMap;

use kiln_collectives::{DType, Operation, Phase, Total};
use kiln_shard::{Accumulate, ParamGroupLayout, Recompute, Reshard, ShardError, Strategy};

use crate::support::{Rank, Run};

/// Gathers of embedding, one block, and head, in forward and in backward.
type Gathers = [[u64; 3]; 2];

const GROUPS: usize = 3 + 2;

/// Returns the totals of the second step, which is like any later step, and the layout.
fn second_step(run: &Run) -> Vec<(Vec<Total>, Vec<ParamGroupLayout>)> {
    run.on_ranks(|world| {
        let recorder = world.recorder().clone();
        let rank = Rank::start(run, world)?;
        rank.step(1)?;
        recorder.reset_totals();
        rank.step(2)?;
        Ok((recorder.totals(), rank.engine().layout().groups.clone()))
    })
}

/// Returns calls and bytes by parameter group, for one operation in one phase.
fn by_group(totals: &[Total], operation: Operation, phase: Phase) -> BTreeMap<String, (u64, u64)> {
    let wanted = totals.iter().filter(|t| t.operation == operation && t.phase == phase);
    wanted.map(|total| (total.scope.to_string(), (total.calls, total.bytes_sent))).collect()
}

/// Returns calls and bytes that a ring of `ranks` sends, by parameter group, for `calls(group)` calls on
/// `elements(group)` f32 values. `passes` is 1 for a gather or a scatter and 2 for an all-reduce.
fn on_a_ring(
    groups: &[ParamGroupLayout],
    ranks: usize,
    passes: usize,
    elements: impl Fn(&ParamGroupLayout) -> usize,
    calls: impl Fn(&ParamGroupLayout) -> u64,
) -> BTreeMap<String, (u64, u64)> {
    groups
        .iter()
        .filter(|group| calls(group) > 0)
        .map(|group| {
            let bytes = passes * (ranks - 1) * (elements(group) / ranks * 4);
            (group.name.clone(), (calls(group), calls(group) * bytes as u64))
        })
        .collect()
}

fn check(run: &Run, [forward, backward]: Gathers) {
    for (totals, groups) in second_step(run) {
        let name = run.name();
        let shard = match run.policy.strategy {
            Strategy::NoShard => 1,
            strategy if strategy.is_hybrid() => run.shard_size.expect("a hybrid has one"),
            _ => run.ranks,
        };
        let replicas = run.ranks / shard;
        assert_eq!(groups.len(), GROUPS);
        let gathers = |counts: [u64; 3]| {
            on_a_ring(&groups, shard, 1, ParamGroupLayout::padded_numel, |group| match group.name.as_str() {
                "embed" => counts[0],
                "head" => counts[2],
                _ => counts[1],
            })
        };
        let gathered = |phase| by_group(&totals, Operation::AllGather, phase);
        assert_eq!(gathered(Phase::Forward), gathers(forward), "{name}: gathers of forward");
        assert_eq!(gathered(Phase::Backward), gathers(backward), "{name}: gathers of backward");

        let each = match run.policy.accumulate {
            Accumulate::Sharded => run.accumulation as u64,
            Accumulate::Unsharded => 1,
        };
        let scatters = if shard > 1 { each } else { 0 };
        let sums = match (replicas > 1, shard > 1) {
            (false, _) => 0,
            (true, true) => 1,
            (true, false) => each,
        };
        assert_eq!(
            by_group(&totals, Operation::ReduceScatter, Phase::Backward),
            on_a_ring(&groups, shard, 1, ParamGroupLayout::padded_numel, |_| scatters),
            "{name}: scatters"
        );
        assert_eq!(
            by_group(&totals, Operation::AllReduce, Phase::Backward),
            on_a_ring(&groups, replicas, 2, |u| u.padded_numel() / shard, |_| sums),
            "{name}: all-reduces"
        );
        let norms = by_group(&totals, Operation::AllReduce, Phase::Optimizer);
        assert_eq!(norms.len(), usize::from(shard > 1), "{name}");
        assert!(norms.get("grad_norm").is_none_or(|(calls, _)| *calls == 1), "{name}: {norms:?}");
        // The only other collective sums the loss over the ranks.
        let calls =
            |operation| totals.iter().filter(|t| t.operation == operation).map(|t| t.calls).sum::<u64>();
        assert_eq!(by_group(&totals, Operation::AllReduce, Phase::Loss)["loss"].0, 1, "{name}");
        let sum = |counts: [u64; 3]| counts[0] + 3 * counts[1] + counts[2];
        assert_eq!(calls(Operation::AllGather), sum(forward) + sum(backward), "{name}");
        assert_eq!(calls(Operation::ReduceScatter), GROUPS as u64 * scatters);
        let reductions = GROUPS as u64 * sums + u64::from(shard > 1) + 1;
        assert_eq!(calls(Operation::AllReduce), reductions, "{name}");
        assert_eq!(calls(Operation::Broadcast) + calls(Operation::Barrier), 0, "{name}");
    }
}

/// Returns the row of the table above that applies to a policy.
fn expected(strategy: Strategy, reshard: Reshard, tied: bool, m: u64) -> Gathers {
    use Strategy::{FullShard, HybridShard, NoShard};
    match (strategy, reshard, tied) {
        (NoShard, _, _) => [[0, 0, 0], [0, 0, 0]],
        (_, Reshard::Always, false) => [[m, m, m], [0, m, m]],
        (_, Reshard::Always, true) => [[2 * m, m, m], [0, m, m]],
        (FullShard | HybridShard, Reshard::Default, false) => [[m, m, 1], [0, m, 0]],
        (FullShard | HybridShard, Reshard::Default, true) => [[1, m, 1], [0, m, 0]],
        _ => [[1, 1, 1], [0, 0, 0]],
    }
}

fn check_all(strategy: Strategy, ranks: usize, shard_size: Option<usize>) {
    for reshard in [Reshard::Default, Reshard::Always, Reshard::Never] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
            for (tied, accumulation) in [(false, 1), (false, 4), (true, 1), (true, 4)] {
                let run = Run { shard_size, ..Run::new(strategy, ranks) };
                let run = run.reshard(reshard).recompute(recompute).tied(tied).accumulation(accumulation);
                let gathers = expected(strategy, reshard, tied, accumulation as u64);
                check(&run, gathers);
                if accumulation > 1 && recompute == Recompute::None {
                    check(&run.accumulate(Accumulate::Unsharded), gathers);
                }
            }
        }
    }
}

#[test]
fn full_shard() {
    check_all(Strategy::FullShard, 2, None);
    check_all(Strategy::FullShard, 3, None);
}

#[test]
fn shard_grad_op() {
    check_all(Strategy::ShardGradOp, 2, None);
}

#[test]
fn no_shard() {
    check_all(Strategy::NoShard, 3, None);
}

#[test]
fn hybrids() {
    check_all(Strategy::HybridShard, 4, Some(2));
    check_all(Strategy::HybridShardGradOp, 4, Some(2));
}

#[test]
fn hybrids_of_one_axis() {
    // On a mesh of one column, nothing is gathered; on a mesh of one row, nothing is all-reduced.
    let column = Run::new(Strategy::HybridShard, 2).shard_size(1);
    check(&column, expected(Strategy::NoShard, Reshard::Default, false, 1));
    let row = Run::new(Strategy::HybridShard, 2).shard_size(2);
    check(&row, expected(Strategy::HybridShard, Reshard::Default, false, 1));
}

#[test]
fn one_rank_communicates_its_loss_only() {
    for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
        for (totals, _) in second_step(&Run::new(strategy, 1)) {
            let groups: Vec<_> = totals.iter().map(|total| &*total.scope).collect();
            assert_eq!(groups, ["loss"]);
        }
    }
}

#[test]
fn an_evaluation_gathers_every_unit_once() {
    for (strategy, tied) in [(Strategy::FullShard, false), (Strategy::ShardGradOp, true)] {
        let run = Run::new(strategy, 2).tied(tied);
        run.on_ranks(|world| {
            let recorder = world.recorder().clone();
            let rank = Rank::start(&run, world)?;
            recorder.reset_totals();
            let plain = burn::tensor::Device::flex();
            drop(rank.micro_batch(1, 0, &plain).loss(&rank.model.pass(&plain)));
            rank.engine().finish_evaluation()?;
            assert_eq!(recorder.count(Operation::AllGather, Some(Phase::Forward)), GROUPS as u64);
            assert_eq!(recorder.totals().len(), GROUPS);
            Ok(())
        });
    }
}

/// Returns the dtypes in which one step gathers and reduces.
fn dtypes(run: &Run) -> (Vec<DType>, Vec<DType>) {
    let results = run.on_ranks(|world| -> Result<_, ShardError> {
        let recorder = world.recorder().clone();
        let rank = Rank::start(run, world)?;
        rank.gradients(1)?;
        let records = recorder.records();
        let of = |phase: fn(Phase) -> bool, operations: &[Operation]| {
            let wanted = records.iter().filter(|r| operations.contains(&r.operation) && phase(r.label.phase));
            let mut dtypes: Vec<_> = wanted.map(|record| record.dtype).collect();
            dtypes.dedup();
            dtypes
        };
        let in_step = |phase| matches!(phase, Phase::Forward | Phase::Backward);
        Ok((
            of(in_step, &[Operation::AllGather]),
            of(in_step, &[Operation::ReduceScatter, Operation::AllReduce]),
        ))
    });
    run.same_on_all(results)
}

#[test]
fn what_is_on_the_wire_has_the_dtypes_of_the_policy() {
    for strategy in [Strategy::FullShard, Strategy::HybridShard, Strategy::NoShard] {
        for compute in [DType::F32, DType::BF16] {
            for reduce in [DType::F32, DType::BF16] {
                let mut run = Run::new(strategy, 4);
                run.shard_size = strategy.is_hybrid().then_some(2);
                (run.policy.compute_dtype, run.policy.reduce_dtype) = (compute, reduce);
                let gathers = if strategy == Strategy::NoShard { vec![] } else { vec![compute] };
                assert_eq!(dtypes(&run), (gathers, vec![reduce]), "{} {compute}", run.name());
            }
        }
    }
}
