//! `kiln launch`: starts the ranks of a node and watches over them.
//!
//! - `args`: the command line, and what a `kiln train` that is a node does instead;
//! - `environment`: what a rank is told;
//! - `child`: one rank as a process, `logs`: where its output goes;
//! - `supervise`: one life of all ranks, from start to the end of the last one;
//! - `last_words`: what ranks tell besides what they log;
//! - `verdict`: what came of it, `report`: in words;
//! - `restarts`: whether there is another life, and when; `launcher`: a job from its first life to its last.
//!
//! Ranks end with their launcher: see [`end_with_launcher`].
//!
//! No loop here polls: a thread per child waits for its end, one for signals, and one loop hears them all.

mod args;
mod child;
mod end;
mod environment;
mod error;
mod last_words;
mod launcher;
mod logs;
mod report;
mod restarts;
mod say;
mod supervise;
mod verdict;

pub use crate::process::end_with_launcher;
pub use args::{LaunchArgs, run_node};
pub use end::PREEMPTED;
pub use error::{LaunchArgsError, LaunchError};
pub use launcher::{GRACE, Options, run};
pub(crate) use logs::is_log_folder;
