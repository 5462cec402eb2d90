//! What a rank has recorded, and what is kept of it.

use serde::{Deserialize, Serialize};

/// Whose memory it is.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Holder {
    /// What it is for, such as `activations` or `gradients`.
    pub owner: String,
    /// Of activations, the module that they belong to.
    pub module: Option<String>,
}

/// Some memory was allocated or freed.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    /// Seconds since the step began.
    pub after: f64,
    /// Place of its holder.
    pub holder: usize,
    /// By how many bytes the holder has more than before.
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
    /// Whoever held memory.
    pub holders: Vec<Holder>,
    /// What each of them held in the beginning, in bytes.
    pub held: Vec<u64>,
    /// What happened then, in order.
    pub changes: Vec<Change>,
    /// Bytes that the rank held at the end by another count.
    pub held_at_end: u64,
    /// Changes that could not be recorded.
    pub missing: usize,
    /// What the rank did, in order: from when on, in seconds since the step began, the activity, and the module.
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
    /// Whoever held memory.
    pub holders: Vec<Holder>,
    /// Moments, in order. Of those close to each other, the one with most bytes.
    pub samples: Vec<Sample>,
    /// What the rank did.
    pub bands: Vec<Band>,
    /// The moment with most bytes.
    pub peak: Peak,
    /// Allocations and releases in the step.
    pub changes: usize,
    /// Bytes that the rank held at the end, less what all changes come to: zero if every one was recorded.
    pub unexplained: i64,
    /// Changes that could not be recorded.
    pub missing: usize,
}

/// What a rank held at a moment.
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

/// A part of the step.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Band {
    /// Such as `forward`.
    pub activity: String,
    /// When it began, in seconds since the step began.
    pub start: f64,
    /// When it ended.
    pub end: f64,
}

/// The moment at which a rank held most.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Peak {
    /// What it held.
    pub held: Sample,
    /// What it was doing.
    pub activity: String,
    /// The module that it was in.
    pub module: Option<String>,
}
