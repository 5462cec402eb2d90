//! Asks all processes of a run, combines their answers, and sends lines to the run's prompt.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use kiln_collectives::StepTimeline;
use serde::Serialize;

use super::machine::{ProcessState, state_of, threads_of};
use super::message::{Known, ProcessStatus, Reply, Request, Thread, ToPrompt, Typed};
use super::socket::{Folder, Owner};
use super::symbols::Symbols;

/// Maximum time for a process to answer. With [`PATIENCE_FOR_ALL`], it limits a request to two seconds.
const PATIENCE: Duration = Duration::from_millis(800);

/// Maximum time for rank 0 to ask all others.
const PATIENCE_FOR_ALL: Duration = Duration::from_millis(950);

const PATIENCE_FOR_STACKS: Duration = Duration::from_secs(2);

/// Maximum time for a run to respond to a line, which it reads at the end of a step.
const PATIENCE_FOR_LINES: Duration = Duration::from_secs(5);

/// Maximum size of a reply; a rank takes about 64 KiB.
const MOST_REPLY: usize = 32 << 20;

const MOST_THREADS: usize = 4096;
const MOST_CALLS: usize = 256;

const BUFFER: usize = 1 << 16;

/// A connection to a process of a run.
pub struct Connection {
    stream: BufReader<UnixStream>,
    /// Maximum time from a request to the end of its reply.
    patience: Duration,
}

impl Connection {
    /// Connects to the process `owner`. Each reply may take up to `patience`.
    pub fn open(folder: &Folder, owner: &Owner, patience: Duration) -> io::Result<Self> {
        let stream = folder.connect(owner)?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Connection { stream: BufReader::with_capacity(BUFFER, stream), patience })
    }

    /// Sends a request and waits for the reply.
    pub fn ask(&mut self, request: &Request) -> io::Result<Reply> {
        let end = Instant::now() + self.patience;
        match send_line(self.stream.get_ref(), request) {
            // A refusal may arrive before the request has been sent.
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
            _ => self.read(Some(end)),
        }
    }

    /// Returns a stream that writes to the process, and a connection that reads from it without a time limit.
    pub fn split(self) -> io::Result<(UnixStream, Self)> {
        Ok((self.stream.get_ref().try_clone()?, self))
    }

    /// Waits for the next reply without a time limit.
    pub fn receive(&mut self) -> io::Result<Reply> {
        self.read(None)
    }

    fn read(&mut self, end: Option<Instant>) -> io::Result<Reply> {
        let invalid = |problem| io::Error::new(ErrorKind::InvalidData, problem);
        let mut reply = Vec::new();
        while reply.last() != Some(&b'\n') {
            let left = end.map(|end| end.saturating_duration_since(Instant::now()));
            if left == Some(Duration::ZERO) {
                return Err(ErrorKind::TimedOut.into());
            }
            self.stream.get_ref().set_read_timeout(left)?;
            let part = match self.stream.fill_buf() {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                part => part?,
            };
            if part.is_empty() {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let taken = part.iter().position(|byte| *byte == b'\n').map_or(part.len(), |end| end + 1);
            reply.extend_from_slice(&part[..taken]);
            self.stream.consume(taken);
            if reply.len() > MOST_REPLY {
                return Err(invalid("its reply is too long"));
            }
        }
        // One check of the whole reply is much faster than one per string.
        let reply = std::str::from_utf8(&reply).map_err(|_| invalid("its reply is not UTF-8"))?;
        let reply: Reply = serde_json::from_str(reply)?;
        if reply.is_sound() { Ok(reply) } else { Err(invalid("its reply is inconsistent")) }
    }
}

/// Sends a line of JSON.
pub fn send_line(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Sends a reply. Not generic, so that it is compiled with this crate's optimisation level, because replies are long.
pub fn send_reply(stream: &UnixStream, reply: &Reply) -> io::Result<()> {
    send_line(stream, reply)
}

/// The answer of a process, or the reason why there is none.
#[derive(Debug)]
pub enum Answer {
    Status(Box<ProcessStatus>),
    /// A signal or a debugger has stopped the process.
    Stopped,
    /// The process has ended and left its socket behind.
    Gone,
    /// The process exists but does not answer, for this reason.
    Silent(String),
    /// The process is on another machine.
    Elsewhere,
}

/// A process of a run.
#[derive(Debug)]
pub struct Process {
    pub owner: Owner,
    pub answer: Answer,
    /// Threads according to the kernel, if requested and the process did not answer.
    pub threads: Option<Vec<Thread>>,
}

/// Replies of a run's processes.
#[derive(Debug, Default)]
pub struct Answers {
    pub processes: Vec<Process>,
    /// Rank 0's knowledge of all ranks, if some have no process on this machine.
    pub all: Option<Vec<Known>>,
}

/// Asks all processes with a socket in the run folder `out`. Takes at most two seconds, or longer with `stacks`.
/// Returns no processes if none is alive.
///
/// # Errors
///
/// If this user may not connect to them.
pub fn ask_all(out: &Path, stacks: bool) -> io::Result<Answers> {
    let folder = match Folder::open(out) {
        Ok(folder) => folder,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
        Err(_) => return Ok(Answers::default()),
    };
    let answers = ask_each(&folder, |owner| answer(&folder, owner, stacks));
    let process = |(owner, mut answer): (Owner, Answer)| {
        let pid = owner.process.pid;
        match &mut answer {
            // In another container, the process id refers to another process.
            Answer::Status(status) if owner.process.is_gone() == Some(false) => {
                status.threads.iter_mut().for_each(|threads| name_calls(threads, pid));
            }
            _ => {}
        }
        let is_silent = matches!(answer, Answer::Stopped | Answer::Silent(_));
        let threads = (stacks && is_silent).then(|| threads_of(pid));
        Process { owner, answer, threads }
    };
    let mut processes: Vec<_> = answers.into_iter().map(process).collect();
    if processes.iter().any(|process| matches!(process.answer, Answer::Gone)) {
        // A process that ends normally removes its files.
        let left = folder.owners();
        processes.retain(|process| !matches!(process.answer, Answer::Gone) || left.contains(&process.owner));
    }
    if processes.iter().all(|process| matches!(process.answer, Answer::Gone)) {
        return Ok(Answers::default());
    }
    let all = ask_first(&folder, &processes);
    Ok(Answers { processes, all })
}

fn ask_first(folder: &Folder, processes: &[Process]) -> Option<Vec<Known>> {
    let (first, status) = processes.iter().find_map(|process| match &process.answer {
        Answer::Status(status) if process.owner.ranks.contains(&0) => Some((process, status)),
        _ => None,
    })?;
    let here = |process: &&Process| !matches!(process.answer, Answer::Elsewhere);
    let seen: usize = processes.iter().filter(here).map(|process| process.owner.ranks.len()).sum();
    if seen >= status.world_size {
        return None;
    }
    let mut connection = Connection::open(folder, &first.owner, PATIENCE_FOR_ALL).ok()?;
    match connection.ask(&Request::Status { stacks: false, all: true }).ok()? {
        Reply::Status(status) => status.all,
        _ => None,
    }
}

/// Returns the last complete step of each rank of the run in `out` that answers, ordered by rank.
///
/// # Errors
///
/// If this user may not connect to the processes.
pub fn timelines(out: &Path) -> io::Result<Vec<StepTimeline>> {
    let folder = match Folder::open(out) {
        Ok(folder) => folder,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
        Err(_) => return Ok(Vec::new()),
    };
    let ask = |owner: &Owner| Connection::open(&folder, owner, PATIENCE)?.ask(&Request::Timeline);
    let mut timelines = Vec::new();
    for (_, reply) in ask_each(&folder, ask) {
        if let Ok(Reply::Timeline(of_process)) = reply {
            timelines.extend(of_process);
        }
    }
    timelines.sort_by_key(|timeline: &StepTimeline| timeline.rank);
    Ok(timelines)
}

/// Calls `ask` for all processes at the same time, and returns the results in rank order.
fn ask_each<T: Send>(folder: &Folder, ask: impl Fn(&Owner) -> T + Sync) -> Vec<(Owner, T)> {
    let owners = folder.owners();
    let answers: Vec<_> = thread::scope(|scope| {
        let ask = &ask;
        let spawn = |owner| thread::Builder::new().spawn_scoped(scope, move || ask(owner));
        let threads: Vec<_> = owners.iter().map(spawn).collect();
        threads.into_iter().map(|thread| thread.ok()?.join().ok()).collect()
    });
    owners.into_iter().zip(answers).filter_map(|(owner, answer)| Some((owner, answer?))).collect()
}

fn answer(folder: &Folder, owner: &Owner, stacks: bool) -> Answer {
    let is_gone = owner.process.is_gone();
    if is_gone == Some(true) {
        return Answer::Gone;
    }
    if is_gone == Some(false) && state_of(owner.process.pid) == ProcessState::Stopped {
        return Answer::Stopped;
    }
    let patience = if stacks { PATIENCE_FOR_STACKS } else { PATIENCE };
    let request = Request::Status { stacks, all: false };
    match Connection::open(folder, owner, patience).and_then(|mut process| process.ask(&request)) {
        Ok(Reply::Status(status)) => Answer::Status(status),
        Ok(Reply::Refused(reason)) => Answer::Silent(reason),
        Ok(Reply::Prompt(_) | Reply::Timeline(_)) => {
            Answer::Silent("its reply does not match the request".to_owned())
        }
        Err(_) if is_gone.is_none() => Answer::Elsewhere,
        Err(error) => silence(owner, &error),
    }
}

/// Callers of this function are the same in all threads.
const BEGIN: &str = "__rust_begin_short_backtrace";

fn name_calls(threads: &mut Vec<Thread>, pid: i32) {
    let mut symbols = Symbols::of(pid);
    threads.truncate(MOST_THREADS);
    for thread in threads {
        thread.addresses.truncate(MOST_CALLS);
        // The return address of a call that never returns may lie behind its function.
        let addresses =
            thread.addresses.iter().enumerate().map(|(index, at)| at - u64::from(index > 0 && *at > 0));
        let calls = addresses.map(|address| symbols.name(address));
        thread.calls = calls.collect();
        let begin = thread.calls.iter().position(|call| call.contains(BEGIN));
        // The thread's own function may have been inlined.
        thread.calls.truncate(begin.map_or(usize::MAX, |begin| begin.max(1)));
    }
}

/// Returns the reason why a process does not answer: it may have ended or stopped meanwhile.
fn silence(owner: &Owner, error: &io::Error) -> Answer {
    if owner.process.is_gone() == Some(true) {
        return Answer::Gone;
    }
    match state_of(owner.process.pid) {
        ProcessState::Gone => Answer::Gone,
        ProcessState::Stopped => Answer::Stopped,
        ProcessState::Stuck => Answer::Silent("it waits in the kernel, for example for a disk".to_owned()),
        ProcessState::Running if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            Answer::Silent("the request timed out".to_owned())
        }
        ProcessState::Running => Answer::Silent(error.to_string()),
    }
}

/// Sends `line` to the prompt of the run in `out`, and returns the response. If the current step takes too long,
/// returns a text that says that the run will act later.
///
/// # Errors
///
/// If no process with rank 0 can be asked from here, a rank is held, or the run is over.
pub fn send_command(out: &Path, line: &str) -> io::Result<String> {
    // A run that ends removes its sockets; a killed run leaves them.
    let or_over = |error: io::Error| match error.kind() {
        ErrorKind::NotFound | ErrorKind::ConnectionRefused => {
            io::Error::other("it is over: it has no process on this machine")
        }
        _ => error,
    };
    let folder = Folder::open(out).map_err(or_over)?;
    let owners = folder.owners();
    let Some(first) = owners.iter().find(|owner| owner.ranks.contains(&0)) else {
        return Err(io::Error::new(ErrorKind::NotFound, "the process of rank 0 is not on this machine"));
    };
    let mut connection = Connection::open(&folder, first, PATIENCE_FOR_LINES).map_err(or_over)?;
    match connection.ask(&Request::Attach { rank: None })? {
        Reply::Prompt(ToPrompt::Running) => {}
        Reply::Prompt(ToPrompt::End) => return Err(io::Error::other("it is over")),
        Reply::Prompt(_) => return Err(io::Error::other("a rank is held: use `kiln attach`")),
        Reply::Refused(reason) => return Err(io::Error::other(reason)),
        Reply::Status(_) | Reply::Timeline(_) => return Err(ErrorKind::InvalidData.into()),
    }
    let end = Instant::now() + PATIENCE_FOR_LINES;
    send_line(connection.stream.get_ref(), &Typed::new(line)?)?;
    loop {
        match connection.read(Some(end)) {
            Ok(Reply::Prompt(ToPrompt::Text(text))) => return Ok(text),
            Ok(Reply::Prompt(ToPrompt::End)) => return Ok("it is over".to_owned()),
            Ok(_) => {}
            Err(error) if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
                return Ok("the run will do so at the end of the step".to_owned());
            }
            Err(error) => return Err(error),
        }
    }
}

#[cfg(test)]
mod tests {
    use kiln_sys::ProcessId;

    use super::*;

    #[test]
    fn line_to_an_ended_run_is_an_error() {
        let out = tempfile::tempdir().unwrap();
        let error = || send_command(out.path(), "checkpoint").unwrap_err().to_string();
        assert!(error().starts_with("it is over"), "{}", error());
        let folder = Folder::make(out.path()).unwrap();
        drop(folder.listen(&Owner { process: ProcessId::this(), ranks: vec![0] }).unwrap());
        assert!(error().starts_with("it is over"), "{}", error());
    }
}
