//! The state of a run: combined answers of its processes, an assessment of its health, and a text for people.

use std::path::Path;
use std::sync::Arc;

mod health;
mod look;
mod table;

pub use health::{State, ranks_of};
pub use look::{Call, Look, ProcessLook, RankLook, look};
pub use table::{summary, text};

/// Returns the state of the run in a folder, or an error message. The caller provides this function because
/// this crate does not know the run's locks and checkpoints.
pub type LookAt = Arc<dyn Fn(&Path) -> Result<Look, String> + Send + Sync>;
