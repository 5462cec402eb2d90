//! What one rank does from the first to the last step: `Rank::start`, then `Rank::run`.

mod grace;
mod pace;
mod run;
mod save;
mod start;
mod state;
mod step;
mod stop;

pub(super) use state::Rank;
