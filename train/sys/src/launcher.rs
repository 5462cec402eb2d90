//! Connects a process with the `kiln launch` that started it. The process ends with its launcher, sends the reason of
//! its end through a pipe, and keeps its position in shared memory, which survives SIGKILL.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write as _;
use std::io::{self, PipeReader, Read};
use std::os::fd::{AsRawFd, BorrowedFd, FromRawFd, OwnedFd, RawFd};
use std::os::unix::process::CommandExt;
use std::process::Command;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::Duration;

use memmap2::MmapRaw;
use rustix::fs::{MemfdFlags, fstat, memfd_create};
use rustix::io::{FdFlags, fcntl_setfd, ioctl_fionbio};
use rustix::process::{Pid, Signal, getppid, set_parent_process_death_signal, test_kill_process};

use super::id::stat_of;

/// Variable with the launcher's process id.
pub const LAUNCHER_PID: &str = "KILN_LAUNCHER_PID";

/// Variables with the descriptor and inode of the pipe to the launcher, and of the shared page.
const PIPE: &str = "KILN_LAUNCHER_PIPE";
const PAGE: &str = "KILN_LAUNCHER_PAGE";

/// Variable with the number of seconds between SIGTERM and SIGKILL.
pub const GRACE: &str = "KILN_GRACE_S";

/// Variable with the id of the run that an earlier attempt of the job worked on.
pub const RUN: &str = "KILN_RUN";

/// Maximum size of a message in bytes, so that a write to the pipe is atomic.
const LONGEST: usize = 4096;

/// Maximum size of all messages together in bytes: the capacity of a pipe.
const CAPACITY: u64 = 64 * 1024;

static TO_LAUNCHER: OnceLock<OwnedFd> = OnceLock::new();
static SHARED: OnceLock<Page> = OnceLock::new();

/// A kind of message from a process to its launcher, identified by its letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Message {
    /// The process failed, for this reason.
    Failure = b'F',
    /// The process failed because another rank had failed.
    Consequence = b'C',
    /// Additional information.
    Note = b'N',
    /// This process or another rank was asked to stop before there was anything to save.
    Stopped = b'S',
    /// The optimizer step in which the process ended.
    Step = b'T',
    /// The id of the run whose folder the process has locked.
    Run = b'R',
    /// The run's folder of crash reports.
    Crashes = b'D',
    /// The ranks that the process waited for without success, separated by commas.
    Absent = b'A',
}

impl Message {
    const ALL: [Message; 8] = [
        Message::Failure,
        Message::Consequence,
        Message::Note,
        Message::Stopped,
        Message::Step,
        Message::Run,
        Message::Crashes,
        Message::Absent,
    ];
}

/// Asks the system to kill this process when its launcher dies, and connects the process to the launcher. Exits if the
/// launcher is already gone. Does nothing without a launcher. Call it first in `main`.
///
/// The launcher must be the parent process, so a wrapper program between launcher and rank must `exec` the rank. A
/// wrapper that waits instead outlives a launcher that is killed with SIGKILL, and so does the rank.
pub fn end_with_launcher() {
    let Some(launcher) = pid() else { return };
    // Only Linux supports this; elsewhere ranks notice that their launcher's pipes are closed.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let is_alive = || !matches!(state_of(launcher), Some('Z' | 'X')) && test_kill_process(launcher).is_ok();
    if getppid() != Some(launcher) && !is_alive() {
        // Written directly, because a process that exits must not wait for a reader of its output.
        let _ = writeln!(std::io::stderr(), "error: the launcher (pid {launcher}) is gone");
        std::process::exit(1);
    }
    if let Some(pipe) = inherited(PIPE) {
        let _ = TO_LAUNCHER.set(pipe);
    }
    if let Some(page) = inherited(PAGE).and_then(|file| Page::map(&file).ok()) {
        let _ = SHARED.set(page);
    }
}

pub(super) fn is_set() -> bool {
    std::env::var_os(LAUNCHER_PID).is_some()
}

pub(super) fn pid() -> Option<Pid> {
    Pid::from_raw(std::env::var(LAUNCHER_PID).ok()?.parse().ok()?)
}

/// Returns the state letter of a process, as in `/proc/PID/stat`; `None` if unknown.
pub fn state_of(process: Pid) -> Option<char> {
    stat_of(process.as_raw_nonzero().get())?.first()?.chars().next()
}

/// Returns the inherited descriptor that `variable` names, and marks it close-on-exec.
fn inherited(variable: &str) -> Option<OwnedFd> {
    let text = std::env::var(variable).ok()?;
    let (descriptor, inode) = text.split_once(':')?;
    let descriptor: RawFd = descriptor.parse().ok().filter(|descriptor| *descriptor > 2)?;
    // SAFETY: this process has opened no file yet, so the descriptor is inherited, or closed, which `fstat` reports.
    let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let is_it = fstat(file).is_ok_and(|stat| stat.st_ino.to_string() == inode);
    let is_kept = is_it && fcntl_setfd(file, FdFlags::CLOEXEC).is_ok();
    // SAFETY: the descriptor is inherited and read only here.
    is_kept.then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
}

pub(super) fn pipe() -> Option<&'static OwnedFd> {
    TO_LAUNCHER.get()
}

/// Sends a message to the launcher, if there is one. Never blocks: the pipe has room for all messages of a process.
pub fn send(kind: Message, text: &str) {
    let Some(pipe) = pipe() else { return };
    let mut message = vec![kind as u8];
    message.extend(text.bytes().filter(|byte| *byte != 0));
    message.truncate(LONGEST - 1);
    message.push(0);
    let _ = rustix::io::write(pipe, &message);
}

/// Returns the time between SIGTERM and SIGKILL, if the parent process has set it.
///
/// # Errors
///
/// Fails if the value is not a valid number of seconds.
pub fn grace() -> Result<Option<Duration>, GraceError> {
    let Some(value) = std::env::var_os(GRACE) else { return Ok(None) };
    let seconds = value.to_str().and_then(|value| value.parse().ok());
    let grace = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    grace.map(Some).ok_or(GraceError { value })
}

/// The error for an invalid `KILN_GRACE_S`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{GRACE}={}: not a number of seconds, such as 30; it is the time that this process gets between SIGTERM \
     and SIGKILL",
    .value.to_string_lossy().escape_debug()
)]
pub struct GraceError {
    value: OsString,
}

/// The position of a rank in its run. Unknown values are 0.
#[derive(Debug, Default)]
#[repr(C)]
pub(super) struct Progress {
    pub(super) step: AtomicU64,
    pub(super) saved: AtomicU64,
    /// The current micro-batch: its number in the step, its first sample in the global order, and its size.
    pub(super) micro_batch: [AtomicU64; 3],
}

impl Progress {
    /// Async-signal-safe.
    pub(super) fn seen(&self) -> Seen {
        let [index, first, samples] = [0, 1, 2].map(|i| self.micro_batch[i].load(Ordering::Relaxed));
        let micro_batch = (samples > 0).then_some((index, first, samples));
        Seen { step: self.step.load(Ordering::Relaxed), micro_batch }
    }
}

/// The last known position of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The optimizer step; 0 before the first.
    pub step: u64,
    /// The last fetched micro-batch: its number in the step, its first sample in the global order, and its size.
    pub micro_batch: Option<(u64, u64, u64)>,
}

#[derive(Debug)]
struct Page(MmapRaw);

impl Page {
    fn map(file: &impl AsRawFd) -> io::Result<Page> {
        let memory = MmapRaw::map_raw(file.as_raw_fd())?;
        if memory.len() < size_of::<Progress>() {
            Err(io::ErrorKind::InvalidData.into())
        } else {
            Ok(Page(memory))
        }
    }

    fn progress(&self) -> &Progress {
        // SAFETY: it is mapped as long as `self` lives, is aligned as pages are, and has enough bytes, which
        // are valid atomic integers, whatever their values.
        unsafe { &*self.0.as_mut_ptr().cast() }
    }
}

/// Returns the memory that this process shares with its launcher, but only to the first rank that asks.
pub(super) fn take_shared() -> Option<&'static Progress> {
    static TAKEN: AtomicBool = AtomicBool::new(false);
    let page = SHARED.get()?;
    (!TAKEN.swap(true, Ordering::Relaxed)).then(|| page.progress())
}

/// The launcher's side of the connection to a rank.
#[derive(Debug)]
pub struct RankLink {
    pipe: PipeReader,
    page: Page,
}

impl RankLink {
    /// Creates the pipe and the page, and makes the process started by `command` inherit the other end of each.
    ///
    /// # Errors
    ///
    /// If the system cannot provide them.
    pub fn for_child(command: &mut Command) -> io::Result<RankLink> {
        let (pipe, writer) = io::pipe()?;
        ioctl_fionbio(&pipe, true)?;
        ioctl_fionbio(&writer, true)?;
        let memory = File::from(memfd_create("kiln-rank", MemfdFlags::CLOEXEC)?);
        memory.set_len(size_of::<Progress>() as u64)?;
        let page = Page::map(&memory)?;
        command.env(PIPE, format!("{}:{}", writer.as_raw_fd(), fstat(&writer)?.st_ino));
        command.env(PAGE, format!("{}:{}", memory.as_raw_fd(), fstat(&memory)?.st_ino));
        let inherit = move || {
            fcntl_setfd(&memory, FdFlags::empty())?;
            Ok(fcntl_setfd(&writer, FdFlags::empty())?)
        };
        // SAFETY: between fork and exec this makes a few system calls, and neither locks nor allocates.
        unsafe { command.pre_exec(inherit) };
        Ok(RankLink { pipe, page })
    }

    /// Returns the current or last position of the rank, with zeros if the rank has reported none.
    pub fn seen(&self) -> Seen {
        self.page.progress().seen()
    }

    /// Returns the messages sent by a rank that has ended.
    pub fn messages(&self) -> Vec<(Message, String)> {
        let mut bytes = Vec::new();
        // If another process still holds the pipe open, reading ends with an error after all of its contents.
        let _ = (&self.pipe).take(CAPACITY).read_to_end(&mut bytes);
        let message = |message: &[u8]| {
            let (letter, text) = message.split_first()?;
            let word = Message::ALL.into_iter().find(|word| *word as u8 == *letter)?;
            Some((word, String::from_utf8_lossy(text).into_owned()))
        };
        bytes.split(|byte| *byte == 0).filter_map(message).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_launcher_sees_the_position_of_a_rank() {
        let mut command = Command::new("true");
        let link = RankLink::for_child(&mut command).unwrap();
        assert_eq!(link.seen(), Seen::default());
        let name = command.get_envs().find(|(name, _)| *name == PAGE).and_then(|(_, value)| value).unwrap();
        let (descriptor, _) = name.to_str().unwrap().split_once(':').unwrap();
        SHARED.set(Page::map(&descriptor.parse::<RawFd>().unwrap()).unwrap()).unwrap();
        let progress = take_shared().expect("a page");
        assert!(take_shared().is_none());
        progress.step.store(7, Ordering::Relaxed);
        assert_eq!(link.seen(), Seen { step: 7, micro_batch: None });
        for (place, value) in progress.micro_batch.iter().zip([2, 90, 4]) {
            place.store(value, Ordering::Relaxed);
        }
        assert_eq!(link.seen(), Seen { step: 7, micro_batch: Some((2, 90, 4)) });
    }
}
