//! Measurements: [`strategies`] is `kiln bench strategies`, `network.rs` is `kiln bench network`. What they
//! share with other measurements, such as those of the program `kiln-bench`, is in `made_up.rs`: training steps
//! on made-up tokens.

mod made_up;
mod network;
mod strategies;

use made_up::settle;
pub(crate) use made_up::step_with_outcome;
pub use made_up::{check_counts, default_config, median, step};
pub(crate) use network::NetworkArgs;
pub(crate) use strategies::StrategiesArgs;
pub use strategies::{StrategiesOptions, StrategiesTable, StrategyRow, strategies};
