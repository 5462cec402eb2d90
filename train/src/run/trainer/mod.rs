//! What one rank does from the first to the last step: `Trainer::start`, then `Trainer::run` or a loop of the
//! program's own.

mod conclusion;
mod grace;
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
mod text;

pub use state::Trainer;
