//! The work of one rank from the first to the last step: `Trainer::start`, then `Trainer::run` or a custom
//! loop.

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
