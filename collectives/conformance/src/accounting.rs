//! Checks that records and totals are exact, and the same for all backends.

use crate::*;
use kiln_collectives::{Buffer, Communicator, DType, Label, Operation, Phase, Total};
use std::sync::Arc;

/// Calls every operation, on a world of 4 and on its pairs.
pub fn program(member: &dyn Communicator) {
    let rank = member.rank();
    let pair = member.split("pair", Some(rank as u32 / 2), rank as i64 % 2);
    let pair = pair.unwrap().unwrap();
    for _ in 0..3 {
        let shard = Arc::new(Buffer::zeros(DType::BF16, 10));
        let output = Buffer::zeros(DType::BF16, 20);
        let forward = Label::new("block 0", Phase::Forward);
        let work = pair.all_gather(forward, Arc::clone(&shard), output);
        work.wait(PATIENCE).unwrap();
        let full = Arc::new(Buffer::zeros(DType::F32, 40));
        let output = Buffer::zeros(DType::F32, 10);
        let backward = Label::new("block 0", Phase::Backward);
        let work = member.reduce_scatter(backward, full, output);
        work.wait(PATIENCE).unwrap();
    }
    let loss = Label::new("loss", Phase::Loss);
    let work = member.all_reduce(loss.clone(), Buffer::zeros(DType::F64, 1));
    work.wait(PATIENCE).unwrap();
    member.barrier(loss).wait(PATIENCE).unwrap();
    let init = Label::new("weights", Phase::Init);
    let work = member.broadcast(init, Buffer::zeros(DType::F32, 5), 1);
    work.wait(PATIENCE).unwrap();
}

pub fn expected_totals(rank: usize) -> Vec<Total> {
    let total = |operation, scope: &str, phase, group: &str, calls, bytes_sent| Total {
        operation,
        scope: scope.into(),
        phase,
        group: group.into(),
        calls,
        bytes_sent,
    };
    use Operation::*;
    // The ring of the broadcast runs 1, 2, 3, 0.
    let broadcast = if rank == 0 { 0 } else { 20 };
    vec![
        total(AllGather, "block 0", Phase::Forward, "pair", 3, 3 * 20),
        total(ReduceScatter, "block 0", Phase::Backward, "world", 3, 3 * 3 * 40),
        total(AllReduce, "loss", Phase::Loss, "world", 1, 12),
        total(Broadcast, "weights", Phase::Init, "world", 1, broadcast),
        total(Barrier, "loss", Phase::Loss, "world", 1, 0),
        total(Split, "pair", Phase::Init, "world", 1, 0),
    ]
}

pub fn totals_are_exact_on_every_backend(suite: &Suite) {
    for world in [suite.world(4), suite.delayed(4, 2), fake(4, &[("pair", 2)])] {
        on_each_rank(&world, |member| program(member.as_ref()));
        for member in &world {
            let recorder = member.recorder();
            let totals = expected_totals(member.rank());
            let bytes: u64 = totals.iter().map(|total| total.bytes_sent).sum();
            assert_eq!(recorder.totals(), totals, "{}", member.backend());
            assert_eq!(recorder.bytes_sent(), bytes);
            let count = |phase| recorder.count(Operation::ReduceScatter, phase);
            assert_eq!(count(None), 3);
            assert_eq!(count(Some(Phase::Backward)), 3);
            assert_eq!(count(Some(Phase::Forward)), 0);
            recorder.reset_totals();
            assert_eq!((recorder.bytes_sent(), count(None)), (0, 0));
        }
    }
}

pub fn records_hold_every_detail(suite: &Suite) {
    for world in [suite.world(4), fake(4, &[("pair", 2)])] {
        on_each_rank(&world, |member| program(member.as_ref()));
        for member in &world {
            let records = member.recorder().records();
            assert_eq!(records.len(), 10);
            for record in &records {
                assert!(record.enqueued.is_some());
                assert!(record.enqueued <= record.started);
                assert!(record.started <= record.finished);
            }
            let scatter = &records[2];
            assert_eq!(scatter.operation, Operation::ReduceScatter);
            assert_eq!(scatter.label, Label::new("block 0", Phase::Backward));
            assert_eq!((scatter.dtype, scatter.count), (DType::F32, 40));
            assert_eq!((scatter.sequence, &*scatter.group), (1, "world"));
            assert_eq!(scatter.bytes_sent, 120);
            let gather = &records[1];
            assert_eq!((gather.sequence, &*gather.group), (0, "pair"));
            assert_eq!((gather.dtype, gather.count), (DType::BF16, 20));
        }
    }
}

pub fn failed_operations_stay_unfinished(suite: &Suite) {
    let world = suite.world(2);
    on_each_rank(&world, |member| {
        member.barrier(label("good")).wait(PATIENCE).unwrap();
        let unit = ["left", "right"][member.rank()];
        assert!(member.barrier(label(unit)).wait(PATIENCE).is_err());
        let records = member.recorder().records();
        let finished: Vec<bool> = records.iter().map(|r| r.finished.is_some()).collect();
        assert_eq!(finished, [true, false]);
    });
}

pub fn capacity_limits_records_but_not_totals(suite: &Suite) {
    let world = suite.world_with(2, Settings { recorder_capacity: 4, ..Settings::default() });
    on_each_rank(&world, |member| {
        for _ in 0..10 {
            member.barrier(label("b")).wait(PATIENCE).unwrap();
        }
        let recorder = member.recorder();
        let sequences: Vec<u64> = recorder.records().iter().map(|r| r.sequence).collect();
        assert_eq!(sequences, [6, 7, 8, 9]);
        assert_eq!(recorder.count(Operation::Barrier, None), 10);
    });
}
