//! An output for people: its waiting lines, and a count of lost ones.

use std::collections::VecDeque;
use std::io;
use std::mem;
use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use crate::words::number_of;
use rustix::io::Errno;

/// Maximum number of waiting bytes. A single text may be longer.
const ROOM: usize = 1 << 20;

/// Maximum number of waiting bytes at which another frame of a progress bar is drawn.
const FRAMES: usize = 4096;

/// Bytes written at once: a pipe takes them in one piece, and a slow reader is seen to read.
const PIECE: usize = 4096;

type WriteSome = fn(&[u8]) -> Result<usize, Errno>;

/// An output. Lines are written by the calling thread, or, while the stream is held, wait in a queue for a
/// thread that writes them.
pub(super) struct Stream {
    name: &'static str,
    write: WriteSome,
    /// Held while something is written.
    lost: Mutex<Lost>,
    queue: Mutex<Queue>,
    changed: Condvar,
    /// Bytes in the queue and being written by its thread. Changed only with the queue locked.
    waiting: AtomicUsize,
    /// Number of writes that were accepted, at least in part.
    moved: AtomicU64,
    /// True if a line was ever lost.
    has_lost: AtomicBool,
}

/// Losses since the last notice.
struct Lost {
    lines: u64,
    bytes: u64,
    /// True if the last written line is incomplete.
    torn: bool,
    reason: Option<Errno>,
}

impl Lost {
    const NOTHING: Lost = Lost { lines: 0, bytes: 0, torn: false, reason: None };

    fn add(&mut self, lines: u64, bytes: usize, reason: Option<Errno>) {
        self.lines += lines;
        self.bytes += bytes as u64;
        self.reason = reason;
    }
}

/// Texts for the thread that writes.
struct Queue {
    texts: VecDeque<Vec<u8>>,
    /// Number of lines among the waiting bytes.
    lines: u64,
    /// True if the last text ends within a line.
    torn: bool,
    /// Texts that found no room.
    lost: Lost,
    /// Number of live guards that keep output from blocking.
    holders: usize,
    has_thread: bool,
    /// Longest wait that was in vain, and the value of `moved` at that time.
    given_up: Option<(Duration, u64)>,
}

impl Stream {
    pub(super) const fn new(name: &'static str, write: WriteSome) -> Stream {
        let queue = Queue {
            texts: VecDeque::new(),
            lines: 0,
            torn: false,
            lost: Lost::NOTHING,
            holders: 0,
            has_thread: false,
            given_up: None,
        };
        Stream {
            name,
            write,
            lost: Mutex::new(Lost::NOTHING),
            queue: Mutex::new(queue),
            changed: Condvar::new(),
            waiting: AtomicUsize::new(0),
            moved: AtomicU64::new(0),
            has_lost: AtomicBool::new(false),
        }
    }

    /// Stops waiting for the reader. If no thread can be started for that, writing blocks as before.
    pub(super) fn hold(&'static self) {
        let mut queue = self.queue();
        queue.holders += 1;
        if !queue.has_thread {
            let name = "kiln-output".to_owned();
            queue.has_thread = thread::Builder::new().name(name).spawn(|| self.serve()).is_ok();
        }
    }

    /// Undoes one [`Stream::hold`].
    pub(super) fn release(&self) {
        self.queue().holders -= 1;
    }

    /// Returns the number of waiting bytes. May be called in a signal handler.
    pub(super) fn waiting(&self) -> usize {
        self.waiting.load(Ordering::Acquire)
    }

    /// Writes whole lines, or counts them.
    pub(super) fn put(&self, bytes: &[u8]) {
        let queue = self.queue();
        if queue.has_thread && (queue.holders > 0 || self.waiting() > 0) {
            return self.push(queue, bytes);
        }
        drop(queue);
        self.write_or_count(bytes);
    }

    /// Writes a frame of a progress bar, unless the reader is behind.
    pub(super) fn draw(&self, frame: &[u8]) {
        if self.waiting() <= FRAMES {
            self.put(frame);
        }
    }

    /// Returns true if a line was ever lost. Lines for a reader that has gone away do not count.
    pub(super) fn has_lost(&self) -> bool {
        self.has_lost.load(Ordering::Relaxed)
    }

    /// Waits until all waiting bytes are written, but no longer than `patience` without progress. Returns
    /// true if everything is written.
    pub(super) fn drain(&self, patience: Duration) -> bool {
        if self.waiting() == 0 {
            return true;
        }
        let mut queue = self.queue();
        while self.waiting() > 0 {
            let moved = self.moved.load(Ordering::Relaxed);
            if queue.given_up.is_some_and(|(waited, at)| at == moved && waited >= patience) {
                return false;
            }
            let stands = |_: &mut Queue| self.waiting() > 0 && self.moved.load(Ordering::Relaxed) == moved;
            let (locked, waited) = self
                .changed
                .wait_timeout_while(queue, patience, stands)
                .unwrap_or_else(PoisonError::into_inner);
            queue = locked;
            if waited.timed_out() {
                queue.given_up = Some((patience, moved));
                return false;
            }
        }
        true
    }

    /// Lets waiting lines be written before a line of another stream, unless the reader is behind. Never
    /// waits for longer than `limit`.
    pub(super) fn let_go_first(&self, limit: Duration) {
        if !(1..=PIECE).contains(&self.waiting()) {
            return;
        }
        let queue = self.queue();
        let moved = self.moved.load(Ordering::Relaxed);
        if queue.given_up.is_some_and(|(_, at)| at == moved) {
            return;
        }
        let (mut queue, waited) = self
            .changed
            .wait_timeout_while(queue, limit, |_| self.waiting() > 0)
            .unwrap_or_else(PoisonError::into_inner);
        if waited.timed_out() {
            queue.given_up = Some((limit, self.moved.load(Ordering::Relaxed)));
        }
    }

    /// Waits as [`Stream::drain`] does. Returns a message about lines that could not be written even now.
    pub(super) fn finish(&self, patience: Duration) -> Option<String> {
        let mut is_drained = self.drain(patience);
        if is_drained {
            let mut queue = self.queue();
            if queue.lost.lines > 0 {
                self.push_notice(&mut queue);
                drop(queue);
                is_drained = self.drain(patience);
            }
        }
        if !is_drained {
            // The thread holds `self.lost`, possibly forever.
            let mut queue = self.queue();
            let mut lost = mem::replace(&mut queue.lost, Lost::NOTHING);
            lost.add(queue.lines, self.waiting(), Some(Errno::AGAIN));
            return (lost.lines > 0).then(|| self.notice(&lost));
        }
        let mut lost = self.lost();
        if lost.lines == 0 || self.tell(&mut lost) {
            return None;
        }
        let text = self.notice(&lost);
        *lost = Lost::NOTHING;
        Some(text)
    }

    /// Writes the contents of the queue, forever.
    fn serve(&self) {
        let mut queue = self.queue();
        loop {
            let Some(text) = queue.texts.pop_front() else {
                queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
                continue;
            };
            drop(queue);
            self.write_or_count(&text);
            queue = self.queue();
            queue.lines -= lines_of(&text);
            self.waiting.fetch_sub(text.len(), Ordering::Release);
            self.changed.notify_all();
        }
    }

    /// Adds a text to the queue, or counts its lines as lost.
    fn push(&self, mut queue: MutexGuard<'_, Queue>, bytes: &[u8]) {
        let waiting = self.waiting();
        // There is enough room that the next line will not be lost again.
        if queue.lost.lines > 0 && waiting <= ROOM / 2 {
            self.push_notice(&mut queue);
        }
        if queue.lost.lines > 0 || (waiting > 0 && waiting + bytes.len() > ROOM) {
            self.has_lost.store(true, Ordering::Relaxed);
            return queue.lost.add(lines_of(bytes).max(1), bytes.len(), Some(Errno::AGAIN));
        }
        self.add(&mut queue, bytes);
    }

    fn push_notice(&self, queue: &mut Queue) {
        let start = if queue.torn { "\n" } else { "" };
        let text = format!("{start}kiln: {}\n", self.notice(&queue.lost));
        queue.lost = Lost::NOTHING;
        self.add(queue, text.as_bytes());
    }

    fn add(&self, queue: &mut Queue, bytes: &[u8]) {
        let Some(last) = bytes.last() else { return };
        queue.torn = *last != b'\n';
        queue.lines += lines_of(bytes);
        queue.texts.push_back(bytes.to_vec());
        self.waiting.fetch_add(bytes.len(), Ordering::Release);
        self.changed.notify_all();
    }

    /// Writes to the reader, which may block this thread. Counts the lines that the system refuses.
    fn write_or_count(&self, bytes: &[u8]) {
        let mut lost = self.lost();
        let (written, reason) = match lost.lines > 0 && !self.tell(&mut lost) {
            true => (0, lost.reason),
            false => match self.write_all(bytes) {
                // A reader that has gone away (`| head`) needs no notice.
                Ok(()) | Err((_, Errno::PIPE)) => return,
                Err((written, reason)) => (written, Some(reason)),
            },
        };
        self.has_lost.store(true, Ordering::Relaxed);
        lost.add(lines_of(&bytes[written..]).max(1), bytes.len() - written, reason);
        lost.torn |= written > 0;
    }

    /// Writes a notice about the losses; returns true if that worked.
    fn tell(&self, lost: &mut Lost) -> bool {
        let start = if lost.torn { "\n" } else { "" };
        let text = format!("{start}kiln: {}\n", self.notice(lost));
        match self.write_all(text.as_bytes()) {
            Ok(()) | Err((_, Errno::PIPE)) => {
                *lost = Lost::NOTHING;
                true
            }
            Err((written, _)) => {
                lost.torn |= written > 0;
                false
            }
        }
    }

    fn notice(&self, lost: &Lost) -> String {
        let reason = match lost.reason {
            None => String::new(),
            Some(Errno::AGAIN) => ": its reader does not keep up, or has stopped".to_owned(),
            Some(reason) => format!(": {}", io::Error::from(reason)),
        };
        let (lines, bytes) = (number_of(lost.lines, "line"), number_of(lost.bytes, "byte"));
        format!("{lines} ({bytes}) could not be written to {}{reason}", self.name)
    }

    /// Writes `bytes`. An error includes the number of bytes written before it.
    fn write_all(&self, bytes: &[u8]) -> Result<(), (usize, Errno)> {
        let mut written = 0;
        while written < bytes.len() {
            let end = bytes.len().min(written + PIECE);
            match (self.write)(&bytes[written..end]) {
                Ok(0) => return Err((written, Errno::IO)),
                Ok(count) => {
                    written += count;
                    self.moved.fetch_add(1, Ordering::Relaxed);
                }
                Err(Errno::INTR) => {}
                // The process does not have this stream.
                Err(Errno::BADF) => return Ok(()),
                Err(reason) => return Err((written, reason)),
            }
        }
        Ok(())
    }

    fn lost(&self) -> MutexGuard<'_, Lost> {
        // Counters are always consistent.
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn queue(&self) -> MutexGuard<'_, Queue> {
        // Nothing panics while it is locked.
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn lines_of(bytes: &[u8]) -> u64 {
    bytes.iter().filter(|byte| **byte == b'\n').count() as u64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Number of bytes for which there is room.
    static ROOM: AtomicUsize = AtomicUsize::new(0);
    static WRITTEN: Mutex<Vec<u8>> = Mutex::new(Vec::new());

    #[test]
    fn what_is_lost_is_counted_and_said_when_there_is_room_again() {
        let stream = Stream::new("the test", |bytes| {
            let count = bytes.len().min(ROOM.load(Ordering::Relaxed));
            if count == 0 {
                return Err(Errno::NOSPC);
            }
            ROOM.fetch_sub(count, Ordering::Relaxed);
            WRITTEN.lock().unwrap().extend_from_slice(&bytes[..count]);
            Ok(count)
        });
        stream.put(b"gone\n");
        ROOM.store(4, Ordering::Relaxed);
        stream.put(b"gone as well\n");
        ROOM.store(1000, Ordering::Relaxed);
        stream.put(b"here\n");
        stream.put(b"here too\n");
        let written = String::from_utf8(WRITTEN.lock().unwrap().clone()).unwrap();
        let notice = "kiln: 2 lines (18 bytes) could not be written to the test: No space left on \
                      device (os error 28)";
        // Four bytes of the first attempt at a notice; the second attempt starts again.
        assert_eq!(written, format!("kiln\n{notice}\nhere\nhere too\n"));
    }

    #[test]
    fn a_reader_that_went_away_is_not_told() {
        let stream = Stream::new("the test", |_| Err(Errno::PIPE));
        stream.put(b"gone\n");
        assert_eq!(stream.lost().lines, 0);
    }

    /// Held while the reader of the next test reads nothing.
    static GATE: Mutex<()> = Mutex::new(());
    static READ: Mutex<Vec<u8>> = Mutex::new(Vec::new());
    static SLOW: Stream = Stream::new("the test", |bytes| {
        let _open = GATE.lock().unwrap();
        READ.lock().unwrap().extend_from_slice(bytes);
        Ok(bytes.len())
    });

    #[test]
    fn a_reader_that_stops_keeps_nobody_waiting_and_hears_what_it_missed() {
        const LINE: [u8; 1024] = {
            let mut line = [b'x'; 1024];
            line[1023] = b'\n';
            line
        };
        SLOW.hold();
        let closed = GATE.lock().unwrap();
        for _ in 0..1024 + 3 {
            SLOW.put(&LINE);
        }
        SLOW.draw(b"a frame of a bar, which is not missed");
        assert!(!SLOW.drain(Duration::from_millis(1)));
        drop(closed);
        assert!(SLOW.drain(Duration::from_secs(600)));
        SLOW.put(b"here\n");
        assert_eq!(SLOW.finish(Duration::from_secs(600)), None);
        let read = READ.lock().unwrap();
        let text = String::from_utf8_lossy(&read);
        let last: Vec<_> = text.lines().skip(1024).collect();
        let notice = "kiln: 3 lines (3072 bytes) could not be written to the test: its reader does \
                      not keep up, or has stopped";
        assert_eq!(last, [notice, "here"]);
        drop(read);
        SLOW.release();
        // Writers then wait again, and lose nothing.
        let large = vec![b'\n'; 3 << 20];
        SLOW.put(&large);
        assert!(READ.lock().unwrap().ends_with(&large));
    }
}
