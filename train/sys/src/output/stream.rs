//! An output stream of the process. Lines are written by the calling thread, or, while nothing may wait for
//! the reader, by a thread that takes them from a bounded queue.

use std::io::{self, Write};
use std::mem;
use std::os::fd::AsFd;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use crate::words::number_of;
use rustix::io::Errno;

/// Maximum number of bytes that wait for the reader, in addition to the text being written.
const ROOM: usize = 1 << 20;

/// Maximum number of waiting lines with which a reader counts as keeping up. Only then are frames of a
/// progress bar drawn, and only then do lines of the other stream wait for these lines.
const FEW: usize = 16;

/// Number of bytes written at once: few enough that a pipe takes them in one piece, and that a slow reader
/// shows progress.
const PIECE: usize = 4096;

/// Interval between checks whether the waiting lines have been written.
const LOOK: Duration = Duration::from_millis(1);

type WriteSome = fn(&[u8]) -> Result<usize, Errno>;

pub(super) struct Stream {
    name: &'static str,
    write: WriteSome,
    /// Locked while something is written. True if the output so far ends within a line.
    writing: Mutex<bool>,
    /// Never locked while something is written.
    state: Mutex<State>,
    /// Number of lines in the queue or being written by the queue's thread.
    waiting: AtomicUsize,
    /// Number of bytes in the queue.
    queued: AtomicUsize,
}

struct State {
    /// Sends to the thread that writes; `None` until that thread is started.
    queue: Option<Sender<Text>>,
    /// Number of live guards that keep output from blocking.
    holders: usize,
    /// Lines lost since the last notice.
    lost: Lost,
    /// True if a line was ever lost. Lines for a reader that has gone away are not counted as lost.
    has_lost: bool,
    /// Time at which the reader last accepted something, or lines began to wait.
    moved: Option<Instant>,
}

/// The number of lines that could not be written, and the reason.
#[derive(Clone, Copy)]
struct Lost {
    lines: usize,
    reason: Errno,
}

const NOTHING: Lost = Lost { lines: 0, reason: Errno::AGAIN };

/// A piece of output, and the lines that were dropped before it.
struct Text {
    lost: Lost,
    bytes: Vec<u8>,
}

impl Text {
    fn lines(&self) -> usize {
        self.lost.lines + lines_of(&self.bytes)
    }
}

impl Stream {
    pub(super) const fn new(name: &'static str, write: WriteSome) -> Stream {
        let state = State { queue: None, holders: 0, lost: NOTHING, has_lost: false, moved: None };
        Stream {
            name,
            write,
            writing: Mutex::new(false),
            state: Mutex::new(state),
            waiting: AtomicUsize::new(0),
            queued: AtomicUsize::new(0),
        }
    }

    /// Stops waiting for the reader. If no thread can be started for writing, writes still block.
    pub(super) fn hold(&'static self) {
        let mut state = self.state();
        state.holders += 1;
        if state.queue.is_none() {
            let (queue, texts) = mpsc::channel::<Text>();
            let serve = move || {
                for text in texts {
                    self.queued.fetch_sub(text.bytes.len(), Ordering::Release);
                    self.write(text.lost, &text.bytes);
                    self.waiting.fetch_sub(text.lines(), Ordering::Release);
                }
            };
            let thread = thread::Builder::new().name("kiln-output".to_owned()).spawn(serve);
            state.queue = thread.is_ok().then_some(queue);
        }
    }

    /// Reverts one call of [`Stream::hold`].
    pub(super) fn release(&self) {
        self.state().holders -= 1;
    }

    /// Returns the number of waiting lines. May be called in a signal handler.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    /// Writes a piece of output, or counts its lines as lost.
    pub(super) fn put(&self, bytes: &[u8]) {
        let mut state = self.state();
        let State { queue, holders, lost, has_lost, moved } = &mut *state;
        let waiting = self.waiting();
        let Some(queue) = queue.as_ref().filter(|_| *holders > 0 || waiting > 0) else {
            let lost = mem::replace(lost, NOTHING);
            drop(state);
            return self.write(lost, bytes);
        };
        // After a loss, lines are dropped until half of the room is free, so that one notice covers many.
        let room = if lost.lines == 0 { ROOM } else { ROOM / 2 };
        let queued = self.queued.load(Ordering::Acquire);
        // A text that is larger than the room may wait alone.
        if queued == 0 || queued + bytes.len() <= room {
            let text = Text { lost: *lost, bytes: bytes.to_vec() };
            self.waiting.fetch_add(text.lines(), Ordering::Release);
            self.queued.fetch_add(bytes.len(), Ordering::Release);
            // The thread lives as long as the process.
            if queue.send(text).is_ok() {
                *lost = NOTHING;
                if waiting == 0 {
                    *moved = Some(Instant::now());
                }
                return;
            }
        }
        *lost = Lost { lines: lost.lines + lines_of(bytes), reason: Errno::AGAIN };
        *has_lost = true;
    }

    /// Writes a frame of a progress bar. Skips it if the reader is behind.
    pub(super) fn draw(&self, frame: &[u8]) {
        if self.waiting() <= FEW {
            self.put(frame);
        }
    }

    pub(super) fn has_lost(&self) -> bool {
        self.state().has_lost
    }

    /// Waits until all waiting lines are written, or until the reader has accepted nothing for `patience`.
    /// Returns whether everything is written.
    pub(super) fn drain(&self, patience: Duration) -> bool {
        loop {
            if self.waiting() == 0 {
                return true;
            }
            if self.has_stalled(patience) {
                return false;
            }
            thread::sleep(LOOK);
        }
    }

    /// Waits until this stream's waiting lines are written, before a line of another stream. Does not wait if
    /// the reader is behind, nor longer than `limit`.
    pub(super) fn let_go_first(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while (1..=FEW).contains(&self.waiting()) && !self.has_stalled(limit) && Instant::now() < end {
            thread::sleep(LOOK);
        }
    }

    fn has_stalled(&self, patience: Duration) -> bool {
        self.state().moved.is_some_and(|moved| moved.elapsed() >= patience)
    }

    /// Waits as [`Stream::drain`] does. Returns a message about lines that still could not be written.
    pub(super) fn finish(&self, patience: Duration) -> Option<String> {
        if self.drain(patience) && self.state().lost.lines > 0 {
            // An empty text, so that only the notice is written.
            self.put(&[]);
            self.drain(patience);
        }
        let mut lost = mem::replace(&mut self.state().lost, NOTHING);
        lost.lines += self.waiting();
        (lost.lines > 0).then(|| self.notice(lost))
    }

    /// Writes a notice about `lost` lines and then `bytes`; may block this thread. Counts the lines that the
    /// system refuses.
    fn write(&self, mut lost: Lost, bytes: &[u8]) {
        let mut is_torn = self.writing.lock().unwrap_or_else(PoisonError::into_inner);
        if lost.lines > 0 {
            let start = if *is_torn { "\n" } else { "" };
            let notice = format!("{start}kiln: {}\n", self.notice(lost));
            if self.write_all(notice.as_bytes(), &mut is_torn).is_ok() {
                lost = NOTHING;
            }
        }
        if lost.lines > 0 {
            lost.lines += lines_of(bytes);
        } else if let Err((written, reason)) = self.write_all(bytes, &mut is_torn) {
            lost = Lost { lines: lines_of(&bytes[written..]), reason };
        }
        if lost.lines > 0 {
            let mut state = self.state();
            state.lost = Lost { lines: state.lost.lines + lost.lines, ..lost };
            state.has_lost = true;
        }
    }

    /// Writes `bytes`. An error includes the number of bytes that were written before it.
    fn write_all(&self, bytes: &[u8], is_torn: &mut bool) -> Result<(), (usize, Errno)> {
        let mut written = 0;
        while written < bytes.len() {
            let end = bytes.len().min(written + PIECE);
            match (self.write)(&bytes[written..end]) {
                Ok(0) => return Err((written, Errno::IO)),
                Ok(count) => {
                    written += count;
                    *is_torn = bytes[written - 1] != b'\n';
                    self.state().moved = Some(Instant::now());
                }
                Err(Errno::INTR) => {}
                // The process does not have this stream, or its reader has gone away (`| head`).
                Err(Errno::BADF | Errno::PIPE) => return Ok(()),
                Err(reason) => return Err((written, reason)),
            }
        }
        Ok(())
    }

    fn notice(&self, Lost { lines, reason }: Lost) -> String {
        let reason = match reason {
            Errno::AGAIN => "its reader does not keep up, or has stopped".to_owned(),
            reason => io::Error::from(reason).to_string(),
        };
        format!("{} could not be written to {}: {reason}", number_of(lines as u64, "line"), self.name)
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // Nothing panics while it is locked.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Returns the number of lines in `bytes`, including an incomplete last line.
fn lines_of(bytes: &[u8]) -> usize {
    bytes.split_inclusive(|byte| *byte == b'\n').count()
}

pub(super) static STDOUT: Stream = Stream::new("standard output", |bytes| {
    let mut console = io::stdout();
    // Output printed by other code comes first.
    let _ = console.flush();
    // Not locked: threads that panic or print must not wait for a write that does not end.
    rustix::io::write(console.as_fd(), bytes)
});

pub(super) static STDERR: Stream =
    Stream::new("standard error", |bytes| rustix::io::write(io::stderr().as_fd(), bytes));

/// How long a line waits for earlier lines on the other stream, because both may go to the same terminal.
pub(super) const ORDER: Duration = Duration::from_millis(100);

/// Number of live [`Silence`] guards.
static SILENT: AtomicUsize = AtomicUsize::new(0);

/// While a value of this type lives, [`print_line`](super::print_line) writes nothing, and there is no bar.
/// Used for runs that are part of a command with its own output. Errors and warnings are still shown.
#[derive(Debug)]
#[must_use]
pub struct Silence(());

/// Suppresses output until the returned value is dropped.
pub fn silence() -> Silence {
    SILENT.fetch_add(1, Ordering::Relaxed);
    Silence(())
}

impl Drop for Silence {
    fn drop(&mut self) {
        SILENT.fetch_sub(1, Ordering::Relaxed);
    }
}

pub(super) fn is_silent() -> bool {
    SILENT.load(Ordering::Relaxed) > 0
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of bytes that the reader still accepts.
    static FREE: AtomicUsize = AtomicUsize::new(0);
    static WRITTEN: Mutex<Vec<u8>> = Mutex::new(Vec::new());

    #[test]
    fn lost_lines_are_counted_and_reported_later() {
        let stream = Stream::new("the test", |bytes| {
            let count = bytes.len().min(FREE.load(Ordering::Relaxed));
            if count == 0 {
                return Err(Errno::NOSPC);
            }
            FREE.fetch_sub(count, Ordering::Relaxed);
            WRITTEN.lock().unwrap().extend_from_slice(&bytes[..count]);
            Ok(count)
        });
        stream.put(b"gone\n");
        FREE.store(4, Ordering::Relaxed);
        stream.put(b"gone as well\n");
        FREE.store(1000, Ordering::Relaxed);
        stream.put(b"here\n");
        stream.put(b"here too\n");
        let written = String::from_utf8(WRITTEN.lock().unwrap().clone()).unwrap();
        let notice = "kiln: 2 lines could not be written to the test: No space left on device (os error 28)";
        // Four bytes of the first attempt at a notice; the second attempt starts again.
        assert_eq!(written, format!("kiln\n{notice}\nhere\nhere too\n"));
    }

    #[test]
    fn a_closed_reader_loses_nothing() {
        let stream = Stream::new("the test", |_| Err(Errno::PIPE));
        stream.put(b"gone\n");
        assert_eq!(stream.state().lost.lines, 0);
    }

    /// Locked while the reader of the next test reads nothing.
    static GATE: Mutex<()> = Mutex::new(());
    /// A line of 1 KiB.
    const LINE: &[u8] = &{
        let mut line = [b'x'; 1 << 10];
        line[(1 << 10) - 1] = b'\n';
        line
    };
    static READ: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    static SLOW: Stream = Stream::new("the test", |bytes| {
        let _open = GATE.lock().unwrap();
        READ.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    });

    #[test]
    fn a_stopped_reader_blocks_nothing() {
        SLOW.hold();
        let closed = GATE.lock().unwrap();
        let room = ROOM / LINE.len();
        for _ in 0..room + 4 {
            SLOW.put(LINE);
        }
        SLOW.draw(b"a frame of a bar, which is not missed");
        assert!(!SLOW.drain(Duration::from_millis(1)));
        drop(closed);
        assert!(SLOW.drain(Duration::from_secs(600)));
        SLOW.put(b"here\n");
        assert_eq!(SLOW.finish(Duration::from_secs(600)), None);
        let read = READ.lock().unwrap();
        let text = String::from_utf8_lossy(&read);
        let lines: Vec<_> = text.lines().collect();
        // The thread may have taken a line out of the queue before the queue was full.
        let kept = lines.iter().take_while(|line| line.len() + 1 == LINE.len()).count();
        assert!([room, room + 1].contains(&kept), "{kept}");
        let notice = format!(
            "kiln: {} lines could not be written to the test: its reader does not keep up, or has stopped",
            room + 4 - kept
        );
        assert_eq!(lines[kept..], [&*notice, "here"]);
        drop(read);
        SLOW.release();
        // Writers then wait again, and lose nothing.
        let large = vec![b'\n'; 3 << 20];
        SLOW.put(&large);
        assert!(READ.lock().unwrap().ends_with(&large));
    }
}
