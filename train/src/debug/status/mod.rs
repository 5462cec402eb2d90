//! `kiln status`: what a process says of its ranks (`process.rs`), who is there of a run whose ranks have not all come
//! (`meeting.rs`), and what is left of a run that has ended (`ended.rs`). `kiln_observe::status` makes something of all that is said.

mod command;
pub(super) mod ended;
mod meeting;
mod process;

pub use command::StatusArgs;
pub(crate) use command::look_at_runs;
pub(crate) use process::About;
