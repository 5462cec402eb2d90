//! Measurements of training steps on made-up tokens. [`strategies`] is `kiln bench strategies`; what it
//! shares with other measurements, such as those of the program `kiln-bench`, is in `made_up.rs`.

mod made_up;
mod strategies;

pub use made_up::{check_counts, default_config, median, step};
pub(crate) use strategies::StrategiesArgs;
pub use strategies::{StrategiesOptions, StrategiesTable, StrategyRow, strategies};
