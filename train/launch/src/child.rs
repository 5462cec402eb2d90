//! One rank as a process.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child as Process, Command, ExitStatus, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::Instant;

use kiln_sys::launcher::Word;
use kiln_sys::words::number_of;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};

use super::end::End;
use super::environment::Job;
use super::error::LaunchError;
use super::killed;
use super::last_words::LastWords;
use super::logs::{Copying, LAST_OUTPUT, Log, Stream};
use super::say::say;

/// An event that the supervisor waits for.
pub(super) enum Event {
    /// A child has ended and must be reaped. `index`: its local rank; `at`: time of its end.
    Ended { index: usize, at: Instant },
    /// The launcher has received a signal.
    Signal(i32),
}

/// A started rank.
pub(super) struct Child {
    /// Rank in the job.
    pub(super) rank: usize,
    pid: Pid,
    process: Process,
    started: Instant,
    stderr: Log,
    copying: Vec<Copying>,
    last_words: LastWords,
    /// True while the process exists, if only as a zombie that keeps its number.
    exists: bool,
    /// True if the launcher has told it to end.
    told: bool,
    /// Reason why the launcher has killed it, if it has.
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
            // A missing log does not end a job that is already running.
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
            // In a separate group: Ctrl-C in the terminal reaches ranks only through the launcher, and
            // processes that a rank has started end with it.
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
            // Not reaped here: until the supervisor does that, the number belongs to this child, and no
            // signal can reach an unrelated process.
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

    /// Tells the rank and the processes it has started to end.
    pub(super) fn end(&mut self) {
        if self.exists {
            self.told = true;
            let _ = kill_process_group(self.pid, Signal::TERM);
        }
    }

    /// Kills the rank and the processes it has started; `why` is the reason.
    pub(super) fn kill(&mut self, why: &str) {
        if self.exists {
            self.told = true;
            self.killed = Some(why.to_owned());
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }

    /// Returns whether the process is stopped, as by SIGSTOP, so that only SIGKILL can end it.
    pub(super) fn is_stopped(&self) -> bool {
        self.exists && matches!(kiln_sys::state_of(self.pid), Some('T' | 't'))
    }

    /// Asks the rank to save and end. Unlike SIGTERM, this may be sent to a rank that was told to end
    /// already.
    pub(super) fn stop(&mut self) {
        if self.exists {
            self.told = true;
        }
        self.notify(Signal::USR1);
    }

    /// Sends a signal only to the rank itself, which knows its meaning.
    pub(super) fn notify(&self, signal: Signal) {
        if self.exists {
            let _ = kill_process(self.pid, signal);
        }
    }

    pub(super) fn exists(&self) -> bool {
        self.exists
    }

    /// Records the reported end, and ends processes that the rank has left behind.
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
    /// There is only something left to end after an error of the launcher itself.
    fn drop(&mut self) {
        if self.exists {
            let _ = kill_process_group(self.pid, Signal::KILL);
            let _ = self.process.wait();
        }
    }
}
