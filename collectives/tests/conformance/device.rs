//! Buffers on a GPU: ranks as threads that share one, through wgpu. Without a GPU, Mesa's lavapipe is
//! sufficient.

use cubecl::client::Client;
use half::{bf16, f16};
use kiln_collectives::{ArgumentError, Buffer, CommError, Communicator, DType, Element, Location};
use kiln_conformance::failures::{check_invalid, check_mismatch, diverge};
use kiln_conformance::{
    PATIENCE, Settings, TestElement, World, assert_bits, label, on_each_rank, reference_sum, values,
};
use std::sync::Arc;

const WORLD_SIZES: [usize; 4] = [1, 2, 3, 4];

fn world(world_size: usize) -> World {
    crate::world(world_size, Settings::default())
}

fn delayed(world_size: usize, seed: u64) -> World {
    crate::world(world_size, Settings { delay_seed: Some(seed), ..Settings::default() })
}

fn client() -> Client {
    let client = cubecl::Device::Wgpu(cubecl::wgpu::WgpuDevice::default()).client();
    assert!(client.name().starts_with("wgpu"), "{}", client.name());
    client
}

fn on_device<T: Element>(client: &Client, values: &[T]) -> Buffer {
    let buffer = Buffer::from_slice(values).to_device(client);
    assert_eq!(buffer.location(), Location::Device);
    buffer
}

/// Returns a buffer on the GPU with contents that no result can have.
fn poisoned(client: &Client, dtype: DType, len: usize) -> Buffer {
    let mut poison = Buffer::zeros(dtype, len);
    poison.as_bytes_mut().fill(0x5a);
    poison.to_device(client)
}

#[track_caller]
fn assert_device_bits<T: TestElement>(actual: &Buffer, expected: &[T], what: &str) {
    assert_eq!(actual.location(), Location::Device, "{what}");
    assert_bits(&actual.to_host().unwrap(), expected, what);
}

/// Runs the operations that only move data, all in flight together, with shards of `len` elements.
fn check_moves<T: TestElement>(world: &[Arc<dyn Communicator>], len: usize) {
    let (client, world_size) = (client(), world[0].world_size());
    let inputs: Vec<Vec<T>> = (0..world_size).map(|rank| values(rank, len)).collect();
    let gathered = inputs.concat();
    on_each_rank(world, |member| {
        let own = &inputs[member.rank()];
        let mut shard = Arc::new(on_device(&client, own));
        let output = poisoned(&client, T::DTYPE, len * world_size);
        let gather = member.all_gather(label("gather"), Arc::clone(&shard), output);
        let root = len % world_size;
        let broadcast = member.broadcast(label("broadcast"), on_device(&client, own), root);
        assert_device_bits(&gather.wait(PATIENCE).unwrap(), &gathered, "all_gather");
        assert!(Arc::get_mut(&mut shard).is_some());
        assert_device_bits(&broadcast.wait(PATIENCE).unwrap(), &inputs[root], "broadcast");
        assert_device_bits(&shard, own, "input of all_gather");
    });
}

/// Runs the operations that sum, all in flight together, with shards of `len` elements.
fn check_sums<T: TestElement>(world: &[Arc<dyn Communicator>], len: usize) {
    let (client, world_size) = (client(), world[0].world_size());
    let inputs: Vec<Vec<T>> = (0..world_size).map(|rank| values(rank, len * world_size)).collect();
    let sum = reference_sum(&inputs);
    on_each_rank(world, |member| {
        let rank = member.rank();
        let own = &inputs[rank];
        let full = Arc::new(on_device(&client, own));
        let output = poisoned(&client, T::DTYPE, len);
        let scatter = member.reduce_scatter(label("scatter"), Arc::clone(&full), output);
        let reduce = member.all_reduce(label("reduce"), on_device(&client, own));
        // A length that the world size does not divide, unless it is 1.
        let odd = len * world_size - (len * world_size).min(1);
        let reduce_odd = member.all_reduce(label("odd"), on_device(&client, &own[..odd]));
        // The same on the host, at the same time.
        let on_host = member.all_reduce(label("host"), Buffer::from_slice(own));

        let slice = scatter.wait(PATIENCE).unwrap();
        assert_device_bits(&slice, &sum[rank * len..(rank + 1) * len], "reduce_scatter");
        assert_device_bits(&full, own, "input of reduce_scatter");
        assert_eq!(Arc::strong_count(&full), 1);
        let reduced = reduce.wait(PATIENCE).unwrap();
        assert_device_bits(&reduced, &sum, "all_reduce");
        assert_device_bits(&reduce_odd.wait(PATIENCE).unwrap(), &sum[..odd], "odd all_reduce");
        assert_bits(&on_host.wait(PATIENCE).unwrap(), &sum, "all_reduce on the host");

        let output = poisoned(&client, T::DTYPE, len * world_size);
        let again = member.all_gather(label("again"), Arc::new(slice), output);
        let again = again.wait(PATIENCE).unwrap();
        assert_device_bits(&again, &sum, "reduce_scatter + all_gather");
    });
}

/// Checks sums of `T`, or, if the GPU has none, that every rank refuses them.
fn check_sums_or_refusal<T: TestElement>(world: &[Arc<dyn Communicator>], len: usize, has: bool) {
    if has {
        return check_sums::<T>(world, len);
    }
    let (client, dtype) = (client(), T::DTYPE);
    eprintln!("{dtype}: {} has no arithmetic for it; checking that it is refused", client.name());
    on_each_rank(world, |member| {
        let input = poisoned(&client, dtype, len);
        let error = member.all_reduce(label("sum"), input).wait(PATIENCE).unwrap_err();
        let problem = ArgumentError::NoDeviceSum { dtype };
        assert!(matches!(error, CommError::Invalid { problem: p, .. } if p == problem), "{error}");
    });
}

fn check_all_types(make: impl Fn(usize) -> World) {
    use cubecl::prelude::Scalar;
    let client = client();
    let has = |element| client.properties().supports_type(element);
    let has_f16 = has(f16::elem_type_native());
    for world_size in WORLD_SIZES {
        let world = make(world_size);
        for len in [0, 1, 2, 1023] {
            check_moves::<f64>(&world, len);
            check_moves::<f32>(&world, len);
            check_moves::<f16>(&world, len);
            check_moves::<bf16>(&world, len);
            check_sums::<f32>(&world, len);
            check_sums_or_refusal::<f16>(&world, len, has_f16);
            if !has_f16 {
                break;
            }
        }
        check_sums_or_refusal::<f64>(&make(world_size), 5, has(f64::elem_type_native()));
        check_sums_or_refusal::<bf16>(&make(world_size), 5, has(bf16::elem_type_native()));
    }
}

#[test]
fn device_operations_match_the_reference() {
    check_all_types(world);
}

#[test]
fn device_operations_match_under_delays() {
    check_all_types(|world_size| delayed(world_size, world_size as u64));
}

#[test]
fn device_bytes_can_be_moved_to_any_position() {
    let client = client();
    for world_size in WORLD_SIZES {
        for len in [0, 1, 2, 3, 4, 5, 6, 7, 1021] {
            on_each_rank(&world(world_size), |member| {
                let bytes =
                    |rank: usize| (0..len).map(move |index| (rank * 100 + index * 7 + 1) as u8).collect();
                let own: Vec<u8> = bytes(member.rank());
                let output = poisoned(&client, DType::U8, len * world_size);
                let input = Arc::new(on_device(&client, &own));
                let gathered = member.all_gather(label("bytes"), input, output);
                let gathered = gathered.wait(PATIENCE).unwrap().to_host().unwrap();
                let expected: Vec<Vec<u8>> = (0..world_size).map(bytes).collect();
                assert_eq!(gathered.as_bytes(), expected.concat());
                let work = member.broadcast(label("bytes"), on_device(&client, &own), 0);
                let sent = work.wait(PATIENCE).unwrap().to_host().unwrap();
                assert_eq!(sent.as_bytes(), expected[0]);
            });
        }
    }
}

#[test]
fn device_buffers_larger_than_a_kernel_sees() {
    // A kernel sees 64 MiB, and lavapipe has buffers of 128 MiB at most. First, operations that move bytes.
    let (client, len) = (client(), (16 << 20) + 3);
    let sent = values::<f32>(1, len);
    on_each_rank(&world(2), |member| {
        let buffer = match member.rank() {
            1 => on_device(&client, &sent),
            _ => poisoned(&client, DType::F32, len),
        };
        let received = member.broadcast(label("large"), buffer, 1).wait(PATIENCE).unwrap();
        assert_device_bits(&received, &sent, "broadcast");
    });
    // Then the running sum, which is twice as large, and inputs that start within a piece.
    check_sums::<f16>(&world(2), (16 << 20) + 5);
}

#[test]
fn device_ranges_are_read_and_written_alone() {
    let client = client();
    on_each_rank(&world(2), |member| {
        let own = values::<f32>(member.rank(), 300);
        let whole = on_device(&client, &own);
        let memory = whole.device().unwrap();
        // Elements 64 to 165 of 300.
        let handle = memory.handle().clone().offset_start(64 * 4).offset_end((300 - 165) * 4);
        let part = kiln_collectives::DeviceMemory::new(memory.client().clone(), handle);
        let part = Buffer::from_device(DType::F32, 101, part);
        assert_device_bits(&part.clone(), &own[64..165], "copy of a part");
        let reduced = member.all_reduce(label("part"), part).wait(PATIENCE).unwrap();
        let inputs = [values::<f32>(0, 300), values::<f32>(1, 300)];
        let sum = reference_sum(&inputs);
        assert_device_bits(&reduced, &sum[64..165], "part");
        let expected = [&own[..64], &sum[64..165], &own[165..]].concat();
        assert_device_bits(&whole, &expected, "whole");
    });
}

#[test]
fn device_work_is_ordered_without_the_host() {
    let client = client();
    for seed in 0..5 {
        on_each_rank(&delayed(3, seed), |member| {
            let input = |round: usize| values::<f32>(member.rank() + 10 * round, 4099);
            let gathered: Vec<Buffer> = (0..20)
                .map(|round| {
                    // The GPU makes the copy just before; its memory is reused just after.
                    let own = Arc::new(on_device(&client, &input(round)).clone());
                    let output = poisoned(&client, DType::F32, 3 * 4099);
                    let work = member.all_gather(label("gather"), Arc::clone(&own), output);
                    let gathered = work.wait(PATIENCE).unwrap();
                    drop(own);
                    drop(poisoned(&client, DType::F32, 4099));
                    gathered.clone()
                })
                .collect();
            for (round, gathered) in gathered.iter().enumerate() {
                let expected: Vec<f32> =
                    (0..3).flat_map(|rank| values::<f32>(rank + 10 * round, 4099)).collect();
                assert_device_bits(gathered, &expected, "gathered");
            }
        });
    }
}

#[test]
fn device_buffers_in_groups_that_were_split_off() {
    on_each_rank(&world(4), |member| {
        let rank = member.rank();
        let client = client();
        let row = member.split("shard", Some(rank as u32 / 2), rank as i64).unwrap().unwrap();
        let column = member.split("replicate", Some(rank as u32 % 2), 0).unwrap().unwrap();
        let own = values::<f32>(rank, 9);
        let output = poisoned(&client, DType::F32, 18);
        let gather = row.all_gather(label("gather"), Arc::new(on_device(&client, &own)), output);
        let reduce = column.all_reduce(label("reduce"), on_device(&client, &own));
        let first = rank / 2 * 2;
        let expected = [values::<f32>(first, 9), values(first + 1, 9)].concat();
        assert_device_bits(&gather.wait(PATIENCE).unwrap(), &expected, "row");
        let inputs = [values::<f32>(rank % 2, 9), values(rank % 2 + 2, 9)];
        let expected = reference_sum(&inputs);
        assert_device_bits(&reduce.wait(PATIENCE).unwrap(), &expected, "column");
    });
}

#[test]
fn ranks_must_agree_on_where_buffers_are() {
    let client = client();
    let reduce =
        |buffer: Buffer| move |member: &dyn Communicator| member.all_reduce(label("block 0"), buffer.clone());
    let here = Buffer::zeros(DType::F32, 4);
    let there = here.to_device(&client);
    let errors = diverge(world(3), reduce(there.clone()), reduce(here.clone()));
    let on_host = "all_reduce of 4 f32 for \"block 0\" (forward)";
    let on_gpu = "all_reduce of 4 f32 on a GPU for \"block 0\" (forward)";
    check_mismatch(&errors, on_gpu, on_host);
    check_mismatch(&diverge(world(3), reduce(here), reduce(there)), on_host, on_gpu);
}

#[test]
fn buffers_of_a_call_must_be_in_one_place() {
    let client = client();
    let here = |len| Buffer::zeros(DType::F32, len);
    let there = |len| poisoned(&client, DType::F32, len);
    let (host, device) = (Location::Host, Location::Device);
    let gather = |input: Buffer, output: Buffer| {
        let input = Arc::new(input);
        move |member: &dyn Communicator| member.all_gather(label("p"), Arc::clone(&input), output.clone())
    };
    let errors = diverge(world(3), gather(there(2), there(6)), gather(there(2), here(6)));
    check_invalid(&errors, ArgumentError::Location { input: device, output: host });
    let errors = diverge(world(3), gather(here(2), here(6)), gather(here(2), there(6)));
    check_invalid(&errors, ArgumentError::Location { input: host, output: device });
    let scatter = |input: Buffer, output: Buffer| {
        let input = Arc::new(input);
        move |member: &dyn Communicator| member.reduce_scatter(label("p"), Arc::clone(&input), output.clone())
    };
    let errors = diverge(world(3), scatter(here(6), here(2)), scatter(here(6), there(2)));
    check_invalid(&errors, ArgumentError::Location { input: host, output: device });
}

#[test]
fn ranges_and_changes_cross_to_the_host_and_back() {
    let client = client();
    let values: Vec<f32> = (0..10).map(|index| index as f32).collect();
    for buffer in [Buffer::from_slice(&values), on_device(&client, &values)] {
        let location = buffer.location();
        for range in [0..10, 0..1, 3..7, 9..10, 4..4, 10..10] {
            let part = buffer.range_to_host(range.clone()).unwrap();
            assert_eq!(part.as_slice::<f32>().unwrap(), &values[range]);
        }
        let changed = buffer.changed(|bytes| bytes[4..8].copy_from_slice(&9f32.to_ne_bytes()));
        let changed = changed.unwrap();
        assert_eq!(changed.location(), location);
        let expected = [&[0.0, 9.0], &values[2..]].concat();
        assert_eq!(changed.to_host().unwrap().as_slice::<f32>().unwrap(), expected);
        assert_eq!(buffer.to_host().unwrap().as_slice::<f32>().unwrap(), values);
        let room = buffer.like(3);
        assert_eq!((room.location(), room.len(), room.dtype()), (location, 3, DType::F32));
    }
    // Elements of 16 bits, two per word.
    let halves: Vec<bf16> = (0..7).map(|index| bf16::from_f32(index as f32)).collect();
    let buffer = on_device(&client, &halves);
    for range in [0..7, 2..7, 2..5, 4..5] {
        let part = buffer.range_to_host(range.clone()).unwrap();
        assert_eq!(part.as_slice::<bf16>().unwrap(), &halves[range]);
    }
}
