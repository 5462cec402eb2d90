//! Checks that every failure reaches every rank, with a message that says where to look.

use crate::*;
use kiln_collectives::{
    Argument, ArgumentError, Buffer, CallSite, CommError, Communicator, DType, Finding, Label, Operation,
    Phase, Work,
};
use kiln_testkit::{Meeting, wait_until};
use std::sync::Arc;
use std::time::Duration;

/// Rank 1 of 3 issues a different call; returns the error of each rank. Checks that the group stays failed.
pub fn diverge(
    world: World,
    common: impl Fn(&dyn Communicator) -> Work + Sync,
    other: impl Fn(&dyn Communicator) -> Work + Sync,
) -> Vec<CommError> {
    on_each_rank(&world, |member| {
        let call: &(dyn Fn(&dyn Communicator) -> Work + Sync) =
            if member.rank() == 1 { &other } else { &common };
        let error = call(member.as_ref()).wait(PATIENCE).unwrap_err();
        let later = member.barrier(label("later")).wait(PATIENCE).unwrap_err();
        if matches!(error, CommError::Mismatch { .. }) {
            assert_eq!(later, error);
        } else {
            assert!(matches!(later, CommError::Mismatch { .. }), "{later}");
        }
        error
    })
}

pub fn reduce(module: &str, dtype: DType, len: usize) -> impl Fn(&dyn Communicator) -> Work {
    move |member| member.all_reduce(label(module), Buffer::zeros(dtype, len))
}

fn broadcast(root: usize) -> impl Fn(&dyn Communicator) -> Work {
    move |member| member.broadcast(label("weights"), Buffer::zeros(DType::F32, 4), root)
}

#[track_caller]
pub fn check_mismatch(errors: &[CommError], common: &str, other: &str) {
    let expected = format!(
        "operation 0 of group \"world\" differs between ranks: ranks 0, 2 called {common}; \
         rank 1 called {other}; make every rank issue the same operations in the same order"
    );
    for error in errors {
        assert!(matches!(error, CommError::Mismatch { sequence: 0, .. }));
        assert_eq!(error.to_string(), expected);
    }
}

pub fn different_calls_fail_on_every_rank(suite: &Suite) {
    let common = "all_reduce of 4 f32 for \"block 0\" (forward)";
    let reduce_f32 = || reduce("block 0", DType::F32, 4);
    for seed in [None, Some(1)] {
        let errors = diverge(suite.seeded(3, seed), reduce_f32(), |member| member.barrier(label("block 0")));
        check_mismatch(&errors, common, "barrier for \"block 0\" (forward)");

        let errors = diverge(suite.seeded(3, seed), reduce_f32(), reduce("block 0", DType::BF16, 4));
        check_mismatch(&errors, common, "all_reduce of 4 bf16 for \"block 0\" (forward)");

        let errors = diverge(suite.seeded(3, seed), reduce_f32(), reduce("block 0", DType::F32, 5));
        check_mismatch(&errors, common, "all_reduce of 5 f32 for \"block 0\" (forward)");

        let errors = diverge(suite.seeded(3, seed), reduce_f32(), reduce("block 1", DType::F32, 4));
        check_mismatch(&errors, common, "all_reduce of 4 f32 for \"block 1\" (forward)");

        let errors = diverge(suite.seeded(3, seed), broadcast(0), broadcast(2));
        check_mismatch(
            &errors,
            "broadcast of 4 f32 from root 0 for \"weights\" (forward)",
            "broadcast of 4 f32 from root 2 for \"weights\" (forward)",
        );
    }
}

pub fn a_different_phase_alone_is_no_mismatch(suite: &Suite) {
    on_each_rank(&suite.world(2), |member| {
        let phases = [Phase::Forward, Phase::Backward];
        let label = Label::new("block", phases[member.rank()]);
        member.barrier(label).wait(PATIENCE).unwrap();
    });
}

/// Checks that rank 1 gets `problem`, and that the other ranks get a mismatch that names rank 1.
#[track_caller]
pub fn check_invalid(errors: &[CommError], problem: ArgumentError) {
    for (rank, error) in errors.iter().enumerate() {
        let message = error.to_string();
        assert!(message.contains(&problem.to_string()), "{message}");
        match error {
            CommError::Invalid { site: CallSite { rank: 1, .. }, problem: found } if rank == 1 => {
                assert_eq!(*found, problem);
                assert!(message.contains("on rank 1"), "{message}");
            }
            CommError::Mismatch { calls, .. } if rank != 1 => {
                let problems: Vec<_> = calls.iter().flatten().map(|call| call.problem).collect();
                assert_eq!(problems, [None, Some(problem), None]);
                assert!(message.contains("rank 1 called"), "{message}");
                assert!(message.contains("[invalid: "), "{message}");
            }
            _ => panic!("rank {rank}: {error:?}"),
        }
    }
}

pub fn invalid_arguments_of_one_rank_fail_every_rank(suite: &Suite) {
    let f32s = |len| Buffer::zeros(DType::F32, len);
    let gather = |output: usize| {
        move |member: &dyn Communicator| member.all_gather(label("p"), Arc::new(f32s(2)), f32s(output))
    };
    let errors = diverge(suite.world(3), gather(6), gather(5));
    let length = |buffer, expected, actual| ArgumentError::Length { buffer, expected, actual };
    check_invalid(&errors, length(Argument::Output, 6, 5));

    let scatter = |input: usize| {
        move |member: &dyn Communicator| member.reduce_scatter(label("p"), Arc::new(f32s(input)), f32s(2))
    };
    let errors = diverge(suite.world(3), scatter(6), scatter(7));
    check_invalid(&errors, length(Argument::Input, 6, 7));

    let errors = diverge(suite.world(3), gather(6), |member| {
        member.all_gather(label("p"), Arc::new(f32s(2)), Buffer::zeros(DType::F16, 6))
    });
    check_invalid(&errors, ArgumentError::DType { input: DType::F32, output: DType::F16 });

    let errors = diverge(suite.world(3), broadcast(0), broadcast(3));
    check_invalid(&errors, ArgumentError::Root { root: 3, world_size: 3 });
}

pub fn check_byte_sums(world: &[Arc<dyn Communicator>]) {
    on_each_rank(world, |member| {
        let work = reduce("bytes", DType::U8, 4)(member.as_ref());
        let error = work.wait(PATIENCE).unwrap_err();
        let problem = ArgumentError::NoSum { dtype: DType::U8 };
        let rank = member.rank();
        assert!(
            matches!(&error, CommError::Invalid { site: CallSite { rank: r, .. }, problem: p }
                if *r == rank && *p == problem),
            "{error}"
        );
        assert!(error.to_string().contains("u8 cannot be summed"), "{error}");
    });
}

pub fn byte_sums_are_refused_on_every_rank(suite: &Suite) {
    check_byte_sums(&suite.world(3));
    check_byte_sums(&fake(3, &[]));
}
pub fn abort_reaches_pending_and_later_operations(suite: &Suite) {
    on_each_rank(&suite.world(3), |member| {
        let pending = (member.rank() != 2).then(|| member.barrier(label("pending")));
        if member.rank() == 2 {
            member.abort("out of memory");
        }
        let later = member.barrier(label("later"));
        for work in pending.into_iter().chain([later]) {
            let error = work.wait(PATIENCE).unwrap_err();
            let message = error.to_string();
            let CommError::Aborted { site, by } = error else { panic!("{error:?}") };
            assert_eq!((site.operation, by.rank, by.world_rank), (Operation::Barrier, 2, 2));
            assert_eq!(&*by.reason, "out of memory");
            assert!(message.contains("aborted by rank 2") && message.contains("out of memory"), "{message}");
        }
    });
}

pub fn abort_reaches_all_groups_of_the_world(suite: &Suite) {
    let world = suite.world(4);
    on_each_rank(&world, |member| {
        let rank = member.rank();
        let pair = member.split("pair", Some(rank as u32 / 2), 0).unwrap().unwrap();
        let pending = (rank == 0).then(|| pair.barrier(label("pair")));
        if rank == 3 {
            pair.abort("disk full");
        }
        let later = member.barrier(label("world"));
        for work in pending.into_iter().chain([later]) {
            let error = work.wait(PATIENCE).unwrap_err();
            assert!(
                matches!(&error, CommError::Aborted { by, .. }
                    if (by.rank, by.world_rank, &*by.group) == (1, 3, "pair")),
                "{error}"
            );
        }
    });
}

pub fn timeout_names_the_missing_ranks(suite: &Suite) {
    let (called, timed_out) = (Meeting::of(4), Meeting::of(4));
    let errors = on_each_rank(&suite.world(4), |member| {
        let missing = matches!(member.rank(), 1 | 3);
        let mut input = Arc::new(Buffer::zeros(DType::F32, 2));
        let gather = || {
            let output = Buffer::zeros(DType::F32, 8);
            member.all_gather(label("block 3"), Arc::clone(&input), output)
        };
        let early = (!missing).then(gather);
        called.wait();
        let early = early.map(|work| work.wait(Duration::from_millis(20)).unwrap_err());
        timed_out.wait();
        let error = early.unwrap_or_else(|| gather().wait(PATIENCE).unwrap_err());
        assert!(Arc::get_mut(&mut input).is_some());
        assert_eq!(member.barrier(label("later")).wait(PATIENCE).unwrap_err(), error);
        error
    });
    for error in &errors {
        assert_eq!(error, &errors[0]);
        let CommError::TimedOut { site, missing, verdict, .. } = error else { panic!("{error:?}") };
        assert_eq!((site.operation, site.sequence), (Operation::AllGather, 0));
        assert!(matches!(site.rank, 0 | 2), "{}", site.rank);
        assert_eq!(missing, &[1, 3]);
        assert_eq!((verdict.finding, verdict.culprits.as_slice()), (Finding::Missing, &[1, 3][..]));
        let message = error.to_string();
        for part in [
            "all_gather 0 of group \"world\" for \"block 3\" (forward) timed out on rank",
            "after 20ms: ranks 1, 3 never entered #0 all_gather(block 3); ",
            "rank 3 has been in start for ",
            "; ranks 0, 2 wait",
        ] {
            assert!(message.contains(part), "{message}");
        }
    }
}

pub fn dropping_a_rank_frees_the_others(suite: &Suite) {
    for seed in [None, Some(5)] {
        let mut world = suite.seeded(3, seed);
        let leaving = world.remove(1);
        let called = Meeting::of(3);
        std::thread::scope(|scope| {
            scope.spawn(|| {
                called.wait();
                drop(leaving);
            });
            for member in &world {
                scope.spawn(|| {
                    let pending = member.barrier(label("pending"));
                    called.wait();
                    let later = member.barrier(label("later"));
                    for work in [pending, later] {
                        let error = work.wait(PATIENCE).unwrap_err();
                        assert!(matches!(&error, CommError::Aborted { by, .. } if by.rank == 1));
                        let message = error.to_string();
                        assert!(message.contains("rank 1 left the group"), "{message}");
                    }
                });
            }
        });
    }
}

pub fn work_left_behind_by_a_dropped_rank_fails(suite: &Suite) {
    let mut world = suite.world(2);
    let work = world[0].barrier(label("left behind"));
    world.remove(0);
    let error = work.wait(PATIENCE).unwrap_err();
    assert!(matches!(&error, CommError::Aborted { by, .. } if by.rank == 0));
}

pub fn deadlines_stand_still_while_a_rank_is_held(suite: &Suite) {
    let limit = Duration::from_millis(50);
    on_each_rank(&suite.world(2), |member| {
        let barrier = || member.barrier(label("held"));
        if member.rank() == 1 {
            member.hold(true);
            // Rank 0 is over its limit by then, no matter when it began to wait.
            wait_until("ten limits", || member.holds().total() >= 10 * limit);
            let work = barrier();
            work.wait(PATIENCE).unwrap();
            member.hold(false);
        } else {
            wait_until("the hold of rank 1", || member.holds().ranks() == [1]);
            barrier().wait(limit).unwrap();
        }
        assert!(member.failure().is_none());
    });
}
