//! Looking into a run: what looks at the steps of its ranks.

mod breakpoint;

pub use breakpoint::{Breakpoint, BreakpointError, Number, Others, Part, PassName, Trigger};

use crate::error::Result;
use crate::run::Observer;

/// What looks into a run from its start.
#[derive(Clone, Debug, Default)]
pub struct DebugOptions {
    /// Where it stops.
    pub breakpoints: Vec<Breakpoint>,
}

impl DebugOptions {
    /// What looks at the steps of one rank, in the order in which it is called.
    pub(crate) fn observers(&self) -> Result<Vec<Box<dyn Observer>>> {
        Ok(Vec::new())
    }
}
