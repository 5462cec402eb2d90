//! The connection between a process and the `kiln launch` that has started it: the process ends with its
//! launcher, and reports why it ends through a separate pipe, whatever happens to its log.

use std::ffi::OsString;
use std::io::Write;
use std::os::fd::{BorrowedFd, RawFd};
use std::sync::atomic::{AtomicI32, Ordering};
use std::time::Duration;

use rustix::process::Pid;

use super::id::stat_of;
use super::page::{self, PAGE};

/// Variable with the launcher's process id, so that a rank can end with it.
pub const LAUNCHER_PID: &str = "KILN_LAUNCHER_PID";

/// Variable that names the pipe to the launcher: its descriptor and its inode.
pub const PIPE: &str = "KILN_LAUNCHER_PIPE";

/// Variable with the seconds between SIGTERM and SIGKILL.
pub const GRACE: &str = "KILN_GRACE_S";

/// Variable with the id of the run that an earlier life of the job worked on.
pub const RUN: &str = "KILN_RUN";

/// Maximum size of a message to the launcher in bytes: a pipe takes it in one piece.
const LONGEST: usize = 4096;

/// The pipe to the launcher; negative if there is none.
static DESCRIPTOR: AtomicI32 = AtomicI32::new(-1);

/// A kind of message from a process to its launcher, identified by its first letter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Word {
    /// The process fails, for this reason.
    Failure = b'F',
    /// The process fails because another rank has failed.
    Consequence = b'C',
    /// Additional information.
    Note = b'N',
    /// The process was asked to stop before there was anything to save, or another rank was.
    Stopped = b'S',
    /// The optimizer step in which the run has ended.
    Step = b'T',
    /// The id of the run whose folder the process has locked.
    Run = b'R',
    /// The folder of crashes of the run.
    Crashes = b'D',
    /// The ranks that the process has waited for in vain, separated by commas.
    Absent = b'A',
}

impl Word {
    const ALL: [Word; 8] = [
        Word::Failure,
        Word::Consequence,
        Word::Note,
        Word::Stopped,
        Word::Step,
        Word::Run,
        Word::Crashes,
        Word::Absent,
    ];

    pub(super) const fn letter(self) -> u8 {
        self as u8
    }
}

/// Connects this process to its launcher, if it has one.
pub(super) fn connect() {
    if let Some(descriptor) = find(PIPE) {
        DESCRIPTOR.store(descriptor, Ordering::Relaxed);
    }
    if let Some(descriptor) = find(PAGE) {
        page::share(descriptor);
    }
}

/// Returns true if a `kiln launch` has started this process.
pub(super) fn is_set() -> bool {
    std::env::var_os(LAUNCHER_PID).is_some()
}

/// Returns the process id of the launcher, if one has started this process.
pub(super) fn pid() -> Option<Pid> {
    Pid::from_raw(std::env::var(LAUNCHER_PID).ok()?.parse().ok()?)
}

/// Returns the state of a process, as Linux's letter for it; `None` if unknown.
pub fn state_of(process: Pid) -> Option<char> {
    stat_of(process.as_raw_nonzero().get())?.first()?.chars().next()
}

/// Returns the descriptor from the launcher that `variable` names. Programs that this process starts do not
/// inherit it.
fn find(variable: &str) -> Option<RawFd> {
    let text = std::env::var(variable).ok()?;
    let (descriptor, inode) = text.split_once(':')?;
    let descriptor: RawFd = descriptor.parse().ok().filter(|descriptor| *descriptor > 2)?;
    // SAFETY: checked before this process has opened anything: the descriptor is the inherited one, or is
    // closed, which the call reports.
    let file = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let is_it = nix::sys::stat::fstat(file).is_ok_and(|stat| stat.st_ino.to_string() == inode);
    let kept = is_it && rustix::io::fcntl_setfd(file, rustix::io::FdFlags::CLOEXEC).is_ok();
    kept.then_some(descriptor)
}

/// Returns the pipe to the launcher, if there is one; it stays open until the process ends.
pub(super) fn descriptor() -> Option<RawFd> {
    Some(DESCRIPTOR.load(Ordering::Relaxed)).filter(|descriptor| *descriptor >= 0)
}

/// Sends a message to the launcher, if there is one. Never waits: the pipe has room for all messages of a
/// process.
pub fn tell(word: Word, text: &str) {
    let Some(descriptor) = descriptor() else { return };
    // SAFETY: `find` has verified that it is the launcher's pipe, and no one closes it.
    let pipe = unsafe { BorrowedFd::borrow_raw(descriptor) };
    let mut message = vec![word.letter()];
    let _ = message.write_all(text.as_bytes());
    message.retain(|byte| *byte != 0);
    message.truncate(LONGEST - 1);
    message.push(0);
    let _ = rustix::io::write(pipe, &message);
}

/// Parses the messages of a process from the bytes in its pipe.
pub fn parse(bytes: &[u8]) -> Vec<(Word, String)> {
    let word = |message: &[u8]| {
        let (letter, text) = message.split_first()?;
        let word = Word::ALL.into_iter().find(|word| word.letter() == *letter)?;
        Some((word, String::from_utf8_lossy(text).into_owned()))
    };
    bytes.split(|byte| *byte == 0).filter_map(word).collect()
}

/// Returns the time between SIGTERM and SIGKILL, if the parent of this process has set it.
///
/// # Errors
///
/// If the value is not a valid time.
pub fn grace() -> Result<Option<Duration>, GraceError> {
    let Some(told) = std::env::var_os(GRACE) else { return Ok(None) };
    let seconds = told.to_str().and_then(|told| told.parse().ok());
    let grace = seconds.and_then(|seconds| Duration::try_from_secs_f64(seconds).ok());
    grace.map(Some).ok_or(GraceError { told })
}

/// `KILN_GRACE_S` is not a number of seconds.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "{GRACE}={}: not a number of seconds, such as 30; it is the time that this process gets between SIGTERM \
     and SIGKILL",
    .told.to_string_lossy().escape_debug()
)]
pub struct GraceError {
    told: OsString,
}
