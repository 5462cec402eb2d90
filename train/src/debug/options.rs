//! What looks into a run from its start.

use super::prompt::Breakpoint;

/// What looks into a run from its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DebugOptions {
    /// Where it stops.
    pub breakpoints: Vec<Breakpoint>,
}
