//! Hashes of the tensors of a step, for comparing runs: `kiln train --hash steps=1-20`.
//!
//! - `sums`: what is kept of a tensor: sums over its elements, which ranks and micro-batches add up in any order;
//! - `record`: a line of `hashes.jsonl`, the tensors of one step in the order of time;
//! - `options`: which steps and kinds of tensors;
//! - `hasher`: the observer that makes them.

mod hasher;
mod options;
mod record;
mod sums;

pub(crate) use hasher::{Hasher, split};
pub use options::{HashOptions, HashOptionsError, HashedKind};
pub use record::{Entry, HASHES_FILE, StepHashes, StepPhase};
pub(crate) use record::{HashesError, read};
