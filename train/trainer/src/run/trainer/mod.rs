//! The work of one rank: `Trainer::start`, then `Trainer::run` or a custom loop.

mod conclusion;
mod groups;
mod issued;
mod pace;
mod run;
mod sample;
mod save;
mod start;
mod state;
mod step;
mod stop;

pub use state::Trainer;
