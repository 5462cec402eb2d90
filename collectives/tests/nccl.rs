//! NCCL as a transport between GPUs: behaviour that is visible without a GPU, and a world of one rank for
//! machines with a GPU, or with stand-ins for the driver and NCCL.
#![cfg(feature = "cuda")]

use cubecl::{MemoryScope, prelude::Client};
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use half::{bf16, f16};
use kiln_collectives::nccl::{self, NcclError, NcclOptions};
use kiln_collectives::tcp::{JoinOptions, TcpCommunicator};
use kiln_collectives::{
    ArgumentError, Buffer, CallSite, CommError, Communicator, DType, Element, Finding, Label,
    LocalCommunicator, LocalGroup, Operation, Phase,
};
use kiln_testkit::{PATIENCE, output_of};
use std::env;
use std::net::TcpListener;
use std::process::{Command, Stdio};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

fn label(scope: &str) -> Label {
    Label::new(scope, Phase::Forward)
}

/// Calls `attach` on every rank and returns the errors.
fn attach(world_size: usize, device: usize) -> Vec<NcclError> {
    thread::scope(|scope| {
        let ranks: Vec<_> = LocalGroup::new(world_size)
            .into_iter()
            .map(|member| scope.spawn(move || nccl::attach(&member, &NcclOptions::new(device)).unwrap_err()))
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    })
}

/// Creates a world of one rank with NCCL.
fn world_of_one(options: &NcclOptions) -> LocalCommunicator {
    let world = LocalGroup::new(1).remove(0);
    nccl::attach(&world, options).unwrap();
    world
}

#[test]
fn a_gpu_that_is_not_there_is_named() {
    let count = CudaRuntime::enumerate_all_devices().len();
    for error in [attach(1, 999), attach(3, 999)].concat() {
        let message = error.to_string();
        if count == 0 {
            assert_eq!(error, NcclError::NoDriver);
            assert!(message.contains("looked for libcuda.so"), "{message}");
        } else {
            assert_eq!(error, NcclError::NoDevice { index: 999, count });
            assert!(message.contains("no GPU 999"), "{message}");
        }
    }
}

#[test]
fn the_library_is_found_or_all_places_are_named() {
    match nccl::installation() {
        Ok(found) => assert!(found.version.starts_with("2."), "{found:?}"),
        Err(error @ NcclError::NoLibrary { .. }) => {
            let message = error.to_string();
            for place in ["libnccl.so.2", "CUDA_PATH", "VIRTUAL_ENV", "cannot open shared object"] {
                assert!(message.contains(place), "{message}");
            }
        }
        Err(error) => panic!("{error}"),
    }
}

#[test]
#[ignore = "needs the wheel nvidia-nccl-cu12 in PYTHONPATH: cargo test --release -p kiln-collectives --features cuda --test nccl -- --ignored wheel"]
fn the_library_of_a_python_wheel_makes_ids() {
    let found = nccl::installation().unwrap();
    println!("NCCL {} from {}", found.version, found.place);
    assert!(found.version.starts_with("2."), "{found:?}");
}

fn check<T: Element + PartialEq + std::fmt::Debug>(member: &dyn Communicator, values: &[T]) {
    let client = cubecl::Device::Cuda(cubecl::cuda::CudaDevice::new(0)).client();
    let there = || Buffer::from_slice(values).to_device(&client);
    let poisoned = || {
        let mut poison = Buffer::zeros(T::DTYPE, values.len());
        poison.as_bytes_mut().fill(0x5a);
        poison.to_device(&client)
    };
    let mut input = Arc::new(there());
    let gather = member.all_gather(label("gather"), Arc::clone(&input), poisoned());
    assert!(gather.is_done());
    let broadcast = member.broadcast(label("broadcast"), there(), 0);
    let mut results = vec![gather.wait(PATIENCE).unwrap(), broadcast.wait(PATIENCE).unwrap()];
    assert!(Arc::get_mut(&mut input).is_some());
    if T::DTYPE.has_sum() {
        let scatter = member.reduce_scatter(label("scatter"), Arc::new(there()), poisoned());
        let reduce = member.all_reduce(label("reduce"), there());
        results.extend([scatter.wait(PATIENCE).unwrap(), reduce.wait(PATIENCE).unwrap()]);
    }
    for result in results {
        assert_eq!(result.to_host().unwrap().as_slice::<T>().unwrap(), values);
    }
}

fn check_world_of_one(member: &dyn Communicator) {
    assert_eq!((member.backend(), member.world_size()), ("nccl", 1));
    for len in [0, 1, 5, 100_003] {
        let values: Vec<f64> = (0..len).map(|index| f64::from(index % 100) - 40.0).collect();
        check(member, &values);
        check(member, &values.iter().map(|value| *value as f32).collect::<Vec<f32>>());
        check(member, &values.iter().map(|value| f16::from_f64(*value)).collect::<Vec<f16>>());
        check(member, &values.iter().map(|value| bf16::from_f64(*value)).collect::<Vec<bf16>>());
        check(member, &values.iter().map(|value| *value as i8 as u8).collect::<Vec<u8>>());
    }
    // Buffers on the host go through the group's own transport, and so do barriers.
    let on_host = member.all_reduce(label("host"), Buffer::from_slice(&[3.0f32]));
    assert_eq!(on_host.wait(PATIENCE).unwrap().as_slice::<f32>().unwrap(), [3.0]);
    member.barrier(label("barrier")).wait(PATIENCE).unwrap();
}

#[test]
#[ignore = "needs an NVIDIA GPU and NCCL, or stand-ins: cargo test --release --features kiln/cuda \
            --workspace --test nccl -- --ignored"]
fn a_world_of_one_and_its_parts() {
    let world = world_of_one(&NcclOptions::new(0));
    check_world_of_one(&world);
    let part = world.split("part", Some(3), 0).unwrap().unwrap();
    assert!(world.split("none", None, 0).unwrap().is_none());
    check_world_of_one(part.as_ref());
    drop(world);
    check_world_of_one(part.as_ref());
}

/// Returns the data of rank `rank`: numbers that, like their sums, every type represents exactly.
fn part<T: Element>(rank: usize, len: usize, from: impl Fn(f32) -> T) -> Vec<T> {
    (0..len).map(|index| from(((rank + 1) * (index % 13)) as f32 - 20.0)).collect()
}

fn check_ranks<T: Element + PartialEq + std::fmt::Debug>(
    member: &dyn Communicator,
    device: usize,
    len: usize,
    from: impl Fn(f32) -> T + Copy,
    sum: impl Fn(&[T]) -> T,
) {
    let client = cubecl::Device::Cuda(cubecl::cuda::CudaDevice::new(device)).client();
    let (rank, size) = (member.rank(), member.world_size());
    let all: Vec<Vec<T>> = (0..size).map(|rank| part(rank, len * size, from)).collect();
    let there = |values: &[T]| Buffer::from_slice(values).to_device(&client);
    let zeros = |len| Buffer::zeros(T::DTYPE, len).to_device(&client);
    let own = &all[rank];
    // All operations are in flight at once.
    let gather = member.all_gather(label("gather"), Arc::new(there(&own[..len])), zeros(len * size));
    let scatter = member.reduce_scatter(label("scatter"), Arc::new(there(own)), zeros(len));
    let reduce = member.all_reduce(label("reduce"), there(own));
    let broadcast = member.broadcast(label("broadcast"), there(own), size - 1);
    let sums: Vec<T> = (0..len * size)
        .map(|index| sum(&all.iter().map(|values| values[index]).collect::<Vec<_>>()))
        .collect();
    let gathered: Vec<T> = all.iter().flat_map(|values| values[..len].to_vec()).collect();
    let result = |work: kiln_collectives::Work| work.wait(PATIENCE).unwrap().to_host().unwrap();
    assert_eq!(result(gather).as_slice::<T>().unwrap(), gathered);
    assert_eq!(result(scatter).as_slice::<T>().unwrap(), &sums[rank * len..][..len]);
    assert_eq!(result(reduce).as_slice::<T>().unwrap(), sums);
    assert_eq!(result(broadcast).as_slice::<T>().unwrap(), all[size - 1]);
}

/// Checks the transfers of a rank with this GPU, in the world and in pairs, the later rank first.
fn check_rank(world: &dyn Communicator, device: usize) {
    let check = |member: &dyn Communicator| {
        for len in [1, 5, 30_001] {
            check_ranks(member, device, len, |value| value, |all: &[f32]| all.iter().sum());
            let sum = |all: &[bf16]| bf16::from_f32(all.iter().map(|value| value.to_f32()).sum());
            check_ranks(member, device, len, bf16::from_f32, sum);
            let sum = |all: &[f16]| f16::from_f32(all.iter().map(|value| value.to_f32()).sum());
            check_ranks(member, device, len, f16::from_f32, sum);
        }
        // A rank that leaves aborts operations that others still wait for.
        member.barrier(label("done")).wait(PATIENCE).unwrap();
    };
    check(world);
    let pair = world.split("pair", Some(device as u32 / 2), -(device as i64)).unwrap().unwrap();
    check(pair.as_ref());
}

/// One rank per GPU, each a thread.
#[test]
#[ignore = "needs two GPUs and NCCL, or stand-ins: benches/standins/execute.sh nccl"]
fn threads_with_a_gpu_each() {
    let count = CudaRuntime::enumerate_all_devices().len();
    assert!(count >= 2, "{count} GPUs");
    thread::scope(|scope| {
        for (device, world) in LocalGroup::new(count).into_iter().enumerate() {
            scope.spawn(move || {
                nccl::attach(&world, &NcclOptions::new(device)).unwrap();
                check_rank(&world, device);
            });
        }
    });
}

/// Runs `run(rank, world, client, next)` on two ranks, which are threads with a GPU each. `next` makes a rank
/// wait for the other one without a call in `world`, whose calls both ranks make in the same order.
fn on_two_ranks(run: impl Fn(usize, &dyn Communicator, &Client, &dyn Fn()) + Sync) {
    if env::var("FAKE_CUDA_ASYNC").is_ok_and(|seed| seed == "0") {
        // In that case a collective waits for the other rank inside its call.
        return;
    }
    thread::scope(|scope| {
        for (rank, world) in LocalGroup::new(2).into_iter().enumerate() {
            let run = &run;
            scope.spawn(move || {
                nccl::attach(&world, &NcclOptions::new(rank)).unwrap();
                let turns = world.split("turns", Some(0), 0).unwrap().unwrap();
                let next = || drop(turns.barrier(label("turn")).wait(PATIENCE).unwrap());
                run(rank, &world, &cubecl::Device::Cuda(cubecl::cuda::CudaDevice::new(rank)).client(), &next);
                // A rank that leaves aborts operations that others still wait for.
                next();
            });
        }
    });
}

/// Number of elements of a rank's shard in the memory tests.
const SHARD: usize = 1 << 18;

/// Doubles `shard` in each round, because both ranks send the same data.
fn double(world: &dyn Communicator, client: &Client, mut shard: Buffer, rounds: usize) -> Buffer {
    let empty = |len| Buffer::empty_on(client, DType::F32, len);
    for _ in 0..rounds {
        let gather = world.all_gather(label("gather"), Arc::new(shard), empty(2 * SHARD));
        let whole = gather.wait(PATIENCE).unwrap();
        let scatter = world.reduce_scatter(label("scatter"), Arc::new(whole), empty(SHARD));
        shard = scatter.wait(PATIENCE).unwrap();
    }
    shard
}

/// Returns the bytes that CubeCL uses for this thread, and the bytes that it has reserved from the driver.
fn memory(client: &Client) -> (u64, u64) {
    let usage = client.memory_report(MemoryScope::CurrentStream).usage();
    (usage.bytes_in_use, usage.bytes_reserved)
}

/// Rank 1 joins only after rank 0 has queued all of its collectives, so the GPU of rank 0 runs none of them
/// until then. Even so, each collective reuses the memory of earlier ones.
#[test]
#[ignore = "needs stand-ins: benches/standins/execute.sh nccl"]
fn memory_is_reused_before_collectives_have_run() {
    const ROUNDS: usize = 20;
    on_two_ranks(|rank, world, client, next| {
        let value = rank as f32 + 1.0;
        let shard = Buffer::from_slice(&vec![value; SHARD]).to_device(client);
        // Connects the ranks, and allocates memory.
        let mut shard = double(world, client, shard, 1);
        assert!(shard.to_host().unwrap().as_slice::<f32>().unwrap() == vec![2.0 * value; SHARD]);
        for turn in 0..2 {
            // Rank 0 first.
            if rank == turn {
                let (_, before) = memory(client);
                shard = double(world, client, shard, ROUNDS);
                assert_eq!(memory(client).1, before);
            }
            next();
        }
        let expected = vec![value * 2f32.powi(ROUNDS as i32 + 1); SHARD];
        assert!(shard.to_host().unwrap().as_slice::<f32>().unwrap() == expected);
    });
}

/// Like the test above, but one thread allocates the input, and another thread calls the collective and waits
/// for it.
#[test]
#[ignore = "needs stand-ins: benches/standins/execute.sh nccl"]
fn memory_of_another_stream_is_reused_later() {
    on_two_ranks(|rank, world, client, next| {
        let input = || Buffer::from_slice(&vec![rank as f32 + 1.0; 2 * SHARD]).to_device(client);
        // Connects the ranks.
        double(world, client, Buffer::from_slice(&vec![1.0f32; SHARD]).to_device(client), 1)
            .to_host()
            .unwrap();
        let scatter = |input: Buffer| {
            let output = Buffer::empty_on(client, DType::F32, SHARD);
            world.reduce_scatter(label("sum"), Arc::new(input), output).wait(PATIENCE).unwrap()
        };
        let mut result = None;
        for turn in 0..2 {
            if rank == turn {
                let ((before, _), input) = (memory(client), input());
                result = thread::scope(|scope| scope.spawn(|| scatter(input)).join()).ok();
                // CubeCL keeps memory that several streams use for a moment longer.
                let is_free = |_| {
                    thread::sleep(Duration::from_millis(10));
                    memory(client).0 <= before
                };
                assert!((0..6000).any(is_free));
                let (_, reserved) = memory(client);
                let later = Buffer::from_slice(&vec![-1.0f32; 2 * SHARD]).to_device(client);
                assert_eq!(memory(client).1, reserved);
                drop(later);
            }
            next();
        }
        let sum = result.unwrap().to_host().unwrap();
        assert!(sum.as_slice::<f32>().unwrap() == vec![3.0; SHARD]);
    });
}

/// Variable that marks a process as a rank: the rank, the number of ranks, and the address where they meet.
const RANK: &str = "NCCL_TEST_RANK";

/// One rank per GPU, each a process.
#[test]
#[ignore = "needs two GPUs and NCCL, or stand-ins: benches/standins/execute.sh nccl"]
fn processes_with_a_gpu_each() {
    if let Ok(place) = env::var(RANK) {
        let numbers: Vec<usize> = place.split(' ').map(|number| number.parse().unwrap()).collect();
        let options = JoinOptions::new(numbers[0], numbers[1], "127.0.0.1", numbers[2] as u16);
        let world = TcpCommunicator::join(options).unwrap();
        nccl::attach(&world, &NcclOptions::new(numbers[0])).unwrap();
        return check_rank(&world, numbers[0]);
    }
    let count = CudaRuntime::enumerate_all_devices().len();
    assert!(count >= 2, "{count} GPUs");
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = listener.local_addr().unwrap().port();
    drop(listener);
    let ranks: Vec<_> = (0..count)
        .map(|rank| {
            let mut program = Command::new(env::current_exe().unwrap());
            program.args(["processes_with_a_gpu_each", "--exact", "--ignored", "--nocapture"]);
            program.env(RANK, format!("{rank} {count} {port}")).stdout(Stdio::null()).spawn().unwrap()
        })
        .collect();
    for rank in ranks {
        let output = output_of(rank);
        assert!(output.status.success(), "{output:?}");
    }
}

#[test]
#[ignore = "needs two GPUs and NCCL, or stand-ins: benches/standins/execute.sh nccl"]
fn what_is_done_is_no_longer_pending() {
    let world = world_of_one(&NcclOptions::new(0));
    let client = cubecl::Device::Cuda(cubecl::cuda::CudaDevice::new(0)).client();
    for _ in 0..20 {
        let buffer = Buffer::zeros(DType::F32, 8).to_device(&client);
        let sum = world.all_reduce(label("sum"), buffer).wait(PATIENCE).unwrap();
        assert_eq!(sum.to_host().unwrap().as_slice::<f32>().unwrap(), [0.0; 8]);
    }
    // The watcher thread polls every few milliseconds; a limit only ends a failing test.
    let pending = || world.flight().groups.iter().map(|group| group.pending.len()).sum::<usize>();
    for _ in 0..6000 {
        if pending() == 0 {
            break;
        }
        thread::sleep(Duration::from_millis(10));
    }
    assert_eq!(pending(), 0);
    let last = world.recorder().records().pop().unwrap();
    assert!(last.finished >= last.started && last.started >= last.enqueued);
}

/// With the stand-in for NCCL, `FAKE_NCCL_STALLS` makes the first collective hang, so the operation times
/// out.
#[test]
#[ignore = "needs two GPUs and NCCL, or stand-ins: benches/standins/execute.sh nccl"]
fn an_operation_ends_or_times_out() {
    let is_stuck = env::var_os("FAKE_NCCL_STALLS").is_some();
    let mut options = NcclOptions::new(0);
    options.timeout = if is_stuck { Duration::from_millis(300) } else { PATIENCE };
    let world = world_of_one(&options);
    let client = cubecl::Device::Cuda(cubecl::cuda::CudaDevice::new(0)).client();
    let sum = || world.all_reduce(label("block 3"), Buffer::zeros(DType::F32, 8).to_device(&client));
    // The host does not wait for it either way.
    let first = sum().wait(PATIENCE).unwrap();
    let is_over = || match sum().wait(PATIENCE) {
        Err(error) => Some(Err(error)),
        Ok(_) => {
            let records = world.recorder().records();
            let record = records.iter().find(|record| &*record.label.scope == "block 3");
            record.unwrap().finished.map(Ok)
        }
    };
    let end = (0..6000).find_map(|_| {
        thread::sleep(Duration::from_millis(10));
        is_over()
    });
    match end.expect("neither ended nor failed") {
        Ok(_) => assert!(!is_stuck),
        Err(CommError::TimedOut {
            site: CallSite { operation, rank: 0, label, .. },
            waited,
            missing,
            verdict,
        }) => {
            assert_eq!((operation, &*label.scope), (Operation::AllReduce, "block 3"));
            assert!(is_stuck && waited >= options.timeout && missing.is_empty());
            assert_eq!(verdict.finding, Finding::Transfer, "{verdict}");
        }
        Err(error) => panic!("{error}"),
    }
    drop(first);
}

#[test]
#[ignore = "needs two GPUs and NCCL, or stand-ins: benches/standins/execute.sh nccl"]
fn an_abort_ends_it() {
    let world = world_of_one(&NcclOptions::new(0));
    let client = cubecl::Device::Cuda(cubecl::cuda::CudaDevice::new(0)).client();
    let buffer = || Buffer::zeros(DType::F32, 8).to_device(&client);
    world.abort("enough");
    let error = world.all_reduce(label("sum"), buffer()).wait(PATIENCE).unwrap_err();
    assert!(matches!(&error, CommError::Aborted { by, .. } if by.rank == 0), "{error}");
    let error = world.split("part", Some(0), 0).unwrap_err();
    assert!(matches!(&error, CommError::Aborted { by, .. } if by.rank == 0), "{error}");
}

#[test]
#[ignore = "needs two GPUs and NCCL, or stand-ins: benches/standins/execute.sh nccl"]
fn threads_cannot_share_a_gpu_by_nccl() {
    let expected = NcclError::SharedDevice { ranks: vec![0, 1], index: 0 };
    assert_eq!(attach(2, 0), [expected.clone(), expected]);
}

#[test]
#[ignore = "needs two GPUs and NCCL, or stand-ins: benches/standins/execute.sh nccl"]
fn sums_of_bytes_are_refused() {
    let world = world_of_one(&NcclOptions::new(0));
    let client = cubecl::Device::Cuda(cubecl::cuda::CudaDevice::new(0)).client();
    let buffer = Buffer::zeros(DType::U8, 8).to_device(&client);
    let error = world.all_reduce(label("sum"), buffer).wait(PATIENCE).unwrap_err();
    let problem = ArgumentError::NoSum { dtype: DType::U8 };
    assert!(matches!(error, CommError::Invalid { problem: p, .. } if p == problem), "{error}");
}
