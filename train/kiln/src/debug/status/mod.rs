//! `kiln status`: a process's report on its ranks (`process.rs`), the ranks of a run that have arrived so far
//! (`meeting.rs`), and the remains of a run that has ended (`ended.rs`). `kiln_observe::status` combines
//! these into one status.

mod command;
pub(super) mod ended;
mod meeting;
mod process;

pub use command::StatusArgs;
pub(crate) use command::look_at_runs;
pub(crate) use process::About;
