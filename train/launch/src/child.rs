//! One rank as a process.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child as Process, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Instant;

use kiln_process::launcher::Word;
use kiln_process::words::number_of;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};

use super::end::End;
use super::environment::Job;
use super::error::LaunchError;
use super::killed;
use super::last_words::LastWords;
use super::logs::{Copying, LAST_OUTPUT, Log, Stream};
use super::say::say;

/// What the supervisor waits for.
pub(super) enum Event {
    /// A child has ended and waits to be reaped. `index`: its local rank; `at`: when it ended.
    Ended { index: usize, at: Instant },
    /// The launcher was sent a signal.
    Signal(i32),
}

/// A rank that was started.
pub(super) struct Child {
    /// Rank in the job.
    pub(super) rank: usize,
    pid: Pid,
    process: Process,
    started: Instant,
    stderr: Log,
    copying: Vec<Copying>,
    last_words: LastWords,
    /// Whether the process still exists, if only as a zombie that keeps its number.
    exists: bool,
    /// Whether the launcher has told it to end.
    told: bool,
    /// Why the launcher has killed it, if it has.
    killed: Option<String>,
}

impl Child {
    /// Starts a rank. Its end is reported to `events` as `index`.
    pub(super) fn start(
        job: &Job,
        index: usize,
        program: &Path,
        arguments: &[OsString],
        log_dir: &Path,
        events: Sender<Event>,
    ) -> Result<Child, LaunchError> {
        let rank = job.rank(index);
        let open = |stream| match Log::open(log_dir, rank, job.restarts(), stream) {
            // A job that runs already does not end for a log.
            Err(error) if job.restart > 0 => {
                say(&format!("{error}; the output of rank {rank} is lost"));
                Log::nowhere()
            }
            opened => opened,
        };
        let (stdout, stderr) = (open(Stream::Stdout)?, open(Stream::Stderr)?);
        let output = |log: &Log| match rank {
            0 => Ok(Stdio::piped()),
            _ => log.for_child().map(Stdio::from),
        };
        let mut command = Command::new(program);
        command
            .args(arguments)
            .envs(job.environment(index))
            .stdin(Stdio::null())
            .stdout(output(&stdout)?)
            .stderr(output(&stderr)?)
            // A group of its own: Ctrl-C in the terminal reaches ranks through the launcher alone,
            // and what a rank has started ends with it.
            .process_group(0);
        let last_words = LastWords::of(&mut command)
            .map_err(|source| LaunchError::System { what: "make a pipe", source })?;
        let process =
            command.spawn().map_err(|source| LaunchError::Start { program: program.to_owned(), source })?;
        let pid = Pid::from_child(&process);
        // From here on, an error ends the process again.
        let mut child = Child {
            rank,
            pid,
            process,
            started: Instant::now(),
            stderr,
            copying: Vec::new(),
            last_words,
            exists: true,
            told: false,
            killed: None,
        };
        if let Some(pipe) = child.process.stdout.take() {
            child.copying.push(stdout.copy(pipe, Stream::Stdout)?);
        }
        if let Some(pipe) = child.process.stderr.take() {
            child.copying.push(child.stderr.copy(pipe, Stream::Stderr)?);
        }
        let wait = move || {
            // Not reaped here: until the supervisor does that, the number belongs to this child,
            // and no signal can reach a stranger.
            let options = WaitIdOptions::EXITED | WaitIdOptions::NOWAIT;
            while matches!(waitid(WaitId::Pid(pid), options), Err(rustix::io::Errno::INTR)) {}
            let _ = events.send(Event::Ended { index, at: Instant::now() });
        };
        thread::Builder::new()
            .name(format!("kiln-wait-{index}"))
            .spawn(wait)
            .map_err(|source| LaunchError::System { what: "start a thread", source })?;
        Ok(child)
    }

    /// Tells the rank and what it has started to end.
    pub(super) fn end(&mut self) {
        if self.exists {
            self.told = true;
            let _ = kill_process_group(self.pid, Signal::TERM);
        }
    }

    /// Ends the rank and what it has started at once; `why` says for which reason.
    pub(super) fn kill(&mut self, why: &str) {
        if self.exists {
            self.told = true;
            self.killed = Some(why.to_owned());
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }

    /// Whether the process is stopped, as by SIGSTOP, so that nothing but SIGKILL can end it.
    pub(super) fn is_stopped(&self) -> bool {
        self.exists && matches!(kiln_process::state_of(self.pid), Some('T' | 't'))
    }

    /// Asks the rank to save and end. Unlike SIGTERM, that may be said to one that was told already.
    pub(super) fn stop(&mut self) {
        if self.exists {
            self.told = true;
        }
        self.notify(Signal::USR1);
    }

    /// Sends a signal to the rank alone, which knows what it means.
    pub(super) fn notify(&self, signal: Signal) {
        if self.exists {
            let _ = kill_process(self.pid, signal);
        }
    }

    pub(super) fn exists(&self) -> bool {
        self.exists
    }

    /// Takes note of the end that was reported, and ends what the rank has left behind.
    pub(super) fn reap(&mut self, at: Instant) -> Result<End, LaunchError> {
        let _ = kill_process_group(self.pid, Signal::KILL);
        let error = |source| LaunchError::System { what: "learn how a rank ended", source };
        let status: ExitStatus = self.process.wait().map_err(error)?;
        self.exists = false;
        let finish = |copying: Copying| copying.finish(Instant::now() + LAST_OUTPUT);
        let lost: usize = self.copying.drain(..).map(finish).sum();
        if lost > 0 {
            let rank = self.rank;
            say(&format!("rank {rank}: its logs could not take {}", number_of(lost, "byte")));
        }
        let (mut step, mut run, mut crashes, mut absent, mut words) =
            (None, None, None, Vec::new(), Vec::new());
        let seen = self.last_words.seen();
        for (word, text) in self.last_words.read() {
            match word {
                Word::Step => step = text.parse().ok(),
                Word::Run => run = Some(text),
                Word::Crashes => crashes = Some(text.into()),
                Word::Absent => absent = text.split(',').flat_map(str::parse).collect(),
                _ => words.push((word, text)),
            }
        }
        let mut end = End {
            rank: self.rank,
            pid: self.pid.as_raw_nonzero().get(),
            code: status.code(),
            signal: status.signal(),
            after: at.saturating_duration_since(self.started),
            at,
            told: self.told,
            killed: self.killed.take(),
            words,
            step,
            seen,
            crashes,
            crash: None,
            run,
            absent,
            last_lines: self.stderr.tail(),
            stderr: self.stderr.path.clone(),
        };
        end.crash = killed::keep(&end);
        Ok(end)
    }
}

impl Drop for Child {
    /// Only after an error of the launcher itself is there anything left to end.
    fn drop(&mut self) {
        if self.exists {
            let _ = kill_process_group(self.pid, Signal::KILL);
            let _ = self.process.wait();
        }
    }
}
