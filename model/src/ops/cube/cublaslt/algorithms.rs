//! Measured algorithms for products, and the selection of those that a process uses.
//!
//! cuBLASLt estimates which of its algorithms is the fastest for a product. If that estimate was checked by
//! measurement (`measure`), the fastest algorithm is stored here, keyed by everything that it depends on. Otherwise,
//! products use cuBLASLt's first choice, so that a run's bits do not depend on timing.

use std::collections::BTreeMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use serde::{Deserialize, Serialize};

use super::problem::{Alignments, Problem};

/// The kind of a GPU, by the driver's name for it, and the version of cuBLASLt. Other versions cannot decode a stored
/// algorithm.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Platform {
    pub(super) gpu: String,
    pub(super) library: usize,
}

/// The conditions under which an algorithm was measured.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub(super) struct Key {
    pub(super) platform: Platform,
    pub(super) problem: Problem,
    pub(super) alignments: Alignments,
}

/// The fastest algorithm among cuBLASLt's candidates.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub(super) struct Fastest {
    /// cuBLASLt's encoding of the algorithm.
    pub(super) algorithm: [u64; 8],
    /// Milliseconds per product with this algorithm, and with cuBLASLt's first choice.
    pub(super) ms: f32,
    pub(super) first_ms: f32,
}

/// Measured algorithms for products on some GPUs, which can be stored in a file.
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

    /// Returns the speed-ups over cuBLASLt's first choice, for the products for which a different algorithm is
    /// faster, in ascending order.
    pub fn gains(&self) -> Vec<f32> {
        let mut gains: Vec<f32> = self.products.iter().map(|(_, found)| found.first_ms / found.ms).collect();
        gains.retain(|gain| *gain > 1.0);
        gains.sort_by(f32::total_cmp);
        gains
    }

    /// Merges `others` into these algorithms; `others` take precedence for the same products.
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
    /// Number of kinds of products that use a measured algorithm instead of cuBLASLt's first choice.
    used: usize,
}

fn state() -> MutexGuard<'static, State> {
    static STATE: Mutex<State> =
        Mutex::new(State { kept: BTreeMap::new(), measured: BTreeMap::new(), is_measuring: false, used: 0 });
    STATE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Makes products use their measured algorithm from now on, if there is one, in the whole process. Kinds of products
/// that were computed already keep their algorithm.
pub fn use_algorithms(kept: ProductAlgorithms) {
    state().kept = kept.products.into_iter().collect();
}

/// Makes the first product of each kind wait for the GPU and measure cuBLASLt's first candidates, from now on and in
/// the whole process. Meant for a separate short run.
pub fn measure_algorithms() {
    state().is_measuring = true;
}

/// Returns the algorithms that this process has measured.
pub fn measured_algorithms() -> ProductAlgorithms {
    ProductAlgorithms { products: state().measured.clone().into_iter().collect() }
}

/// Returns the number of kinds of products for which this process uses measured algorithms.
pub fn used_algorithms() -> usize {
    state().used
}

/// Counts one more kind of product that uses a measured algorithm.
pub(super) fn count_use() {
    state().used += 1;
}

/// Returns whether to measure the first product with this key.
pub(super) fn is_wanted(key: &Key) -> bool {
    let state = state();
    state.is_measuring && !state.measured.contains_key(key)
}

/// Stores a measured algorithm, and uses it from now on.
pub(super) fn note(key: Key, found: Fastest) {
    state().measured.insert(key, found);
}

/// Returns the algorithm to use, if one was measured in this process or loaded.
pub(super) fn algorithm_of(key: &Key) -> Option<[u64; 8]> {
    let state = state();
    let found = state.measured.get(key).or_else(|| state.kept.get(key).filter(|_| !state.is_measuring));
    found.map(|found| found.algorithm)
}
