//! Asks all processes of a run, and combines their answers.

use std::io::{self, BufRead, BufReader, ErrorKind, Write};
use std::os::unix::net::UnixStream;
use std::path::Path;
use std::thread;
use std::time::{Duration, Instant};

use kiln_collectives::StepTimeline;
use serde::Serialize;

use super::machine::{ProcessState, state_of, threads_of};
use super::message::{Known, ProcessStatus, Reply, Request, Thread};
use super::socket::{Folder, Owner};
use super::symbols::Symbols;

/// Maximum time for a process to answer. Together with [`PATIENCE_FOR_ALL`], this answers a question about a
/// run within two seconds, whatever its processes do.
const PATIENCE: Duration = Duration::from_millis(800);

/// Maximum time for rank 0 to ask all others.
const PATIENCE_FOR_ALL: Duration = Duration::from_millis(950);

/// Maximum time for a process to ask its threads.
const PATIENCE_FOR_STACKS: Duration = Duration::from_secs(2);

/// Limits once the deadline has passed: for each part of a reply, and for the rest of the reply. They leave
/// time for data that has already arrived, and limit the delay by a process that sends slowly or endlessly.
const LAST_LOOK: Duration = Duration::from_millis(2);
const LAST_LOOKS: Duration = Duration::from_millis(20);

/// Maximum size of a reply in bytes: a rank takes about 64 KiB.
const MOST_REPLY: usize = 32 << 20;

/// Maximum number of threads of a process, and of functions of each.
const MOST_THREADS: usize = 4096;
const MOST_CALLS: usize = 256;

/// Bytes read at a time: usually the status of a rank.
const BUFFER: usize = 1 << 16;

/// A connection to a process of a run.
pub struct Connection {
    stream: BufReader<UnixStream>,
    /// Maximum duration of a reply, from its request to its end.
    patience: Duration,
}

impl Connection {
    /// Connects to the process `owner`. Each of its replies may take up to `patience`.
    pub fn open(folder: &Folder, owner: &Owner, patience: Duration) -> io::Result<Self> {
        let stream = folder.connect(owner)?;
        stream.set_write_timeout(Some(patience))?;
        Ok(Connection { stream: BufReader::with_capacity(BUFFER, stream), patience })
    }

    /// Sends a request and waits for the reply.
    pub fn ask(&mut self, request: &Request) -> io::Result<Reply> {
        let end = Instant::now() + self.patience;
        self.request(request)?;
        self.receive_until(end)
    }

    /// Sends a request; [`Connection::receive_until`] receives the reply.
    fn request(&self, request: &Request) -> io::Result<()> {
        // A refusal may arrive before the request has been sent.
        match self.say(request) {
            Err(error) if error.kind() != ErrorKind::BrokenPipe => Err(error),
            _ => Ok(()),
        }
    }

    /// Waits for the whole of the next reply, but no longer than until `end`. Data that has already arrived
    /// is read after `end` as well.
    pub(super) fn receive_until(&mut self, end: Instant) -> io::Result<Reply> {
        // The reply may be read after `end`, if other replies were awaited until then.
        let last = end.max(Instant::now()) + LAST_LOOKS;
        self.read(|| {
            let now = Instant::now();
            if now >= last {
                return Err(ErrorKind::TimedOut.into());
            }
            Ok(Some(end.saturating_duration_since(now).max(LAST_LOOK)))
        })
    }

    /// Sends a message that has no reply.
    pub(super) fn say(&self, message: &impl Serialize) -> io::Result<()> {
        say(self.stream.get_ref(), message)
    }

    /// Returns a stream that writes to the process, and a connection that reads from it without a time limit.
    pub fn split(self) -> io::Result<(UnixStream, Self)> {
        Ok((self.stream.get_ref().try_clone()?, self))
    }

    /// Waits for the next reply, however long it takes.
    pub fn receive(&mut self) -> io::Result<Reply> {
        self.read(|| Ok(None))
    }

    /// Reads a reply. Calls `left` before each part to find out how long that part may take.
    fn read(&mut self, left: impl Fn() -> io::Result<Option<Duration>>) -> io::Result<Reply> {
        let wrong = |problem: &str| io::Error::new(ErrorKind::InvalidData, problem.to_owned());
        let mut reply = Vec::new();
        loop {
            self.stream.get_ref().set_read_timeout(left()?)?;
            let part = match self.stream.fill_buf() {
                Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                part => part?,
            };
            if part.is_empty() {
                return Err(ErrorKind::UnexpectedEof.into());
            }
            let end = part.iter().position(|byte| *byte == b'\n');
            let taken = end.map_or(part.len(), |end| end + 1);
            reply.extend_from_slice(&part[..taken]);
            self.stream.consume(taken);
            if reply.len() > MOST_REPLY {
                return Err(wrong("its reply is too long"));
            }
            if end.is_some() {
                break;
            }
        }
        let reply: Reply = serde_json::from_slice(&reply)?;
        if reply.is_sound() { Ok(reply) } else { Err(wrong("its reply contradicts itself")) }
    }
}

/// Sends a line of JSON.
pub fn say(mut stream: &UnixStream, message: &impl Serialize) -> io::Result<()> {
    let mut line = serde_json::to_vec(message)?;
    line.push(b'\n');
    stream.write_all(&line)
}

/// Sends a reply. Not generic, so that it is compiled with this crate's optimisation: a reply has several
/// hundred operations per rank.
pub fn send_reply(stream: &UnixStream, reply: &Reply) -> io::Result<()> {
    say(stream, reply)
}

/// The answer of a process, or the reason why there is none.
#[derive(Debug)]
pub enum Answer {
    Status(Box<ProcessStatus>),
    /// A signal or a debugger has stopped the process.
    Stopped,
    /// The process has ended and left its socket behind.
    Gone,
    /// The process exists and does not answer, for this reason.
    Silent(String),
    /// The process is on another machine.
    Elsewhere,
}

/// A process of a run.
#[derive(Debug)]
pub struct Process {
    pub owner: Owner,
    pub answer: Answer,
    /// Its threads as known to the kernel, if requested and if the process did not answer.
    pub threads: Option<Vec<Thread>>,
}

/// The answers of the processes of a run.
#[derive(Debug, Default)]
pub struct Answers {
    pub processes: Vec<Process>,
    /// Rank 0's knowledge of the ranks, if some have no process here.
    pub all: Option<Vec<Known>>,
}

/// Asks all processes that have a socket in the run folder `out`, for at most two seconds, or longer if they
/// must ask their threads. Returns no processes if there are none, or none that is alive.
///
/// # Errors
///
/// If this user may not ask them.
pub fn ask_all(out: &Path, stacks: bool) -> io::Result<Answers> {
    let folder = match Folder::open(out) {
        Ok(folder) => folder,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
        Err(_) => return Ok(Answers::default()),
    };
    // All processes prepare their answers while the first one's is awaited.
    let patience = if stacks { PATIENCE_FOR_STACKS } else { PATIENCE };
    let end = Instant::now() + patience;
    let asked: Vec<_> =
        folder.owners().into_iter().map(|owner| ask(&folder, owner, stacks, patience)).collect();
    let mut processes: Vec<_> = asked.into_iter().map(|asked| asked.process(stacks, end)).collect();
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

/// Asks rank 0 for its knowledge of all ranks, if some ranks have no process on this machine.
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
        Reply::Timeline(_) | Reply::Prompt(_) | Reply::Refused(_) => None,
    }
}

/// Returns the last complete step of each rank of the run in `out` whose process can be asked from here, by
/// rank.
///
/// # Errors
///
/// If this user may not ask them.
pub fn timelines(out: &Path) -> io::Result<Vec<StepTimeline>> {
    let folder = match Folder::open(out) {
        Ok(folder) => folder,
        Err(error) if error.kind() == ErrorKind::PermissionDenied => return Err(error),
        Err(_) => return Ok(Vec::new()),
    };
    let mut timelines: Vec<StepTimeline> = thread::scope(|scope| {
        let ask = |owner: Owner| {
            let folder = &folder;
            let ask = move || match Connection::open(folder, &owner, PATIENCE)?.ask(&Request::Timeline)? {
                Reply::Timeline(timelines) => io::Result::Ok(timelines),
                _ => Ok(Vec::new()),
            };
            thread::Builder::new().spawn_scoped(scope, ask)
        };
        let asked: Vec<_> = folder.owners().into_iter().filter_map(|owner| ask(owner).ok()).collect();
        // A process that does not answer in time is omitted.
        asked.into_iter().filter_map(|thread| thread.join().ok()?.ok()).flatten().collect()
    });
    timelines.sort_by_key(|timeline| timeline.rank);
    Ok(timelines)
}

/// A process that has been asked and has not been heard yet.
struct Asked {
    owner: Owner,
    is_gone: Option<bool>,
    /// The connection on which its reply will arrive, or the answer that is already known.
    reply: Result<io::Result<Connection>, Answer>,
}

fn ask(folder: &Folder, owner: Owner, stacks: bool, patience: Duration) -> Asked {
    let is_gone = owner.process.is_gone();
    let open = || {
        let connection = Connection::open(folder, &owner, patience)?;
        connection.request(&Request::Status { stacks, all: false })?;
        Ok(connection)
    };
    let reply = match is_gone {
        Some(true) => Err(Answer::Gone),
        Some(false) if state_of(owner.process.pid) == ProcessState::Stopped => Err(Answer::Stopped),
        _ => Ok(open()),
    };
    Asked { owner, is_gone, reply }
}

impl Asked {
    /// Waits for its answer until `end`.
    fn process(self, stacks: bool, end: Instant) -> Process {
        let Asked { owner, is_gone, reply } = self;
        let listen =
            |reply: io::Result<Connection>| match reply.and_then(|mut reply| reply.receive_until(end)) {
                Ok(Reply::Status(mut status)) => {
                    // In another container, the number refers to another process.
                    if is_gone == Some(false) {
                        status.threads.iter_mut().for_each(|threads| name(threads, owner.process.pid));
                    }
                    Answer::Status(status)
                }
                Ok(Reply::Refused(reason)) => Answer::Silent(reason),
                Ok(Reply::Prompt(_) | Reply::Timeline(_)) => {
                    Answer::Silent("it answers something else".to_owned())
                }
                Err(_) if is_gone.is_none() => Answer::Elsewhere,
                Err(error) => silence(&owner, &error),
            };
        let answer = reply.map_or_else(|known| known, listen);
        let is_silent = matches!(answer, Answer::Stopped | Answer::Silent(_));
        let threads = (stacks && is_silent).then(|| threads_of(owner.process.pid));
        Process { owner, answer, threads }
    }
}

/// The function at which the outer calls begin that all threads have in common.
const BEGIN: &str = "__rust_begin_short_backtrace";

/// Looks up the names of the functions that the threads of process `pid` are in.
fn name(threads: &mut Vec<Thread>, pid: i32) {
    let mut symbols = Symbols::of(pid);
    threads.truncate(MOST_THREADS);
    for thread in threads {
        thread.addresses.truncate(MOST_CALLS);
        // A call that never returns may be the last instruction of its function.
        let addresses =
            thread.addresses.iter().enumerate().map(|(index, at)| at - u64::from(index > 0 && *at > 0));
        let calls = addresses.map(|address| symbols.name(address));
        thread.calls = calls.collect();
        let begin = thread.calls.iter().position(|call| call.contains(BEGIN));
        // The function for which the thread was started may have been inlined.
        thread.calls.truncate(begin.map_or(usize::MAX, |begin| begin.max(1)));
    }
}

/// Returns the reason why a process of this machine does not answer: it may have ended or been stopped
/// meanwhile.
fn silence(owner: &Owner, error: &io::Error) -> Answer {
    if owner.process.is_gone() == Some(true) {
        return Answer::Gone;
    }
    match state_of(owner.process.pid) {
        ProcessState::Gone => Answer::Gone,
        ProcessState::Stopped => Answer::Stopped,
        ProcessState::Stuck => Answer::Silent("it waits in the kernel, as for a disk".to_owned()),
        ProcessState::Running if matches!(error.kind(), ErrorKind::WouldBlock | ErrorKind::TimedOut) => {
            Answer::Silent("it says nothing in time".to_owned())
        }
        ProcessState::Running => Answer::Silent(error.to_string()),
    }
}
