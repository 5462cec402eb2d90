//! Starts the ranks of a node and watches over them: what is behind `kiln launch`, whose command line is in the
//! crate `kiln`.
//!
//! - [`place`]: where a process stands among the ranks of a job, and what a node is to start;
//! - `environment`: what a rank is told;
//! - `child`: one rank as a process, `logs`: where its output goes, `quiet`: what of it a terminal is spared;
//! - `supervise`: one life of all ranks, from start to the end of the last one;
//! - `last_words`: what ranks tell besides what they log, `killed`: what is left of one that could tell nothing;
//! - `verdict`: what came of it, `report`: in words;
//! - `restarts`: whether there is another life, and when; `launcher`: a job from its first life to its last.
//!
//! Ranks end with their launcher: see [`kiln_process::end_with_launcher`].
//!
//! No loop here polls: a thread per child waits for its end, one for signals, and one loop hears them all.

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
