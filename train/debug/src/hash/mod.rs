//! Hashes of the tensors of a step, for comparing runs: `kiln train --hash steps=1-20`.

mod hasher;
mod options;
mod record;

pub use hasher::{Hasher, split};
pub use options::{HashOptions, HashOptionsError, HashedKind};
pub use record::{Entry, StepHashes, StepPhase};
pub use record::{HashesError, read};
