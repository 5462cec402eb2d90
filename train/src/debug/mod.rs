//! Looking into a run: what looks at the steps of its ranks.

mod breakpoint;
pub(crate) mod hash;
mod options;

pub use breakpoint::{Breakpoint, BreakpointError, Number, Others, Part, Pass, Trigger};
pub use hash::{HashOptions, HashOptionsError, HashedKind};
pub use options::DebugOptions;

use hash::{HashedRun, Hasher};

use crate::error::Result;
use crate::run::Observer;

/// What looks at the steps of one rank of `run`, in the order in which it is called.
pub(crate) fn observers(options: &DebugOptions, run: HashedRun<'_>) -> Result<Vec<Box<dyn Observer>>> {
    let hasher = options.hash.clone().map(|options| Box::new(Hasher::new(options, run)) as Box<dyn Observer>);
    Ok(hasher.into_iter().collect())
}
