//! `kiln status`: what a process says of its ranks (`process.rs`), and what is left of a run that has ended
//! (`ended.rs`). `kiln_observe::status` makes something of all that is said.

mod command;
pub(super) mod ended;
mod process;

pub use command::StatusArgs;
pub(crate) use command::look_at_runs;
pub(crate) use process::About;
