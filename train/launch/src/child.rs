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

#[derive(Debug)]
pub(super) struct End {
    pub(super) rank: usize,
    pub(super) pid: i32,
    pub(super) code: Option<i32>,
    pub(super) signal: Option<i32>,
    pub(super) after: Duration,
    pub(super) at: Instant,
    pub(super) asked_to_end: bool,
    pub(super) killed: Option<String>,
    pub(super) words: Vec<(Message, String)>,
    pub(super) crash: Option<PathBuf>,
    pub(super) last_lines: Vec<String>,
    pub(super) stderr: PathBuf,
}

pub(super) struct Job {
    pub(super) node: Node,
    pub(super) name: String,
    pub(super) restart: u64,
    pub(super) run: Option<String>,
    pub(super) grace: Duration,
}

impl Job {
    pub(super) fn rank(&self, local_rank: usize) -> usize {
        self.node.node_rank * self.node.nproc_per_node + local_rank
    }

    pub(super) fn restarts(&self) -> u64 {
        self.node.job.restarts.saturating_add(self.restart)
    }

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
            // This launcher does not listen on the master's port.
            ("TORCHELASTIC_USE_AGENT_STORE", "False".to_owned()),
            (LAUNCHER_PID, std::process::id().to_string()),
            (GRACE, self.grace.as_secs_f64().to_string()),
        ];
        variables.extend(self.run.clone().map(|run| (RUN, run)));
        variables.extend(node.secret.clone().map(|secret| (SECRET, secret.0)));
        variables
    }
}

pub(super) enum Event {
    /// Child `index` has ended and must be reaped.
    Ended { index: usize, at: Instant },
    /// The launcher has received a signal.
    Signal(i32),
}

pub(super) struct Child {
    pub(super) rank: usize,
    pid: Pid,
    process: Process,
    started: Instant,
    stderr: Log,
    copying: Vec<Copying>,
    link: RankLink,
    /// True until the process is reaped; a zombie keeps its process id.
    exists: bool,
    asked_to_end: bool,
    killed: Option<String>,
}

impl Child {
    /// Sends [`Event::Ended`] with `index` to `events` when the rank ends.
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
            // A missing log must not end a job that is already running.
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
            // A separate group: Ctrl-C reaches ranks only through the launcher, and a rank's own processes end with it.
            .process_group(0);
        let link = RankLink::for_child(&mut command).map_err(LaunchError::system("make a pipe"))?;
        let process =
            command.spawn().map_err(|source| LaunchError::Start { program: program.to_owned(), source })?;
        let pid = Pid::from_child(&process);
        // From here on, an error ends the process.
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
            // Not reaped here: until then, the id belongs to this child, and no signal can reach another process.
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

    pub(super) fn end(&mut self) {
        if self.exists {
            self.asked_to_end = true;
            let _ = kill_process_group(self.pid, Signal::TERM);
        }
    }

    pub(super) fn kill(&mut self, why: &str) {
        if self.exists {
            self.asked_to_end = true;
            self.killed = Some(why.to_owned());
            let _ = kill_process_group(self.pid, Signal::KILL);
        }
    }

    /// Only SIGKILL can end a stopped process.
    pub(super) fn is_stopped(&self) -> bool {
        self.exists && matches!(kiln_sys::state_of(self.pid), Some('T' | 't'))
    }

    /// Asks the rank to save and end. Unlike SIGTERM, may be sent twice.
    pub(super) fn stop(&mut self) {
        self.asked_to_end |= self.exists;
        self.notify(Signal::USR1);
    }

    /// Signals only the rank's own process, which has a handler.
    pub(super) fn notify(&self, signal: Signal) {
        if self.exists {
            let _ = kill_process(self.pid, signal);
        }
    }

    pub(super) fn exists(&self) -> bool {
        self.exists
    }

    /// Reaps the rank after its end, and ends the processes that it left behind.
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
        if end.signal == Some(SIGKILL)
            && !end.asked_to_end
            && let Some(crashes) = end.last(Message::Crashes)
        {
            let (rank, seen, lines) = ((end.rank, end.pid), self.link.seen(), &end.last_lines);
            let report = kiln_sys::report_killed(crashes.as_ref(), rank, seen, &end.stderr, lines);
            end.crash = report.ok();
        }
        Ok(end)
    }
}

impl Drop for Child {
    /// Happens only after an error of the launcher itself.
    fn drop(&mut self) {
        if self.exists {
            let _ = kill_process_group(self.pid, Signal::KILL);
            let _ = self.process.wait();
        }
    }
}
