//! Checks the ownership and lifetime of buffers and threads.

use crate::*;
use kiln_collectives::{Buffer, CommError, DType, RankView, Witness, WorkerStart, waits_for};
use std::cell::RefCell;
use std::sync::{Arc, Mutex};

pub fn inputs_are_unique_after_wait(suite: &Suite) {
    for seed in 0..10 {
        on_each_rank(&suite.delayed(4, seed), |member| {
            let mut shard = Arc::new(Buffer::from_slice(&[member.rank() as f32; 8]));
            let mut full = Arc::new(Buffer::from_slice(&[1.0f32; 32]));
            for round in 0..10 {
                let output = Buffer::zeros(DType::F32, 32);
                let gather = member.all_gather(label("gather"), Arc::clone(&shard), output);
                let output = Buffer::zeros(DType::F32, 8);
                let scatter = member.reduce_scatter(label("scatter"), Arc::clone(&full), output);
                let gathered = gather.wait(PATIENCE).unwrap();
                assert_eq!(Arc::strong_count(&shard), 1);
                // Overwriting the input immediately must not disturb a slower peer.
                let next = (member.rank() + 10 * (round + 1)) as f32;
                let own = Arc::get_mut(&mut shard).unwrap();
                own.as_mut_slice::<f32>().unwrap().fill(next);
                for (rank, slot) in gathered.as_slice::<f32>().unwrap().chunks(8).enumerate() {
                    assert_eq!(slot, [(rank + 10 * round) as f32; 8]);
                }
                let sum = scatter.wait(PATIENCE).unwrap();
                let own = Arc::get_mut(&mut full).unwrap();
                own.as_mut_slice::<f32>().unwrap().fill((round + 2) as f32);
                assert_eq!(sum.as_slice::<f32>().unwrap(), [4.0 * (round + 1) as f32; 8]);
            }
        });
    }
}

pub fn inputs_are_unique_after_a_mismatch(suite: &Suite) {
    on_each_rank(&suite.delayed(3, 1), |member| {
        let mut input = Arc::new(Buffer::zeros(DType::F32, 4));
        let output = Buffer::zeros(DType::F32, 12);
        let unit = ["same", "same", "other"][member.rank()];
        let work = member.all_gather(label(unit), Arc::clone(&input), output);
        assert!(work.wait(PATIENCE).is_err());
        assert!(Arc::get_mut(&mut input).is_some());
    });
}

pub fn operations_overlap_with_the_caller(suite: &Suite) {
    let mut world = suite.world(2);
    let second = world.remove(1);
    let first = world.remove(0);
    let pending = first.barrier(label("overlap"));
    assert!(!pending.is_done());
    let other = second.barrier(label("overlap"));
    pending.wait(PATIENCE).unwrap();
    other.wait(PATIENCE).unwrap();
}

thread_local! {
    static TOKEN: RefCell<Option<Arc<()>>> = const { RefCell::new(None) };
}

pub fn workers_live_as_long_as_communicators(suite: &Suite) {
    let token = Arc::new(());
    let ranks: Arc<Mutex<Vec<usize>>> = Arc::default();
    let (seen, given) = (Arc::clone(&ranks), Arc::clone(&token));
    let options = Settings {
        on_worker_start: Some(WorkerStart::new(move |rank| {
            seen.lock().unwrap().push(rank);
            TOKEN.set(Some(Arc::clone(&given)));
        })),
        ..Settings::default()
    };
    let world = suite.world_with(3, options);
    on_each_rank(&world, |member| {
        member.barrier(label("start")).wait(PATIENCE).unwrap();
        // Rank 2 becomes rank 0 of a group; its new worker still reports rank 2.
        let group = member.split("reversed", Some(0), -(member.rank() as i64));
        let group = group.unwrap().unwrap();
        group.barrier(label("start")).wait(PATIENCE).unwrap();
    });
    let mut seen = ranks.lock().unwrap().clone();
    seen.sort_unstable();
    assert_eq!(seen, [0, 0, 1, 1, 2, 2]);
    // The three workers of the split are gone with their communicators.
    assert_eq!(Arc::strong_count(&token), 2 + 3);
    drop(world);
    assert_eq!(Arc::strong_count(&token), 1);
}

pub fn a_panicking_worker_fails_the_group(suite: &Suite) {
    let options = Settings {
        on_worker_start: Some(WorkerStart::new(|rank| assert!(rank != 1, "deliberate panic"))),
        ..Settings::default()
    };
    let world = suite.world_with(3, options);
    on_each_rank(&world, |member| {
        let error = member.barrier(label("b")).wait(PATIENCE).unwrap_err();
        assert!(matches!(&error, CommError::Aborted { by, .. } if by.rank == 1), "{error}");
    });
}

pub fn communicators_drop_in_any_order(suite: &Suite) {
    for order in [[0, 1, 2], [2, 0, 1]] {
        let mut members: Vec<_> = suite.world(3).into_iter().map(Some).collect();
        for rank in order {
            members[rank] = None;
        }
    }
}

pub fn communicators_describe_themselves(suite: &Suite) {
    let described = format!("{:?}", suite.world(2)[1]);
    let expected =
        format!("Communicator {{ backend: \"{}\", name: \"world\", rank: 1, world_size: 2 }}", suite.name);
    assert_eq!(described, expected);
    assert_eq!(fake(3, &[])[2].backend(), "fake");
}

pub fn views_show_waits_and_outlive_ranks(suite: &Suite) {
    let world = suite.world(3);
    let pending = world[0].barrier(label("seen"));
    let views: Vec<_> = world.iter().map(|member| member.view()).collect();
    for (rank, view) in views.iter().enumerate() {
        assert_eq!((view.rank(), view.world_size(), view.flight(1).rank), (rank, 3, rank));
    }
    // With MPI, one process cannot ask the other ranks.
    if let Some(witnesses) = views[0].ask_all(PATIENCE) {
        assert!(witnesses.iter().all(|witness| matches!(witness, Witness::Answered(_))), "{witnesses:?}");
        assert_eq!([0, 1, 2].map(|rank| waits_for(&witnesses, rank)), [vec![1, 2], vec![], vec![]]);
    }
    let others: Vec<_> = world[1..].iter().map(|member| member.barrier(label("seen"))).collect();
    pending.wait(PATIENCE).unwrap();
    others.into_iter().for_each(|other| drop(other.wait(PATIENCE).unwrap()));
    assert!(views.iter().all(|view| waits(view) == 0));
    // Rank 0 last: it hosts the rendezvous.
    world.into_iter().rev().for_each(drop);
    assert_eq!(views[2].flight(9).records.len(), 1);
    views[0].ask_all(std::time::Duration::ZERO);
}

fn waits(view: &RankView) -> usize {
    view.flight(0).groups.iter().map(|group| group.pending.len()).sum()
}
