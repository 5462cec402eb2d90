//! Looking into a run: what looks at the steps of its ranks.

mod breakpoint;
mod options;

pub use breakpoint::{Breakpoint, BreakpointError, Number, Others, Part, Pass, Trigger};
pub use options::DebugOptions;

use crate::error::Result;
use crate::run::Observer;

/// What looks at the steps of one rank, in the order in which it is called.
pub(crate) fn observers(_options: &DebugOptions) -> Result<Vec<Box<dyn Observer>>> {
    Ok(Vec::new())
}
