//! Hashes of the tensors of a step, for comparing runs: `kiln train --hash steps=1-20`.
//!
//! - `record`: a line of `hashes.jsonl`: the tensors of one step in the order in which they were computed;
//! - `options`: which steps and kinds of tensors to hash;
//! - `hasher`: the observer that computes the hashes.

mod hasher;
mod options;
mod record;

pub use hasher::{Hasher, split};
pub use options::{HashOptions, HashOptionsError, HashedKind};
pub use record::{Entry, StepHashes, StepPhase};
pub use record::{HashesError, read};
