//! Worlds to test, data to send, and sequential sums to compare with.

use crate::backend;
use half::{bf16, f16};
use kiln_collectives::{
    Buffer, Communicator, DEFAULT_CAPACITY, Element, FakeCommunicator, Label, Phase, WorkerStart,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

pub use kiln_testkit::PATIENCE;

/// The communicators of a world, one per rank.
pub type World = Vec<Arc<dyn Communicator>>;

/// Settings of a world beyond the number of ranks.
#[derive(Clone)]
pub struct Settings {
    /// Seed of random delays, if the backend supports them.
    pub delay_seed: Option<u64>,
    pub recorder_capacity: usize,
    pub on_worker_start: Option<WorkerStart>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { delay_seed: None, recorder_capacity: DEFAULT_CAPACITY, on_worker_start: None }
    }
}

/// Creates a world of the backend under test.
pub fn world(world_size: usize) -> World {
    backend::world(world_size, Settings::default())
}

/// Creates the same world with random delays.
pub fn delayed(world_size: usize, seed: u64) -> World {
    backend::world(world_size, Settings { delay_seed: Some(seed), ..Settings::default() })
}

/// Returns all ranks of a fake world, which do not know of each other.
pub fn fake(world_size: usize, split_sizes: &[(&str, usize)]) -> World {
    let sizes: HashMap<String, usize> =
        split_sizes.iter().map(|(name, size)| ((*name).to_string(), *size)).collect();
    share((0..world_size).map(|rank| FakeCommunicator::new(rank, world_size).with_split_sizes(sizes.clone())))
}

pub fn share<C: Communicator + 'static>(members: impl IntoIterator<Item = C>) -> World {
    members.into_iter().map(|member| Arc::new(member) as Arc<dyn Communicator>).collect()
}

/// Runs `body` for all ranks concurrently, each on its own thread; returns results in rank order.
pub fn on_each_rank<R: Send>(
    world: &[Arc<dyn Communicator>],
    body: impl Fn(&Arc<dyn Communicator>) -> R + Sync,
) -> Vec<R> {
    thread::scope(|scope| {
        let threads: Vec<_> = world.iter().map(|member| scope.spawn(|| body(member))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

pub fn label(scope: &str) -> Label {
    Label::new(scope, Phase::Forward)
}

/// An element type with reproducible test data and a reference sum.
pub trait TestElement: Element + PartialEq + std::fmt::Debug {
    fn from_f64(value: f64) -> Self;
    /// Sums from left to right, in the precision that the crate guarantees.
    fn sum(values: impl Iterator<Item = Self>) -> Self;
}

macro_rules! plain_element {
    ($type:ty) => {
        impl TestElement for $type {
            fn from_f64(value: f64) -> Self {
                value as $type
            }
            fn sum(values: impl Iterator<Item = Self>) -> Self {
                values.reduce(|sum, value| sum + value).unwrap()
            }
        }
    };
}

macro_rules! half_element {
    ($type:ty) => {
        impl TestElement for $type {
            fn from_f64(value: f64) -> Self {
                <$type>::from_f64(value)
            }
            fn sum(values: impl Iterator<Item = Self>) -> Self {
                let sum = values.map(|value| value.to_f32()).reduce(|sum, value| sum + value);
                <$type>::from_f32(sum.unwrap())
            }
        }
    };
}

plain_element!(f64);
plain_element!(f32);
half_element!(f16);
half_element!(bf16);

/// Returns values of mixed sign and magnitude, so that sums depend on the order of additions.
pub fn values<T: TestElement>(rank: usize, len: usize) -> Vec<T> {
    (0..len as u64)
        .map(|index| {
            let mut hash = (index << 8 | rank as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            hash = (hash ^ hash >> 29).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            hash ^= hash >> 32;
            let fraction = (hash & 0xffff_ffff) as f64 / f64::from(u32::MAX) - 0.5;
            let scale = f64::from(1u32 << (hash >> 32 & 7));
            T::from_f64(fraction * scale)
        })
        .collect()
}

/// Sums `inputs` element by element, in rank order.
pub fn reference_sum<T: TestElement>(inputs: &[Vec<T>]) -> Vec<T> {
    (0..inputs[0].len()).map(|index| T::sum(inputs.iter().map(|input| input[index]))).collect()
}

/// Compares bit for bit without printing megabytes.
#[track_caller]
pub fn assert_bits<T: TestElement>(actual: &Buffer, expected: &[T], what: &str) {
    let actual = actual.as_slice::<T>().unwrap();
    assert_eq!(actual.len(), expected.len(), "{what}: length");
    let bytes = bytemuck::cast_slice::<T, u8>;
    if bytes(actual) != bytes(expected) {
        let same =
            |index: &usize| bytemuck::bytes_of(&actual[*index]) == bytemuck::bytes_of(&expected[*index]);
        let index = (0..actual.len()).find(|index| !same(index)).unwrap();
        panic!("{what}: element {index} is {:?}, expected {:?}", actual[index], expected[index]);
    }
}
