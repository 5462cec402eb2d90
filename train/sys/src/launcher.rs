//! The connection between a process and the `kiln launch` that started it. The process ends with its
//! launcher, and reports through a separate pipe why it ends, whatever happens to its log. The rank's
//! position is in memory that both share, in case the process cannot report its own end, as after SIGKILL.

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

/// Variable with the launcher's process id. A rank needs it to end with its launcher.
pub const LAUNCHER_PID: &str = "KILN_LAUNCHER_PID";

/// Variables with the descriptor and inode of the pipe to the launcher, and of the shared page.
const PIPE: &str = "KILN_LAUNCHER_PIPE";
const PAGE: &str = "KILN_LAUNCHER_PAGE";

/// Variable with the number of seconds between SIGTERM and SIGKILL.
pub const GRACE: &str = "KILN_GRACE_S";

/// Environment variable with the id of the run that an earlier attempt of the job worked on.
pub const RUN: &str = "KILN_RUN";

/// Maximum size of a message to the launcher in bytes, so that a pipe takes the message in one piece.
const LONGEST: usize = 4096;

/// Maximum size in bytes of all messages together: the capacity of a pipe.
const CAPACITY: u64 = 64 * 1024;

/// The pipe and the page from the launcher; unset in a process that has none.
static TO_LAUNCHER: OnceLock<OwnedFd> = OnceLock::new();
static SHARED: OnceLock<Page> = OnceLock::new();

/// A kind of message from a process to its launcher, identified by its first letter.
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
    /// The ranks for which the process has waited in vain, separated by commas.
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

/// Asks the system to kill this process when its launcher dies, and connects the process to the launcher.
/// Exits if the launcher is already gone. Does nothing in a process that was not started by a launcher. Call
/// it first in `main`.
///
/// The system kills a process when its parent dies, so the launcher must be the rank's parent. A program
/// between launcher and rank must therefore become the rank (`exec`). If that program waits instead, it and
/// the rank outlive a launcher that is killed with SIGKILL.
pub fn end_with_launcher() {
    let Some(launcher) = pid() else { return };
    // Only Linux can do this; elsewhere ranks notice that their launcher's pipes are closed.
    let _ = set_parent_process_death_signal(Some(Signal::KILL));
    let is_alive = || !matches!(state_of(launcher), Some('Z' | 'X')) && test_kill_process(launcher).is_ok();
    if getppid() != Some(launcher) && !is_alive() {
        // The process ends at once; nothing may wait for a reader of its output.
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

/// Returns whether a `kiln launch` has started this process.
pub(super) fn is_set() -> bool {
    std::env::var_os(LAUNCHER_PID).is_some()
}

/// Returns the process id of the launcher, if a launcher has started this process.
pub(super) fn pid() -> Option<Pid> {
    Pid::from_raw(std::env::var(LAUNCHER_PID).ok()?.parse().ok()?)
}

/// Returns the state of a process as the letter that Linux uses; `None` if unknown.
pub fn state_of(process: Pid) -> Option<char> {
    stat_of(process.as_raw_nonzero().get())?.first()?.chars().next()
}

/// Returns the descriptor, inherited from the launcher, that `variable` names. Programs started by this
/// process do not inherit it.
fn inherited(variable: &str) -> Option<OwnedFd> {
    let text = std::env::var(variable).ok()?;
    let (descriptor, inode) = text.split_once(':')?;
    let descriptor: RawFd = descriptor.parse().ok().filter(|descriptor| *descriptor > 2)?;
    // SAFETY: checked before this process has opened anything: the descriptor is the inherited one, or is
    // closed, which the call reports.
    let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let is_it = fstat(file).is_ok_and(|stat| stat.st_ino.to_string() == inode);
    let is_kept = is_it && fcntl_setfd(file, FdFlags::CLOEXEC).is_ok();
    // SAFETY: it is the inherited one, which is read only here.
    is_kept.then(|| unsafe { OwnedFd::from_raw_fd(descriptor) })
}

/// Returns the pipe to the launcher, if there is one. May be called in a signal handler.
pub(super) fn pipe() -> Option<&'static OwnedFd> {
    TO_LAUNCHER.get()
}

/// Sends a message to the launcher, if there is one. Never waits, because the pipe has room for all messages
/// of a process.
pub fn send(kind: Message, text: &str) {
    let Some(pipe) = pipe() else { return };
    let mut message = vec![kind as u8];
    message.extend(text.bytes().filter(|byte| *byte != 0));
    message.truncate(LONGEST - 1);
    message.push(0);
    let _ = rustix::io::write(pipe, &message);
}

/// Returns how long after SIGTERM this process gets SIGKILL, if its parent has set that.
///
/// # Errors
///
/// If the value is not a valid time.
pub fn grace() -> Result<Option<Duration>, GraceError> {
    let Some(value) = std::env::var_os(GRACE) else { return Ok(None) };
    let seconds = value.to_str().and_then(|value| value.parse().ok());
    let grace = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    grace.map(Some).ok_or(GraceError { value })
}

/// The error that `KILN_GRACE_S` is not a number of seconds.
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
    /// The current optimizer step.
    pub(super) step: AtomicU64,
    /// The last step saved in a complete checkpoint.
    pub(super) saved: AtomicU64,
    /// The current micro-batch: its number in the step, its first sample in the global order, and its number
    /// of samples.
    pub(super) micro_batch: [AtomicU64; 3],
}

impl Progress {
    /// Returns the current position. May be called in a signal handler.
    pub(super) fn seen(&self) -> Seen {
        let [index, first, samples] = [0, 1, 2].map(|i| self.micro_batch[i].load(Ordering::Relaxed));
        let micro_batch = (samples > 0).then_some((index, first, samples));
        Seen { step: self.step.load(Ordering::Relaxed), micro_batch }
    }
}

/// The last known position of a rank.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// The optimizer step that the rank was in; 0 before the first step.
    pub step: u64,
    /// The last fetched micro-batch: its number in the step, its first sample in the global order, and its
    /// number of samples.
    pub micro_batch: Option<(u64, u64, u64)>,
}

/// Memory that a rank shares with its launcher.
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
    /// Creates the pipe and the page, and makes the process started by `command` inherit the other end of
    /// each.
    ///
    /// # Errors
    ///
    /// If the system cannot provide them.
    pub fn for_child(command: &mut Command) -> io::Result<RankLink> {
        let (pipe, writer) = io::pipe()?;
        // Neither side ever waits for the other.
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
