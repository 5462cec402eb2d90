//! The memory profile of a step: who held how much when, as a drawing and in words.
//!
//! Ranks hand over what they have recorded ([`Recorded`]); [`Profile::of`] makes it small enough to be sent,
//! [`Profile::svg`] draws it, and its text says what makes the peak.

mod draw;
mod model;
mod reduce;
mod save;
mod show;
#[cfg(test)]
mod tests;

pub use model::{Band, Change, Holder, Peak, Profile, Recorded, Sample};
pub use save::save;
