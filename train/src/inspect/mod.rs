//! `kiln inspect`: what is in a checkpoint, and what the ranks of a failed run were doing.

mod command;
mod error;

pub use command::{InspectArgs, flight};
pub use error::InspectError;
