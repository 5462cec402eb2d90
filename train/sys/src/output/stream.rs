//! An output stream of the process. Lines are written by the caller, or from a bounded queue while nothing may block.

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

const ROOM: usize = 1 << 20;

/// Maximum number of waiting lines of a reader that keeps up. Otherwise, frames are skipped and the other stream does
/// not wait for this one.
const FEW: usize = 16;

/// Number of bytes per write: a pipe takes them atomically, and a slow reader makes visible progress.
const PIECE: usize = 4096;

const LOOK: Duration = Duration::from_millis(1);

type WriteSome = fn(&[u8]) -> Result<usize, Errno>;

pub(super) struct Stream {
    name: &'static str,
    write: WriteSome,
    /// Locked during a write. True if the output so far ends within a line.
    writing: Mutex<bool>,
    /// Never locked during a write.
    state: Mutex<State>,
    waiting: AtomicUsize,
    queued: AtomicUsize,
}

struct State {
    queue: Option<Sender<Text>>,
    holders: usize,
    lost: Lost,
    /// True if a line was ever lost. Lines for a closed reader do not count.
    has_lost: bool,
    /// Time at which the reader last accepted bytes, or lines began to wait.
    moved: Option<Instant>,
}

#[derive(Clone, Copy)]
struct Lost {
    lines: usize,
    reason: Errno,
}

const NOTHING: Lost = Lost { lines: 0, reason: Errno::AGAIN };

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

    /// Makes writes non-blocking, unless the system cannot start a thread.
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

    pub(super) fn release(&self) {
        self.state().holders -= 1;
    }

    /// Async-signal-safe.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    pub(super) fn put(&self, bytes: &[u8]) {
        let mut state = self.state();
        let State { queue, holders, lost, has_lost, moved } = &mut *state;
        let waiting = self.waiting();
        let Some(queue) = queue.as_ref().filter(|_| *holders > 0 || waiting > 0) else {
            let lost = mem::replace(lost, NOTHING);
            drop(state);
            return self.write(lost, bytes);
        };
        // After a loss, drops lines until half of the room is free, so that one notice covers many.
        let room = if lost.lines == 0 { ROOM } else { ROOM / 2 };
        let queued = self.queued.load(Ordering::Acquire);
        // A text larger than the room may wait alone.
        if queued == 0 || queued + bytes.len() <= room {
            let text = Text { lost: *lost, bytes: bytes.to_vec() };
            self.waiting.fetch_add(text.lines(), Ordering::Release);
            self.queued.fetch_add(bytes.len(), Ordering::Release);
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

    /// Writes a frame of a progress bar, unless the reader is behind.
    pub(super) fn draw(&self, frame: &[u8]) {
        if self.waiting() <= FEW {
            self.put(frame);
        }
    }

    pub(super) fn has_lost(&self) -> bool {
        self.state().has_lost
    }

    /// Waits until all waiting lines are written, or the reader has accepted nothing for `patience`. Returns whether
    /// all lines are written.
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

    /// Waits up to `limit` for this stream's lines, before a line of the other stream, unless the reader is behind.
    pub(super) fn let_go_first(&self, limit: Duration) {
        let end = Instant::now() + limit;
        while (1..=FEW).contains(&self.waiting()) && !self.has_stalled(limit) && Instant::now() < end {
            thread::sleep(LOOK);
        }
    }

    fn has_stalled(&self, patience: Duration) -> bool {
        self.state().moved.is_some_and(|moved| moved.elapsed() >= patience)
    }

    /// Drains the stream. Returns a message about lines that could not be written.
    pub(super) fn finish(&self, patience: Duration) -> Option<String> {
        if self.drain(patience) && self.state().lost.lines > 0 {
            self.put(&[]);
            self.drain(patience);
        }
        let mut lost = mem::replace(&mut self.state().lost, NOTHING);
        lost.lines += self.waiting();
        (lost.lines > 0).then(|| self.notice(lost))
    }

    /// Writes a notice about `lost` lines and then `bytes`; may block. Counts lines that the system refuses.
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
                // The stream is closed, or its reader is (`| head`).
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
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lines_of(bytes: &[u8]) -> usize {
    bytes.split_inclusive(|byte| *byte == b'\n').count()
}

pub(super) static STDOUT: Stream = Stream::new("standard output", |bytes| {
    let mut console = io::stdout();
    // Output printed by other code comes first.
    let _ = console.flush();
    // Not locked: threads that panic or print must not wait for a blocked write.
    rustix::io::write(console.as_fd(), bytes)
});

pub(super) static STDERR: Stream =
    Stream::new("standard error", |bytes| rustix::io::write(io::stderr().as_fd(), bytes));

/// Time that a line waits for earlier lines on the other stream, which may be the same terminal.
pub(super) const ORDER: Duration = Duration::from_millis(100);

static SILENT: AtomicUsize = AtomicUsize::new(0);

/// While it lives, [`print_line`](super::print_line) writes nothing and there is no bar. Errors are still shown.
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
        // The first attempt at a notice wrote four bytes; the second starts again.
        assert_eq!(written, format!("kiln\n{notice}\nhere\nhere too\n"));
    }

    #[test]
    fn a_closed_reader_loses_nothing() {
        let stream = Stream::new("the test", |_| Err(Errno::PIPE));
        stream.put(b"gone\n");
        assert_eq!(stream.state().lost.lines, 0);
    }

    static GATE: Mutex<()> = Mutex::new(());
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
        // The thread may have taken a line before the queue was full.
        let kept = lines.iter().take_while(|line| line.len() + 1 == LINE.len()).count();
        assert!([room, room + 1].contains(&kept), "{kept}");
        let notice = format!(
            "kiln: {} lines could not be written to the test: its reader does not keep up, or has stopped",
            room + 4 - kept
        );
        assert_eq!(lines[kept..], [&*notice, "here"]);
        drop(read);
        SLOW.release();
        let large = vec![b'\n'; 3 << 20];
        SLOW.put(&large);
        assert!(READ.lock().unwrap().ends_with(&large));
    }
}
