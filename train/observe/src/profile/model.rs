//! The recording of a rank, and the profile made from it.

use serde::{Deserialize, Serialize};

/// An owner of memory.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// The purpose of the memory, such as `activations` or `gradients`.
    pub owner: String,
    /// For activations, the module that they belong to.
    pub module: Option<String>,
}

/// An allocation or a release of memory.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Seconds since the step began.
    pub after: f64,
    /// Index of its holder.
    pub holder: usize,
    /// The change of the holder's memory in bytes.
    pub bytes: i64,
}

/// Every allocation of a rank in a step.
#[derive(Clone, Debug, PartialEq)]
pub struct Recorded {
    /// Rank in the world.
    pub rank: usize,
    /// The optimizer step.
    pub step: u64,
    /// Length of the step in seconds.
    pub seconds: f64,
    /// All holders of memory.
    pub holders: Vec<Holder>,
    /// Bytes of each holder at the beginning of the step.
    pub held: Vec<u64>,
    /// The changes during the step, in order.
    pub changes: Vec<Change>,
    /// Bytes that the rank held at the end, counted independently.
    pub held_at_end: u64,
    /// Number of changes that could not be recorded.
    pub missing: usize,
    /// The activities of the rank, in order: the start in seconds since the step began, the activity, and the
    /// module.
    pub doings: Vec<(f64, String, Option<String>)>,
}

/// The memory of a rank in a step, at as many moments as a drawing can show.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Profile {
    /// Rank in the world.
    pub rank: usize,
    /// The optimizer step.
    pub step: u64,
    /// Length of the step in seconds.
    pub seconds: f64,
    /// All holders of memory.
    pub holders: Vec<Holder>,
    /// Moments, in order. Among moments close to each other, the one with most bytes.
    pub samples: Vec<Sample>,
    /// The activities of the rank.
    pub bands: Vec<Band>,
    /// The moment with most bytes.
    pub peak: Peak,
    /// Number of allocations and releases in the step.
    pub changes: usize,
    /// Bytes that the rank held at the end, minus the sum of all changes: zero if every change was recorded.
    pub unexplained: i64,
    /// Number of changes that could not be recorded.
    pub missing: usize,
}

/// The memory that a rank held at a moment.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sample {
    /// Seconds since the step began.
    pub after: f64,
    /// Bytes of each holder.
    pub bytes: Vec<u64>,
}

impl Sample {
    /// Bytes of all holders.
    pub fn total(&self) -> u64 {
        self.bytes.iter().sum()
    }
}

/// A phase of the step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Band {
    /// The activity, such as `forward`.
    pub activity: String,
    /// Its start, in seconds since the step began.
    pub start: f64,
    /// Its end, in seconds since the step began.
    pub end: f64,
}

/// The moment at which a rank held most memory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    /// The memory held.
    pub held: Sample,
    /// The activity at that moment.
    pub activity: String,
    /// The module at that moment.
    pub module: Option<String>,
}
