//! Looking into a run: what looks at the steps of its ranks.

mod options;
mod prompt;

pub use options::DebugOptions;
pub(crate) use prompt::DebuggedRank;
pub use prompt::{
    BREAKPOINTS_IN_CODE, Breakpoint, BreakpointError, Desk, Number, Others, Part, Pass, ToPrompt, Trigger,
};

use crate::error::Result;
use crate::run::Observer;
use prompt::Debugger;

/// What looks at the steps of one rank, in the order in which it is called.
pub(crate) fn observers(options: &DebugOptions, of: DebuggedRank) -> Result<Vec<Box<dyn Observer>>> {
    Ok(vec![Box::new(Debugger::new(options, of))])
}
