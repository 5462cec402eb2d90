//! What looks into a run from its start.

use super::breakpoint::Breakpoint;
use super::hash::HashOptions;

/// What looks into a run from its start.
#[derive(Clone, Debug, Default)]
pub struct DebugOptions {
    /// Where it stops.
    pub breakpoints: Vec<Breakpoint>,
    /// The tensors that are hashed.
    pub hash: Option<HashOptions>,
}
