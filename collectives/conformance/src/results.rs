//! Checks that every operation returns the same bits as a sequential reference.

use crate::*;
use half::{bf16, f16};
use kiln_collectives::{Buffer, Communicator, DType};
use std::collections::HashSet;
use std::sync::Arc;

const WORLD_SIZES: [usize; 5] = [1, 2, 3, 4, 8];

/// Runs every operation with shards of `len` elements, all in flight together.
pub fn check_operations<T: TestElement>(world: &[Arc<dyn Communicator>], len: usize) {
    let world_size = world[0].world_size();
    let inputs: Vec<Vec<T>> = (0..world_size).map(|rank| values(rank, len * world_size)).collect();
    let sum = reference_sum(&inputs);
    let gathered: Vec<T> = inputs.iter().flat_map(|input| &input[..len]).copied().collect();

    on_each_rank(world, |member| {
        let rank = member.rank();
        let own = &inputs[rank];
        let mut shard = Arc::new(Buffer::from_slice(&own[..len]));
        let mut full = Arc::new(Buffer::from_slice(own));
        let root = len % world_size;

        let gather =
            member.all_gather(label("gather"), Arc::clone(&shard), Buffer::zeros(T::DTYPE, len * world_size));
        let scatter =
            member.reduce_scatter(label("scatter"), Arc::clone(&full), Buffer::zeros(T::DTYPE, len));
        let reduce = member.all_reduce(label("reduce"), Buffer::from_slice(own));
        // A length that the world size does not divide, unless it is 1.
        let odd = len * world_size - (len * world_size).min(1);
        let reduce_odd = member.all_reduce(label("odd"), Buffer::from_slice(&own[..odd]));
        let broadcast = member.broadcast(label("broadcast"), Buffer::from_slice(own), root);
        let barrier = member.barrier(label("barrier"));

        assert_bits(&gather.wait(PATIENCE).unwrap(), &gathered, "all_gather");
        assert!(Arc::get_mut(&mut shard).is_some());
        let slice = scatter.wait(PATIENCE).unwrap();
        assert!(Arc::get_mut(&mut full).is_some());
        assert_bits(&slice, &sum[rank * len..(rank + 1) * len], "reduce_scatter");
        let reduced = reduce.wait(PATIENCE).unwrap();
        assert_bits(&reduced, &sum, "all_reduce");
        assert_bits(&reduce_odd.wait(PATIENCE).unwrap(), &sum[..odd], "odd all_reduce");
        assert_bits(&broadcast.wait(PATIENCE).unwrap(), &inputs[root], "broadcast");
        assert!(barrier.wait(PATIENCE).unwrap().is_empty());

        let output = Buffer::zeros(T::DTYPE, len * world_size);
        let regathered = member.all_gather(label("again"), Arc::new(slice), output);
        let regathered = regathered.wait(PATIENCE).unwrap();
        assert_eq!(regathered.as_bytes(), reduced.as_bytes(), "reduce_scatter + all_gather");

        let output = Buffer::unallocated(T::DTYPE, len * world_size);
        let shared = member.all_gather(label("shared"), Arc::clone(&shard), output);
        assert_bits(&shared.wait(PATIENCE).unwrap(), &gathered, "all_gather without memory");
        assert!(Arc::get_mut(&mut shard).is_some());
    });
}

fn check_all_types(make: impl Fn(usize) -> World) {
    for world_size in WORLD_SIZES {
        let world = make(world_size);
        for len in [0, 1, 1023] {
            check_operations::<f64>(&world, len);
            check_operations::<f32>(&world, len);
            check_operations::<f16>(&world, len);
            check_operations::<bf16>(&world, len);
        }
    }
}

pub fn operations_match_the_reference(suite: &Suite) {
    check_all_types(|world_size| suite.world(world_size));
}

pub fn operations_match_the_reference_under_delays(suite: &Suite) {
    check_all_types(|world_size| suite.delayed(world_size, world_size as u64));
}

pub fn large_buffers_match_the_reference(suite: &Suite) {
    for world_size in WORLD_SIZES {
        check_operations::<f32>(&suite.world(world_size), 10_000_000 / world_size);
    }
}

pub fn shared_memory_gathers_into_one_buffer(suite: &Suite) {
    let world = suite.world(3);
    for len in [5, 64] {
        let gathered = on_each_rank(&world, |member| {
            let own = Arc::new(Buffer::from_slice(&values::<f32>(member.rank(), len)));
            let output = Buffer::unallocated(DType::F32, 3 * len);
            member.all_gather(label("whole"), own, output).wait(PATIENCE).unwrap()
        });
        let places: HashSet<_> = gathered.iter().map(|buffer| buffer.as_bytes().as_ptr()).collect();
        assert_eq!(places.len(), if world[0].shares_gathers() { 1 } else { 3 });
    }
}

pub fn counts_smaller_than_the_world(suite: &Suite) {
    let world = suite.world(8);
    for len in 0..8 {
        let inputs: Vec<Vec<f32>> = (0..8).map(|rank| values(rank, len)).collect();
        let sum = reference_sum(&inputs);
        on_each_rank(&world, |member| {
            let buffer = Buffer::from_slice(&inputs[member.rank()]);
            let result = member.all_reduce(label("few"), buffer).wait(PATIENCE).unwrap();
            assert_bits(&result, &sum, "all_reduce");
        });
    }
}

pub fn bytes_can_be_moved(suite: &Suite) {
    on_each_rank(&suite.world(3), |member| {
        let own = Arc::new(Buffer::from_slice(&[member.rank() as u8; 5]));
        let output = Buffer::zeros(DType::U8, 15);
        let gathered = member.all_gather(label("bytes"), own, output);
        let gathered = gathered.wait(PATIENCE).unwrap();
        assert_eq!(gathered.as_bytes(), [[0u8; 5], [1; 5], [2; 5]].concat());
        let buffer = Buffer::from_slice(&[member.rank() as u8]);
        let sent = member.broadcast(label("byte"), buffer, 2);
        assert_eq!(sent.wait(PATIENCE).unwrap().as_bytes(), [2]);
    });
}

pub fn bits_do_not_depend_on_timing(suite: &Suite) {
    let run = |world: World| {
        on_each_rank(&world, |member| {
            let own = values::<f32>(member.rank(), 4 * 1023);
            let reduced = member.all_reduce(label("a"), Buffer::from_slice(&own));
            let scattered = member.reduce_scatter(
                label("b"),
                Arc::new(Buffer::from_slice(&own)),
                Buffer::zeros(DType::F32, 1023),
            );
            let reduced = reduced.wait(PATIENCE).unwrap();
            let scattered = scattered.wait(PATIENCE).unwrap();
            [reduced.as_bytes(), scattered.as_bytes()].concat()
        })
    };
    let expected = run(suite.world(4));
    for seed in 0..20 {
        assert_eq!(run(suite.delayed(4, seed)), expected, "seed {seed}");
    }
}
