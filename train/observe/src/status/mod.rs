//! A run at one moment: the combined answers of all its processes (`look.rs`), the assessment of its health
//! (`opinion.rs`), and its description (`show.rs`).

use std::path::Path;
use std::sync::Arc;

mod look;
mod opinion;
mod show;

pub use look::{Call, Look, ProcessLook, RankLook, look};
pub use opinion::{State, ranks_of};
pub use show::text;

/// Returns the current state of the run in a folder, or the reason why that is impossible, for people. The
/// caller, which knows the folder's locks and checkpoints, provides it: this crate knows neither.
pub type LookAt = Arc<dyn Fn(&Path) -> Result<Look, String> + Send + Sync>;
