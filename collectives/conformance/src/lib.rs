//! The conformance suite for collectives: checks every guarantee in the documentation of [`kiln_collectives`].
//!
//! A test program defines a function that creates worlds, and gets a test for each check:
//!
//! ```ignore
//! fn world(world_size: usize, settings: Settings) -> World {
//!     share(my_backend::world(world_size, settings.recorder_capacity, settings.on_worker_start))
//! }
//!
//! kiln_conformance::tests!("mine", world);
//! ```
//!
//! All ranks run as threads of the test program. A backend with one rank per process calls the functions `check_…` with
//! a world of one member.

pub mod accounting;
pub mod failures;
pub mod groups;
pub mod lifetime;
pub mod results;

use half::{bf16, f16};
use kiln_collectives::{
    Buffer, Communicator, DEFAULT_CAPACITY, Element, FakeCommunicator, Label, Phase, WorkerStart,
};
use std::collections::HashMap;
use std::sync::Arc;
use std::thread;

pub use kiln_testkit::PATIENCE;

/// Defines a test for each check of the suite: `tests!(NAME, WORLD)`, with the fields of [`Suite`].
#[macro_export]
macro_rules! tests {
    ($name:expr, $world:expr) => {
        $crate::tests! { $name, $world;
            accounting::totals_are_exact_on_every_backend,
            accounting::records_hold_every_detail,
            accounting::failed_operations_stay_unfinished,
            accounting::capacity_limits_records_but_not_totals,
            failures::different_calls_fail_on_every_rank,
            failures::a_different_phase_alone_is_no_mismatch,
            failures::invalid_arguments_of_one_rank_fail_every_rank,
            failures::byte_sums_are_refused_on_every_rank,
            failures::abort_reaches_pending_and_later_operations,
            failures::abort_reaches_all_groups_of_the_world,
            failures::timeout_names_the_missing_ranks,
            failures::dropping_a_rank_frees_the_others,
            failures::work_left_behind_by_a_dropped_rank_fails,
            failures::deadlines_stand_still_while_a_rank_is_held,
            groups::split_orders_by_key,
            groups::mesh_groups_run_side_by_side,
            groups::groups_outlive_their_parent,
            groups::names_must_agree_within_a_group_only,
            lifetime::inputs_are_unique_after_wait,
            lifetime::inputs_are_unique_after_a_mismatch,
            lifetime::operations_overlap_with_the_caller,
            lifetime::workers_live_as_long_as_communicators,
            lifetime::a_panicking_worker_fails_the_group,
            lifetime::communicators_drop_in_any_order,
            lifetime::communicators_describe_themselves,
            lifetime::views_show_waits_and_outlive_ranks,
            results::operations_match_the_reference,
            results::operations_match_the_reference_under_delays,
            results::large_buffers_match_the_reference,
            results::shared_memory_gathers_into_one_buffer,
            results::counts_smaller_than_the_world,
            results::bytes_can_be_moved,
            results::bits_do_not_depend_on_timing,
        }
    };
    ($name:expr, $world:expr; $($module:ident::$check:ident,)*) => {$(
        #[test]
        fn $check() {
            $crate::$module::$check(&$crate::Suite { name: $name, create: $world });
        }
    )*};
}

/// The communicators of a world, one per rank.
pub type World = Vec<Arc<dyn Communicator>>;

/// Settings of a world besides the number of ranks.
#[derive(Clone)]
pub struct Settings {
    /// Seed of random delays, if the backend supports them.
    pub delay_seed: Option<u64>,
    /// Number of records that each rank keeps.
    pub recorder_capacity: usize,
    /// Runs first on every worker thread.
    pub on_worker_start: Option<WorkerStart>,
}

impl Default for Settings {
    fn default() -> Settings {
        Settings { delay_seed: None, recorder_capacity: DEFAULT_CAPACITY, on_worker_start: None }
    }
}

/// The backend under test.
pub struct Suite {
    /// Name of the backend, as [`Communicator::backend`] returns it.
    pub name: &'static str,
    /// Creates a world of the given number of ranks.
    pub create: fn(usize, Settings) -> World,
}

impl Suite {
    /// Creates a world with default settings.
    pub fn world(&self, world_size: usize) -> World {
        self.world_with(world_size, Settings::default())
    }

    /// Creates a world with random delays.
    pub fn delayed(&self, world_size: usize, seed: u64) -> World {
        self.seeded(world_size, Some(seed))
    }

    /// Creates a world, with random delays if there is a seed.
    pub fn seeded(&self, world_size: usize, delay_seed: Option<u64>) -> World {
        self.world_with(world_size, Settings { delay_seed, ..Settings::default() })
    }

    /// Creates a world with `settings`.
    pub fn world_with(&self, world_size: usize, settings: Settings) -> World {
        (self.create)(world_size, settings)
    }
}

/// Returns all ranks of a fake world, which do not communicate.
pub fn fake(world_size: usize, split_sizes: &[(&str, usize)]) -> World {
    let sizes: HashMap<String, usize> =
        split_sizes.iter().map(|(name, size)| ((*name).to_string(), *size)).collect();
    share((0..world_size).map(|rank| FakeCommunicator::new(rank, world_size).with_split_sizes(sizes.clone())))
}

/// Collects the ranks of a world.
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

/// Returns a label with `scope`, in the forward pass.
pub fn label(scope: &str) -> Label {
    Label::new(scope, Phase::Forward)
}

/// An element type with reproducible test data and a reference sum.
pub trait TestElement: Element + PartialEq + std::fmt::Debug {
    /// Rounds `value`.
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

/// Compares bit for bit; reports the first difference.
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
