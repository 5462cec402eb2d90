//! Checks whose counterparts in the suite need all ranks in one process, because ranks wait for each other
//! through shared memory. Here, ranks wait for each other through a second world.

use kiln_collectives::{ArgumentError, Buffer, CallSite, CommError, Communicator, DType, Finding, Operation};
use kiln_conformance::{PATIENCE, World, accounting, assert_bits, label, reference_sum, values};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

/// Waits for all ranks.
fn meet(meeting: &World) {
    meeting[0].barrier(label("meet")).wait(PATIENCE).unwrap();
}

pub fn check_few_elements(world: &World) {
    let member = &world[0];
    for len in 0..member.world_size() {
        let inputs: Vec<Vec<f32>> = (0..member.world_size()).map(|rank| values(rank, len)).collect();
        let buffer = Buffer::from_slice(&inputs[member.rank()]);
        let result = member.all_reduce(label("few"), buffer).wait(PATIENCE).unwrap();
        assert_bits(&result, &reference_sum(&inputs), "all_reduce");
    }
}

pub fn check_bytes(world: &World) {
    let member = &world[0];
    let size = member.world_size();
    let own = Arc::new(Buffer::from_slice(&[member.rank() as u8; 5]));
    let output = Buffer::zeros(DType::U8, 5 * size);
    let gathered = member.all_gather(label("bytes"), own, output).wait(PATIENCE).unwrap();
    let expected: Vec<u8> = (0..size).flat_map(|rank| [rank as u8; 5]).collect();
    assert_eq!(gathered.as_bytes(), expected);
    let buffer = Buffer::from_slice(&[member.rank() as u8]);
    let sent = member.broadcast(label("byte"), buffer, size - 1).wait(PATIENCE).unwrap();
    assert_eq!(sent.as_bytes(), [size as u8 - 1]);
}

/// A wait returns only when its inputs may be overwritten, even if the peers are far behind.
pub fn check_lifetime(world: &World) {
    let member = &world[0];
    let size = member.world_size();
    let mut shard = Arc::new(Buffer::from_slice(&[member.rank() as f32; 8]));
    for round in 0..10 {
        let output = Buffer::zeros(DType::F32, 8 * size);
        let gather = member.all_gather(label("gather"), Arc::clone(&shard), output);
        let gathered = gather.wait(PATIENCE).unwrap();
        let own = Arc::get_mut(&mut shard).expect("the input is free");
        own.as_mut_slice::<f32>().unwrap().fill((member.rank() + 10 * (round + 1)) as f32);
        for (rank, slot) in gathered.as_slice::<f32>().unwrap().chunks(8).enumerate() {
            assert_eq!(slot, [(rank + 10 * round) as f32; 8]);
        }
    }
}

pub fn check_records(world: &World) {
    let member = &world[0];
    assert_eq!(member.backend(), "mpi");
    assert_eq!(member.name(), "world");
    assert_eq!(member.nodes(), vec![0; member.world_size()]);
    member.barrier(label("good")).wait(PATIENCE).unwrap();
    let records = member.recorder().records();
    assert_eq!(records.len(), 1);
    assert!(records[0].finished.is_some());
    assert_eq!(member.flight().backend, "mpi");
}

/// The rank whose wait times out first names the ranks that never called; all ranks get the same error.
pub fn check_time_out(world: &World, meeting: &World) {
    let member = &world[0];
    let size = member.world_size();
    let last = size - 1;
    let mut input = Arc::new(Buffer::zeros(DType::F32, 2));
    let gather = || {
        let output = Buffer::zeros(DType::F32, 2 * size);
        member.all_gather(label("block 3"), Arc::clone(&input), output)
    };
    let early = (member.rank() != last).then(gather);
    meet(meeting);
    let early = early.map(|work| work.wait(Duration::from_millis(20)).unwrap_err());
    meet(meeting);
    let error = early.unwrap_or_else(|| gather().wait(PATIENCE).unwrap_err());
    assert!(Arc::get_mut(&mut input).is_some());
    assert_eq!(member.barrier(label("later")).wait(PATIENCE).unwrap_err(), error);
    let CommError::TimedOut { site, missing, verdict, .. } = &error else {
        panic!("{error:?}");
    };
    assert_eq!((site.operation, site.sequence), (Operation::AllGather, 0));
    assert_eq!(missing.as_slice(), &[last][..]);
    assert!(site.rank != last);
    assert_eq!((verdict.finding, verdict.culprits.as_slice()), (Finding::Missing, &[last][..]));
    assert_eq!(member.flight().verdict.as_ref(), Some(verdict.as_ref()));
    // The other world is unaffected.
    meet(meeting);
}

/// The other ranks wait for a rank that is late, but within the limit.
pub fn check_slow_rank(world: &World) {
    let member = &world[0];
    if member.rank() == 0 {
        thread::sleep(Duration::from_millis(300));
    }
    let sum = member.all_reduce(label("late"), Buffer::from_slice(&[1.0f64])).wait(PATIENCE);
    assert_eq!(sum.unwrap().as_slice::<f64>().unwrap(), [member.world_size() as f64]);
}

pub fn check_abort(world: &World) {
    let member = &world[0];
    let last = member.world_size() - 1;
    let pending = (member.rank() != last).then(|| member.barrier(label("pending")));
    if member.rank() == last {
        member.abort("out of memory");
    }
    let later = member.barrier(label("later"));
    for work in pending.into_iter().chain([later]) {
        match work.wait(PATIENCE).unwrap_err() {
            CommError::Aborted { by, .. } => {
                assert_eq!((by.rank, by.world_rank, &*by.reason), (last, last, "out of memory"));
            }
            error => panic!("{error}"),
        }
    }
}

/// An abort reaches groups that the aborting rank does not belong to.
pub fn check_abort_across_groups(world: &World) {
    let member = &world[0];
    let rank = member.rank();
    let pair = member.split("pair", Some(rank as u32 / 2), 0).unwrap().unwrap();
    let pending = (rank == 0).then(|| pair.barrier(label("pair")));
    if rank == 3 {
        pair.abort("disk full");
    }
    let later = member.barrier(label("world"));
    for work in pending.into_iter().chain([later]) {
        let error = work.wait(PATIENCE).unwrap_err();
        let CommError::Aborted { by, .. } = &error else {
            panic!("{error}");
        };
        assert_eq!((by.rank, by.world_rank, &*by.group), (1, 3, "pair"));
    }
}

/// A rank that leaves releases the ranks that wait for it.
pub fn check_leaving(world: World, meeting: &World) {
    let member = Arc::clone(&world[0]);
    let last = member.world_size() - 1;
    drop(world);
    if member.rank() == last {
        meet(meeting);
        drop(member);
        return;
    }
    let pending = member.barrier(label("pending"));
    meet(meeting);
    for work in [pending, member.barrier(label("later"))] {
        let error = work.wait(PATIENCE).unwrap_err();
        assert!(matches!(&error, CommError::Aborted { by, .. } if by.rank == last), "{error}");
        assert!(error.to_string().contains("left the group"), "{error}");
    }
}

/// Arguments that are invalid on one rank are reported as invalid there and as a mismatch elsewhere. For
/// three ranks.
pub fn check_invalid(world: &World) {
    let member = &world[0];
    let output = if member.rank() == 1 { 5 } else { 6 };
    let input = Arc::new(Buffer::zeros(DType::F32, 2));
    let work = member.all_gather(label("p"), input, Buffer::zeros(DType::F32, output));
    let error = work.wait(PATIENCE).unwrap_err();
    match &error {
        CommError::Invalid { site: CallSite { rank: 1, .. }, problem: ArgumentError::Length { .. } }
            if member.rank() == 1 => {}
        CommError::Mismatch { calls, .. } if member.rank() != 1 => {
            let problems = calls.iter().flatten().map(|call| call.problem.is_some());
            assert_eq!(problems.collect::<Vec<_>>(), [false, true, false]);
        }
        _ => panic!("{error:?}"),
    }
}

/// Totals equal those of every other backend. For four ranks.
pub fn check_totals(world: &World) {
    let member: &dyn Communicator = world[0].as_ref();
    accounting::program(member);
    assert_eq!(member.recorder().totals(), accounting::expected_totals(member.rank()));
}
