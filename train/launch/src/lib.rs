//! Starts and supervises the ranks of a node: the implementation of `kiln launch`, whose command line is in the crate
//! `kiln`. [`place`] finds the place of a process among the ranks of a job.
//!
//! Ranks end with their launcher: see [`kiln_sys::end_with_launcher`]. Threads wait for children and signals, and one
//! loop receives their events.

mod child;
mod ends;
mod launcher;
mod logs;
pub mod place;
mod restarts;
mod supervise;

use std::io;
use std::path::PathBuf;

use kiln_sys::output::eprint_line;

pub use ends::PREEMPTED;
pub use launcher::{GRACE, Options, run};
pub use logs::{LOGS, is_log_folder};
use place::EnvError;

/// The reason why ranks could not be launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program cannot be started.
    #[error("cannot start {}: {source}; check that the file exists and may be executed", .program.display())]
    Start { program: PathBuf, source: io::Error },
    /// A log cannot be written.
    #[error("cannot write {}: {source}; choose another folder with --log-dir", .path.display())]
    Log { path: PathBuf, source: io::Error },
    /// The system refused another operation.
    #[error("cannot {what}: {source}")]
    System { what: &'static str, source: io::Error },
}

impl LaunchError {
    fn system(what: &'static str) -> impl FnOnce(io::Error) -> Self {
        move |source| LaunchError::System { what, source }
    }
}

/// The reason why a launch failed.
#[derive(Debug, thiserror::Error)]
pub enum LaunchArgsError {
    /// The environment or the flags describe an invalid place of this node.
    #[error(transparent)]
    Env(#[from] EnvError),
    /// The arguments are invalid.
    #[error("{0}")]
    Arguments(String),
    /// The launch itself failed.
    #[error(transparent)]
    Launch(#[from] LaunchError),
}

impl LaunchArgsError {
    /// Returns whether the user's arguments or environment are the cause.
    pub fn is_usage(&self) -> bool {
        !matches!(self, LaunchArgsError::Launch(_))
    }
}

fn print(text: &str) {
    eprint_line(&format!("kiln launch: {text}"));
}

fn signal_name(signal: i32) -> String {
    match signal_hook::low_level::signal_name(signal) {
        Some(name) => format!("{name} ({signal})"),
        None => format!("signal {signal}"),
    }
}
