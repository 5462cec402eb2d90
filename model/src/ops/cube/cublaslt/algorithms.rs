//! Measured algorithms for products, and the selection of those that a process uses.
//!
//! The fastest algorithm that `measure` finds for a product is stored here, keyed by everything that it depends on.
//! Other products use cuBLASLt's first choice, so that a run's bits do not depend on timing.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::problem::{Alignments, Problem};

/// The driver's name of a GPU, and the version of cuBLASLt: other versions cannot decode a stored algorithm.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Platform {
    pub(super) gpu: String,
    pub(super) library: usize,
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) platform: Platform,
    pub(super) problem: Problem,
    pub(super) alignments: Alignments,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Fastest {
    /// cuBLASLt's encoding of the algorithm.
    pub(super) algorithm: [u64; 8],
    /// Milliseconds per product, with this algorithm and with cuBLASLt's first choice.
    pub(super) ms: f32,
    pub(super) first_ms: f32,
}

/// Measured algorithms for products on some GPUs, which a file can store.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct ProductAlgorithms {
    products: Vec<(Key, Fastest)>,
}

impl ProductAlgorithms {
    /// Returns the number of products.
    pub fn len(&self) -> usize {
        self.products.len()
    }

    /// Returns whether there are no algorithms.
    pub fn is_empty(&self) -> bool {
        self.products.is_empty()
    }

    /// Returns the speed-ups above 1 over cuBLASLt's first choice, in ascending order.
    pub fn gains(&self) -> Vec<f32> {
        let mut gains: Vec<f32> = self.products.iter().map(|(_, found)| found.first_ms / found.ms).collect();
        gains.retain(|gain| *gain > 1.0);
        gains.sort_by(f32::total_cmp);
        gains
    }

    /// Merges `others` into these algorithms; `others` take precedence.
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
    used: usize,
}

fn state() -> MutexGuard<'static, State> {
    static STATE: Mutex<State> =
        Mutex::new(State { kept: BTreeMap::new(), measured: BTreeMap::new(), is_measuring: false, used: 0 });
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes new kinds of products in this process use their measured algorithm, if `kept` has one.
pub fn use_algorithms(kept: ProductAlgorithms) {
    state().kept = kept.products.into_iter().collect();
}

/// Makes the first product of each kind measure cuBLASLt's first candidates and wait for the GPU, in this process.
pub fn measure_algorithms() {
    state().is_measuring = true;
}

/// Returns the algorithms that this process has measured.
pub fn measured_algorithms() -> ProductAlgorithms {
    ProductAlgorithms { products: state().measured.clone().into_iter().collect() }
}

/// Returns the number of kinds of products that use measured algorithms in this process.
pub fn used_algorithms() -> usize {
    state().used
}

pub(super) fn count_use() {
    state().used += 1;
}

pub(super) fn is_wanted(key: &Key) -> bool {
    let state = state();
    state.is_measuring && !state.measured.contains_key(key)
}

pub(super) fn note(key: Key, found: Fastest) {
    state().measured.insert(key, found);
}

pub(super) fn algorithm_of(key: &Key) -> Option<[u64; 8]> {
    let state = state();
    let found = state.measured.get(key).or_else(|| state.kept.get(key).filter(|_| !state.is_measuring));
    found.map(|found| found.algorithm)
}
