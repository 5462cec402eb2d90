//! A thread that waits for a crash, and then does what a signal handler cannot: it names the calls and
//! requests the flight recorder. The crashed thread waits for it, but not forever: it may hold a lock that
//! the helper needs.

use std::ffi::OsStr;
use std::fmt::Write as _;
use std::fs::{self, OpenOptions};
use std::io::Write as _;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicI32, AtomicU64, Ordering};
use std::sync::{Once, PoisonError};
use std::thread;
use std::time::Duration;

use super::refusal::Reporting;
use super::report::{self, REPORT};
use super::words::TEXT;

/// The name of the thread.
const NAME: &str = "kiln-crash";

/// File name of the rank's flight recorder.
const FLIGHT: &str = "flight.json";

/// Interval between checks whether the thread is done.
const LOOK: Duration = Duration::from_millis(2);

/// Descriptor that wakes the thread; negative before the thread exists.
static WAKE: AtomicI32 = AtomicI32::new(-1);

/// Number of requests to the thread, and of the last one it has answered.
static ASKED: AtomicU64 = AtomicU64::new(0);
static DONE: AtomicU64 = AtomicU64::new(0);

/// Starts the thread, once per process.
pub(super) fn start() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        report::prepare();
        // SAFETY: has no preconditions.
        let wake = unsafe { libc::eventfd(0, libc::EFD_CLOEXEC) };
        // Without it, reports have addresses instead of names, and no flight recorder.
        if wake >= 0 && thread::Builder::new().name(NAME.to_owned()).spawn(move || serve(wake)).is_ok() {
            WAKE.store(wake, Ordering::Relaxed);
        }
    });
}

/// Returns true if the calling thread is the helper.
pub(super) fn is_here() -> bool {
    thread::current().name() == Some(NAME)
}

/// Lets the thread finish the report, and waits for it, but no longer than `limit`. May be called in a signal
/// handler.
pub(super) fn ask(limit: Duration) {
    let wake = WAKE.load(Ordering::Relaxed);
    if wake < 0 {
        return;
    }
    let asked = ASKED.fetch_add(1, Ordering::Relaxed) + 1;
    let one = 1u64.to_ne_bytes();
    // SAFETY: the bytes outlive the call, and no one closes the descriptor.
    unsafe { libc::write(wake, one.as_ptr().cast(), one.len()) };
    for _ in 0..limit.as_millis() / LOOK.as_millis() {
        if DONE.load(Ordering::Acquire) >= asked {
            return;
        }
        thread::sleep(LOOK);
    }
}

fn serve(wake: i32) {
    let mut count = [0u8; 8];
    loop {
        // SAFETY: the buffer has the given length, and no one closes the descriptor.
        if unsafe { libc::read(wake, count.as_mut_ptr().cast(), count.len()) } < 0 {
            continue;
        }
        let asked = ASKED.load(Ordering::Relaxed);
        let reporting = Reporting::begin();
        finish();
        drop(reporting);
        DONE.store(asked, Ordering::Release);
    }
}

fn finish() {
    let (folder, (frames, is_at_fault, position)) = {
        let mut report = REPORT.lock().unwrap_or_else(PoisonError::into_inner);
        (PathBuf::from(OsStr::from_bytes(report.folder())), report.take())
    };
    // If it cannot be written, nothing can be done.
    if !frames.is_empty() {
        let _ = append(&folder, &names_of(&frames, is_at_fault));
    }
    if let Some(position) = position {
        let _ = fs::write(folder.join(FLIGHT), (position.flight)());
    }
}

/// Appends `text` to the report of the crash in `folder`.
pub(super) fn append(folder: &Path, text: &str) -> std::io::Result<()> {
    OpenOptions::new().append(true).open(folder.join(TEXT))?.write_all(text.as_bytes())
}

fn names_of(frames: &[usize], is_at_fault: bool) -> String {
    let mut text = String::from("\nbacktrace, the innermost call first:\n");
    for (index, address) in frames.iter().enumerate() {
        // A return address may belong to the next function.
        let within = if index == 0 && is_at_fault { *address } else { address.saturating_sub(1) };
        let mut is_named = false;
        backtrace::resolve(within as *mut _, |symbol| {
            // Writing into a String cannot fail.
            let _ = match symbol.name() {
                Some(name) => writeln!(text, "{index:>4}: {name:#}"),
                None => writeln!(text, "{index:>4}: {address:#x}"),
            };
            is_named = true;
        });
        if !is_named {
            let _ = writeln!(text, "{index:>4}: {address:#x}");
        }
    }
    text
}
