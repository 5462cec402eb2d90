//! What looks into a run from its start.

use super::breakpoint::Breakpoint;

/// What looks into a run from its start.
#[derive(Clone, Debug, Default)]
pub struct DebugOptions {
    /// Where it stops.
    pub breakpoints: Vec<Breakpoint>,
}
