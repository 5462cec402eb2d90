//! A rank as a process, and its environment: torchrun's variables, and Kiln's own.

use std::ffi::OsString;
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::{Path, PathBuf};
use std::process::{Child as Process, Command, Stdio};
use std::sync::mpsc::Sender;
use std::thread;
use std::time::{Duration, Instant};

use kiln_sys::launcher::{GRACE, LAUNCHER_PID, Message, RUN, RankLink};
use kiln_sys::words::number_of;
use rustix::process::{Pid, Signal, WaitId, WaitIdOptions, kill_process, kill_process_group, waitid};
use signal_hook::consts::SIGKILL;

use super::logs::{Copying, LAST_OUTPUT, Log, Stream};
use super::place::{Node, SECRET};
use super::{LaunchError, print};

/// How a rank's process ended.
#[derive(Debug)]
pub(super) struct End {
    pub(super) rank: usize,
    pub(super) pid: i32,
    /// Exit code; `None` if a signal ended the process.
    pub(super) code: Option<i32>,
    /// The signal that ended the process.
    pub(super) signal: Option<i32>,
    /// Time from the start of the rank to its end.
    pub(super) after: Duration,
    /// Time at which the rank ended, for ordering events.
    pub(super) at: Instant,
    /// True if the launcher had asked the rank to end.
    pub(super) asked_to_end: bool,
    /// Reason why the launcher killed the rank, if it did.
    pub(super) killed: Option<String>,
    /// Messages that the rank sent to the launcher.
    pub(super) words: Vec<(Message, String)>,
    /// The rank's crash report, if the launcher had to write it.
    pub(super) crash: Option<PathBuf>,
    /// The rank's last lines on stderr.
    pub(super) last_lines: Vec<String>,
    /// The log file with all of these lines.
    pub(super) stderr: PathBuf,
}

/// One life of a job on this node: from the start of its ranks to the end of the last one.
pub(super) struct Job {
    /// The node, with the port already chosen.
    pub(super) node: Node,
    /// Name of the job.
    pub(super) name: String,
    /// Number of times that this launcher has restarted the ranks.
    pub(super) restart: u64,
    /// The id of the run that an earlier life of the job worked on.
    pub(super) run: Option<String>,
    /// How long after SIGTERM the launcher sends SIGKILL.
    pub(super) grace: Duration,
}

impl Job {
    /// Returns the rank, in the whole job, of the child with this local rank.
    pub(super) fn rank(&self, local_rank: usize) -> usize {
        self.node.node_rank * self.node.nproc_per_node + local_rank
    }

    /// Returns the number of times that the ranks were restarted, by any launcher or scheduler.
    pub(super) fn restarts(&self) -> u64 {
        self.node.job.restarts.saturating_add(self.restart)
    }

    /// Returns the environment variables of one rank.
    fn environment(&self, local_rank: usize) -> Vec<(&'static str, String)> {
        let node = &self.node;
        let rank = self.rank(local_rank).to_string();
        let world_size = (node.nodes * node.nproc_per_node).to_string();
        let most = node.max_restarts.saturating_add(node.job.restarts);
        let mut variables = vec![
            ("RANK", rank.clone()),
            ("LOCAL_RANK", local_rank.to_string()),
            ("WORLD_SIZE", world_size.clone()),
            ("LOCAL_WORLD_SIZE", node.nproc_per_node.to_string()),
            ("GROUP_RANK", node.node_rank.to_string()),
            ("GROUP_WORLD_SIZE", node.nodes.to_string()),
            ("ROLE_NAME", "default".to_owned()),
            ("ROLE_RANK", rank),
            ("ROLE_WORLD_SIZE", world_size),
            ("MASTER_ADDR", node.master.host.clone()),
            ("MASTER_PORT", node.master.port.to_string()),
            ("TORCHELASTIC_RESTART_COUNT", self.restarts().to_string()),
            ("TORCHELASTIC_MAX_RESTARTS", most.to_string()),
            ("TORCHELASTIC_RUN_ID", self.name.clone()),
            // Unlike torchrun, this launcher does not listen on the master's port.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
            (LAUNCHER_PID, std::process::id().to_string()),
            (GRACE, self.grace.as_secs_f64().to_string()),
        ];
        variables.extend(self.run.clone().map(|run| (RUN, run)));
        variables.extend(node.secret.clone().map(|secret| (SECRET, secret.0)));
        variables
    }
}

/// An event that the supervisor waits for.
pub(super) enum Event {
    /// A child has ended and must be reaped. `index`: its local rank; `at`: when it ended.
    Ended { index: usize, at: Instant },
    /// The launcher has received a signal.
    Signal(i32),
}

/// A rank that has been started.
pub(super) struct Child {
    /// Rank in the job.
    pub(super) rank: usize,
    pid: Pid,
    process: Process,
    started: Instant,
    stderr: Log,
    copying: Vec<Copying>,
    link: RankLink,
    /// True until the process is reaped; a zombie still keeps its process id.
    exists: bool,
    /// True if the launcher has asked the rank to end.
    asked_to_end: bool,
    /// Reason why the launcher killed the rank, if it did.
    killed: Option<String>,
}

impl Child {
    /// Starts a rank. When it ends, sends [`Event::Ended`] with `index` to `events`.
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
                print(&format!("{error}; the output of rank {rank} is lost"));
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
        let link = RankLink::for_child(&mut command).map_err(LaunchError::system("make a pipe"))?;
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
            link,
            exists: true,
            asked_to_end: false,
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
            .map_err(LaunchError::system("start a thread"))?;
        Ok(child)
    }

    /// Asks the rank and the processes that it has started to end.
    pub(super) fn end(&mut self) {
        if self.exists {
            self.asked_to_end = true;
            let _ = kill_process_group(self.pid, Signal::TERM);
        }
    }

    /// Kills the rank and the processes that it has started, for the reason `why`.
    pub(super) fn kill(&mut self, why: &str) {
        if self.exists {
            self.asked_to_end = true;
            self.killed = Some(why.to_owned());
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }

    /// Returns whether the process is stopped, as by SIGSTOP: then only SIGKILL can end it.
    pub(super) fn is_stopped(&self) -> bool {
        self.exists && matches!(kiln_sys::state_of(self.pid), Some('T' | 't'))
    }

    /// Asks the rank to save and end. Unlike SIGTERM, this may be sent to a rank that is already ending.
    pub(super) fn stop(&mut self) {
        self.asked_to_end |= self.exists;
        self.notify(Signal::USR1);
    }

    /// Sends a signal only to the rank's own process, which handles it.
    pub(super) fn notify(&self, signal: Signal) {
        if self.exists {
            let _ = kill_process(self.pid, signal);
        }
    }

    pub(super) fn exists(&self) -> bool {
        self.exists
    }

    /// Reaps the rank after it has ended, and ends processes that the rank has left behind.
    pub(super) fn reap(&mut self, at: Instant) -> Result<End, LaunchError> {
        let _ = kill_process_group(self.pid, Signal::KILL);
        let status = self.process.wait().map_err(LaunchError::system("read how a rank ended"))?;
        self.exists = false;
        let finish = |copying: Copying| copying.finish(Instant::now() + LAST_OUTPUT);
        let lost: usize = self.copying.drain(..).map(finish).sum();
        if lost > 0 {
            let rank = self.rank;
            print(&format!("rank {rank}: its logs could not take {}", number_of(lost, "byte")));
        }
        let mut end = End {
            rank: self.rank,
            pid: self.pid.as_raw_nonzero().get(),
            code: status.code(),
            signal: status.signal(),
            after: at.saturating_duration_since(self.started),
            at,
            asked_to_end: self.asked_to_end,
            killed: self.killed.take(),
            words: self.link.messages(),
            crash: None,
            last_lines: self.stderr.tail(),
            stderr: self.stderr.path.clone(),
        };
        // Ranks that crash in other ways write a report themselves.
        if end.signal == Some(SIGKILL)
            && !end.asked_to_end
            && let Some(crashes) = end.last(Message::Crashes)
        {
            let (rank, seen, lines) = ((end.rank, end.pid), self.link.seen(), &end.last_lines);
            let report = kiln_sys::report_killed(crashes.as_ref(), rank, seen, &end.stderr, lines);
            // The run has failed already; an error here must not hide the cause.
            end.crash = report.ok();
        }
        Ok(end)
    }
}

impl Drop for Child {
    /// Kills a rank that is still running, which happens only after an error of the launcher itself.
    fn drop(&mut self) {
        if self.exists {
            let _ = kill_process_group(self.pid, Signal::KILL);
            let _ = self.process.wait();
        }
    }
}
