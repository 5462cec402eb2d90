//! The memory profile of a step: who held how much when, as a drawing and in words.
//!
//! Ranks provide their recordings ([`Recorded`]); [`Profile::of`] reduces them to a size that can be sent,
//! [`Profile::svg`] draws the result, and its text explains the peak.

mod draw;
mod model;
mod reduce;
mod save;
mod show;
#[cfg(test)]
mod tests;

pub use model::{Band, Change, Holder, Peak, Profile, Recorded, Sample};
pub use save::save;
