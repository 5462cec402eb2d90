//! A run at one moment: what is made of the answers of all its processes (`look.rs`), whether something is wrong
//! (`opinion.rs`), and the text of it (`show.rs`).

use std::path::Path;
use std::sync::Arc;

mod look;
mod opinion;
mod show;

pub use look::{Call, Look, ProcessLook, RankLook, look};
pub use opinion::{State, ranks_of};
pub use show::text;

/// Looks at the run in a folder at this moment, or says why that is not possible, for people. Whoever has the folder's
/// locks and checkpoints hands it in: this crate knows neither.
pub type LookAt = Arc<dyn Fn(&Path) -> Result<Look, String> + Send + Sync>;
