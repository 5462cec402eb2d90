//! Lines for people, on standard output and standard error. A line that cannot be written, for example
//! because a log is on a full disk, ends nothing: it is counted, and the count is written as soon as
//! there is room again, or at the end of the process.

use std::io::{self, Write};
use std::os::fd::AsFd;
use std::sync::{Mutex, MutexGuard, PoisonError};

use rustix::io::Errno;

use super::launcher::{self, Word};

static STDOUT: Stream = Stream::new("standard output", |bytes| {
    let mut console = io::stdout().lock();
    // What somebody else has printed comes first.
    let _ = console.flush();
    rustix::io::write(console.as_fd(), bytes)
});

static STDERR: Stream = Stream::new("standard error", |bytes| {
    let console = io::stderr().lock();
    rustix::io::write(console.as_fd(), bytes)
});

/// Writes a line to standard output. A line that cannot be written is counted.
pub fn say(text: &str) {
    STDOUT.put(format!("{text}\n").as_bytes());
}

/// Writes a line to standard error. A line that cannot be written is counted.
pub fn complain(text: &str) {
    STDERR.put(format!("{text}\n").as_bytes());
}

/// Says what could not be written until now, where that can be written: on the stream itself, on the
/// other one, or to the launcher. To be called at the end of a process.
pub fn finish() {
    for (stream, other) in [(&STDERR, &STDOUT), (&STDOUT, &STDERR)] {
        let mut lost = stream.lost();
        if lost.lines == 0 || stream.tell(&mut lost) {
            continue;
        }
        let text = stream.notice(&lost);
        *lost = Lost::NOTHING;
        drop(lost);
        launcher::tell(Word::Note, &text);
        // Nothing more can be done if that is full as well.
        let _ = other.write_all(format!("kiln: {text}\n").as_bytes());
    }
}

/// Standard error as a writer that never fails, for log events and reports of many lines.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stderr;

impl Write for Stderr {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        STDERR.put(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Standard output as a writer that never fails.
#[derive(Clone, Copy, Debug, Default)]
pub struct Stdout;

impl Write for Stdout {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        STDOUT.put(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

type WriteSome = fn(&[u8]) -> Result<usize, Errno>;

/// An output for people, and what it could not take.
struct Stream {
    name: &'static str,
    write: WriteSome,
    lost: Mutex<Lost>,
}

/// What could not be written since the last notice.
struct Lost {
    lines: u64,
    bytes: u64,
    /// Whether the last line that was written is incomplete.
    torn: bool,
    reason: Option<Errno>,
}

impl Lost {
    const NOTHING: Lost = Lost { lines: 0, bytes: 0, torn: false, reason: None };
}

impl Stream {
    const fn new(name: &'static str, write: WriteSome) -> Stream {
        Stream { name, write, lost: Mutex::new(Lost::NOTHING) }
    }

    /// Writes whole lines, or counts them.
    fn put(&self, bytes: &[u8]) {
        let mut lost = self.lost();
        let (written, reason) = match lost.lines > 0 && !self.tell(&mut lost) {
            true => (0, lost.reason),
            false => match self.write_all(bytes) {
                // A reader that went away (`| head`) does not want to know.
                Ok(()) | Err((_, Errno::PIPE)) => return,
                Err((written, reason)) => (written, Some(reason)),
            },
        };
        let lines = bytes[written..].iter().filter(|byte| **byte == b'\n').count();
        lost.lines += lines.max(1) as u64;
        lost.bytes += (bytes.len() - written) as u64;
        lost.torn |= written > 0;
        lost.reason = reason;
    }

    /// Writes how much was lost; returns whether that worked.
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
        let reason = lost.reason.map(io::Error::from);
        let reason = reason.map_or_else(String::new, |reason| format!(": {reason}"));
        let plural = if lost.lines == 1 { "" } else { "s" };
        format!(
            "{} line{plural} ({} bytes) could not be written to {}{reason}",
            lost.lines, lost.bytes, self.name
        )
    }

    /// The error comes with the number of bytes before it.
    fn write_all(&self, bytes: &[u8]) -> Result<(), (usize, Errno)> {
        let mut written = 0;
        while written < bytes.len() {
            match (self.write)(&bytes[written..]) {
                Ok(0) => return Err((written, Errno::IO)),
                Ok(count) => written += count,
                Err(Errno::INTR) => {}
                // A process without this stream.
                Err(Errno::BADF) => return Ok(()),
                Err(reason) => return Err((written, reason)),
            }
        }
        Ok(())
    }

    fn lost(&self) -> MutexGuard<'_, Lost> {
        // Counters are whole at any moment.
        self.lost.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Bytes for which there is room.
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
        // Four bytes of the first attempt at a notice, which the second one starts anew.
        assert_eq!(written, format!("kiln\n{notice}\nhere\nhere too\n"));
    }

    #[test]
    fn a_reader_that_went_away_is_not_told() {
        let stream = Stream::new("the test", |_| Err(Errno::PIPE));
        stream.put(b"gone\n");
        assert_eq!(stream.lost().lines, 0);
    }
}
