//! Algorithms of products that were measured, and which of them a process uses.
//!
//! cuBLASLt guesses which of its algorithms is the fastest for a product. Where that guess was held against a clock
//! (`measure`), the fastest one is kept here, by all that it follows from. Without that, products use cuBLASLt's
//! first choice, so that a run's bits depend on nobody's clock.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::problem::{Alignments, Problem};

/// The kind of a GPU, by the driver's name of it, and the version of cuBLASLt: no other one can read an
/// algorithm's bytes.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Platform {
    pub(super) gpu: String,
    pub(super) library: usize,
}

/// What an algorithm was measured for.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) platform: Platform,
    pub(super) problem: Problem,
    pub(super) alignments: Alignments,
}

/// The fastest of the algorithms that cuBLASLt has named.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Fastest {
    /// cuBLASLt's own form of it.
    pub(super) algorithm: [u64; 8],
    /// The milliseconds of a product, and those with cuBLASLt's first choice.
    pub(super) ms: f32,
    pub(super) first_ms: f32,
}

/// Algorithms for products of some GPUs, to be kept in a file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProductAlgorithms {
    products: Vec<(Key, Fastest)>,
}

impl ProductAlgorithms {
    /// Products that they are for.
    pub fn len(&self) -> usize {
        self.products.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.products.is_empty()
    }

    /// How many times as fast products are as with cuBLASLt's first choice, for those where another one is faster;
    /// the smallest first.
    pub fn gains(&self) -> Vec<f32> {
        let mut gains: Vec<f32> = self.products.iter().map(|(_, found)| found.first_ms / found.ms).collect();
        gains.retain(|gain| *gain > 1.0);
        gains.sort_by(f32::total_cmp);
        gains
    }

    /// These and `others`, of which those for the same products count.
    #[must_use]
    pub fn with(self, others: ProductAlgorithms) -> ProductAlgorithms {
        let mut all: BTreeMap<Key, Fastest> = self.products.into_iter().collect();
        all.extend(others.products);
        ProductAlgorithms { products: all.into_iter().collect() }
    }
}

struct State {
    kept: BTreeMap<Key, Fastest>,
    measured: BTreeMap<Key, Fastest>,
    is_measuring: bool,
    /// Kinds of products that do not use cuBLASLt's first choice unasked.
    used: usize,
}

fn state() -> MutexGuard<'static, State> {
    static STATE: Mutex<State> =
        Mutex::new(State { kept: BTreeMap::new(), measured: BTreeMap::new(), is_measuring: false, used: 0 });
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// From now on, products whose algorithm was measured before use that one. For the whole process; products that
/// were computed already stay with theirs.
pub fn use_algorithms(kept: ProductAlgorithms) {
    state().kept = kept.products.into_iter().collect();
}

/// From now on, the first product of each kind waits for the GPU, and measures the first algorithms that cuBLASLt
/// names. For the whole process, and meant for a short run of its own.
pub fn measure_algorithms() {
    state().is_measuring = true;
}

/// The algorithms that this process has measured.
pub fn measured_algorithms() -> ProductAlgorithms {
    ProductAlgorithms { products: state().measured.clone().into_iter().collect() }
}

/// How many kinds of products this process computes with algorithms that were measured.
pub fn used_algorithms() -> usize {
    state().used
}

/// Notes that one more kind of products uses what was measured.
pub(super) fn count_use() {
    state().used += 1;
}

/// Whether the first product with this key is to be measured.
pub(super) fn is_wanted(key: &Key) -> bool {
    let state = state();
    state.is_measuring && !state.measured.contains_key(key)
}

/// Notes what was measured, and uses it from now on.
pub(super) fn note(key: Key, found: Fastest) {
    state().measured.insert(key, found);
}

/// The algorithm to use, if one was measured, in this process or before.
pub(super) fn algorithm_of(key: &Key) -> Option<[u64; 8]> {
    let state = state();
    let found = state.measured.get(key).or_else(|| state.kept.get(key).filter(|_| !state.is_measuring));
    found.map(|found| found.algorithm)
}
