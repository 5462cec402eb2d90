//! Stand-in for the types of `kiln_collectives` until they are there.

use kiln_collectives::Record;
use serde::{Deserialize, Serialize};

/// What a rank's own thread did for a while.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct Span {
    pub activity: String,
    pub unit: Option<String>,
    pub waits_for: Option<(String, u64)>,
    pub start: f64,
    pub end: f64,
    pub bytes: u64,
}

/// One step of one rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[allow(missing_docs)]
pub struct StepTimeline {
    pub rank: usize,
    pub node: String,
    pub step: u64,
    pub start: f64,
    pub end: f64,
    pub created: f64,
    pub spans: Vec<Span>,
    pub records: Vec<Record>,
}
