//! `kiln status`: what a process says of its ranks (`process.rs`), and what is made of all that is said: a look at
//! the run (`look.rs`), whether something is wrong (`opinion.rs`), the text (`show.rs`). What is left of a run that has
//! ended is read from its folder (`ended.rs`).

mod command;
pub(super) mod ended;
mod look;
mod opinion;
mod process;
mod show;

pub use command::StatusArgs;
pub(crate) use process::About;
