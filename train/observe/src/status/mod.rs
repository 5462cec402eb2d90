//! A run at one moment: the combined answers of all its processes (`look.rs`), the assessment of its health
//! (`health.rs`), and its description (`table.rs`).

use std::path::Path;
use std::sync::Arc;

mod health;
mod look;
mod table;

pub use health::{State, ranks_of};
pub use look::{Call, Look, ProcessLook, RankLook, look};
pub use table::{summary, text};

/// Returns the current state of the run in a folder, or the reason why that is impossible, for people. The
/// caller, which knows the folder's locks and checkpoints, provides it: this crate knows neither.
pub type LookAt = Arc<dyn Fn(&Path) -> Result<Look, String> + Send + Sync>;
