//! What looks into a run from its start.

use super::hash::HashOptions;
use super::prompt::Breakpoint;

/// What looks into a run from its start.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct DebugOptions {
    /// Where it stops.
    pub breakpoints: Vec<Breakpoint>,
    /// Whether the prompt of a run that is held may be opened on its terminal: `kiln attach` of this program.
    pub has_prompt: bool,
    /// The tensors that are hashed.
    pub hash: Option<HashOptions>,
}
