//! The sharding engine of one rank: building it from modules, the passes of a step, the optimizer step, and reading
//! and writing whole parameters.

mod build;
mod core;
mod groups;
mod histograms;
mod norms;
mod pass;
mod snapshot;
mod state;
mod update;
mod whole;

pub use self::build::EngineBuilder;
pub use self::core::Engine;
pub use self::groups::PlannedGroup;
pub use self::snapshot::Snapshot;
pub use self::update::{Outcome, Update};
