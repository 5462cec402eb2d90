//! What a run will hold, send and take, before it starts.

mod clock;
mod engine;
mod memory;
mod update;

pub use clock::{Axis, LinkSpeed, PlannedCall, Speed};
pub use engine::{COMMUNICATION, GATHERED, Gathers, OPTIMIZER, WEIGHTS};
pub use memory::{PlannedStep, RankShape};
