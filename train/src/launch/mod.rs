//! `kiln launch`: starts the ranks of a node and watches over them.
//!
//! - `args`: the command line, and what a `kiln train` that is a node does instead;
//! - `environment`: what a rank is told;
//! - `child`: one rank as a process, `logs`: where its output goes;
//! - `supervise`: one life of all ranks, from start to the end of the last one;
//! - `last_words`: what ranks tell besides what they log;
//! - `verdict`: what came of it, `report`: in words;
//! - `restarts`: whether there is another life, and when.
//!
//! Ranks end with their launcher: see [`end_with_launcher`].
//!
//! No loop here polls: a thread per child waits for its end, one for signals, and one loop receives
//! what they say.

mod args;
mod child;
mod environment;
mod last_words;
mod logs;
mod report;
mod restarts;
mod supervise;
mod verdict;

use std::ffi::OsString;
use std::net::TcpListener;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use crate::place::{Node, SECRET};
use crate::process::{self, output};

pub use crate::process::end_with_launcher;
pub use args::{LaunchArgs, LaunchArgsError, run_node};
pub(crate) use logs::is_log_folder;

use environment::Job;
use restarts::{Next, Restarts};
use supervise::{Life, Signals};
use verdict::Verdict;

/// Exit code of ranks that were preempted and have saved their state.
pub const PREEMPTED: u8 = 75;

/// How long ranks get to save and end after a signal, where nobody says otherwise.
pub const GRACE: Duration = Duration::from_secs(30);

/// What to launch.
#[derive(Clone, Debug)]
pub struct Options {
    /// This node.
    pub node: Node,
    /// The program of every rank.
    pub program: PathBuf,
    /// Its arguments.
    pub arguments: Vec<OsString>,
    /// Folder of the ranks' logs; `None` for `runs/logs/<job>`.
    pub log_dir: Option<PathBuf>,
    /// Time between SIGTERM and SIGKILL when the job is to end.
    pub grace: Duration,
}

/// Why ranks could not be launched.
#[derive(Debug, thiserror::Error)]
pub enum LaunchError {
    /// The program does not start.
    #[error("cannot start {}: {source}; check that the file exists and may be executed", .program.display())]
    Start {
        /// The program.
        program: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// A log cannot be written.
    #[error("cannot write {}: {source}; choose another folder with --log-dir", .path.display())]
    Log {
        /// The file or folder.
        path: PathBuf,
        /// The system's reason.
        source: std::io::Error,
    },
    /// The system refuses something else that is needed.
    #[error("cannot {what}: {source}")]
    System {
        /// What was tried.
        what: &'static str,
        /// The system's reason.
        source: std::io::Error,
    },
}

/// Starts the ranks of a node, again after failures if that is wanted, and returns the exit code.
/// To be called from the main thread: the system ends ranks with the thread that started them.
pub fn run(options: &Options) -> Result<u8, LaunchError> {
    let _output = output::never_block();
    process::hear_of_children();
    let signals = Signals::register()?;
    let mut node = options.node.clone();
    let choose_port = node.master.port == 0;
    let name = match node.job.name.take() {
        Some(name) => name,
        // The name must be the same everywhere, so only a single node can make one up.
        None if node.nodes == 1 => format!("kiln-{}", random_text(8)?),
        None => "none".to_owned(),
    };
    let fallback =
        Path::new("runs").join("logs").join(name.replace(['/', '\\'], "-").replace("..", "-"));
    let log_dir = options.log_dir.clone().unwrap_or_else(|| fallback.clone());
    if node.secret.is_none() {
        match node.nodes {
            1 => node.secret = Some(random_text(16)?),
            _ => report::say(&format!(
                "warning: {SECRET} is not set, so whoever reaches port {} of {} could take a rank's \
                 place; unless that is a loopback address or comm.open is true, the ranks will refuse \
                 to start. Set it to the same random text on every node; `openssl rand -hex 32` makes \
                 one",
                node.master.port, node.master.host
            )),
        }
    }
    let mut restarts = Restarts::new(node.max_restarts);
    let mut job = Job { node, name, restart: 0, run: None, grace: options.grace };
    // Held until the last rank has ended.
    let (logs, _claimed) = logs::claim(&log_dir, &fallback, job.rank(0), job.restarts())?;
    if logs != log_dir {
        report::say(&format!(
            "another launch writes its logs to {} right now; those of this one are in {}",
            log_dir.display(),
            logs.display()
        ));
    }
    loop {
        if choose_port {
            job.node.master.port = free_port(&job.node.master.host)?;
        }
        let life = Life {
            job: &job,
            program: &options.program,
            arguments: &options.arguments,
            log_dir: &logs,
        };
        let begun = Instant::now();
        let ends = life.run(&signals)?;
        let verdict = Verdict::of(&ends);
        report::tell(&job, &ends, &verdict);
        let pause = match restarts.after(&ends, verdict, begun.elapsed()) {
            Next::End => return Ok(verdict.code()),
            Next::GiveUp(why) => {
                report::say(&why);
                return Ok(verdict.code());
            }
            Next::Again(pause) => pause,
        };
        job.restart = restarts.done();
        job.run = ends.ranks.iter().find_map(|end| end.run.clone()).or(job.run);
        report::say(&format!("the next try is in {} s", pause.as_secs()));
        if let Some(signal) = signals.pause(pause) {
            let name = report::signal_name(signal);
            report::say(&format!("{name} before the next try: the job is not started again"));
            // Whichever signal it was: nothing runs, and what was saved stays.
            return Ok(PREEMPTED);
        }
        report::say(&format!(
            "starting all ranks of this node again, restart {} of {}",
            job.restart, job.node.max_restarts
        ));
    }
}

/// A port on which nobody listens. It is free again when this returns, so another program could
/// take it before rank 0 does; the job then fails at once and says so.
fn free_port(host: &str) -> Result<u16, LaunchError> {
    let listener = TcpListener::bind((host, 0)).or_else(|_| TcpListener::bind(("0.0.0.0", 0)));
    let address = listener.and_then(|listener| listener.local_addr());
    address
        .map(|address| address.port())
        .map_err(|source| LaunchError::System { what: "find a free port", source })
}

/// `bytes` random bytes in hexadecimal.
fn random_text(bytes: usize) -> Result<String, LaunchError> {
    let mut random = vec![0; bytes];
    getrandom::fill(&mut random).map_err(|error| LaunchError::System {
        what: "get random bytes from the system",
        source: std::io::Error::other(error.to_string()),
    })?;
    Ok(random.iter().map(|byte| format!("{byte:02x}")).collect())
}
