//! Starts and supervises the ranks of a node: the implementation of `kiln launch`, whose command line is in
//! the crate `kiln`.
//!
//! - [`place`]: the place of a process among the ranks of a job, and the ranks that a node must start;
//! - `environment`: the variables of a rank;
//! - `child`: one rank as a process, `logs`: the destinations of its output, `quiet`: filters the output on a
//!   terminal;
//! - `supervise`: one life of all ranks, from start to the end of the last one;
//! - `last_words`: messages of ranks in addition to their logs, `killed`: reports for ranks that could send
//!   none;
//! - `verdict`: the outcome, `report`: its description;
//! - `restarts`: whether and when there is another life; `launcher`: a job from its first life to its last.
//!
//! Ranks end with their launcher: see [`kiln_sys::end_with_launcher`].
//!
//! No loop here polls: a thread per child waits for its end, another thread waits for signals, and one loop
//! receives the events of all of them.

mod child;
mod end;
mod environment;
mod error;
mod killed;
mod last_words;
mod launcher;
mod logs;
pub mod place;
mod quiet;
mod report;
mod restarts;
mod say;
mod supervise;
mod verdict;

pub use end::PREEMPTED;
pub use error::{LaunchArgsError, LaunchError};
pub use launcher::{GRACE, Options, run};
pub use logs::{LOGS, is_log_folder};
