//! Measurements: [`strategies`] is `kiln bench strategies`, `network.rs` is `kiln bench network`, and `tune.rs`
//! is `kiln tune`, which tries the ways in `ways.rs`. `rounds.rs` measures alternating ways to train.
//! `made_up.rs` has training steps on made-up tokens, also for other measurements such as those of the program
//! `kiln-bench`.

mod made_up;
mod network;
mod rounds;
mod strategies;
mod tune;
mod ways;

use made_up::settle;
pub use made_up::step_with_outcome;
pub use made_up::{StepTimes, check_counts, check_kernels, default_config, median, step};
pub use network::NetworkArgs;
pub use rounds::StrategyRow;
pub use rounds::prepare;
pub use strategies::StrategiesArgs;
pub use strategies::{StrategiesOptions, StrategiesTable, strategies};
pub use tune::{TuneArgs, share_of_percent};
