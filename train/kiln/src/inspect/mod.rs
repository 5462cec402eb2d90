//! `kiln inspect`: shows the contents of a checkpoint, or the last activity of the ranks of a failed run.

mod command;
mod error;

pub use command::{InspectArgs, flight};
pub use error::InspectError;
