//! Progress of long work, for people: a line that changes on a terminal, and a line every few seconds
//! elsewhere.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::bar::{Bar, gauge};
use super::lines::{printable, say};
use crate::meter::Meter;
use crate::repeat::Repeat;
use crate::words::size;

/// Time between two lines without a terminal.
const PAUSE: Duration = Duration::from_secs(5);

/// Time between two frames on a terminal, so that the clock advances between reports.
const FRAME: Duration = Duration::from_millis(200);

/// Columns of the gauge on a terminal.
const GAUGE: usize = 24;

/// Shows the current work until it is dropped.
#[derive(Debug)]
pub struct ProgressLine {
    work: Arc<Mutex<Work>>,
    /// `None` if the system has no thread left: nothing depends on the display.
    _repeat: Option<Repeat>,
}

/// A piece of work at one moment.
#[derive(Clone, Debug)]
struct Work {
    what: String,
    done: u64,
    /// 0 if unknown.
    of: u64,
}

impl ProgressLine {
    /// Starts work of the kind `topic`; without a terminal, its lines begin with `topic`. Work that ends
    /// before the first line is due prints none.
    pub fn start(topic: &str, what: &str) -> Self {
        let work = Arc::new(Mutex::new(Work { what: what.to_owned(), done: 0, of: 0 }));
        let seen = work.clone();
        // Work does not wait for a reader.
        let look = move || seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ProgressLine { work, _repeat: repeat(topic, look) }
    }

    /// Shows work whose bytes `meter` counts.
    pub fn of_bytes(topic: &str, meter: Arc<Meter>) -> Self {
        let look = move || {
            let (done, of) = meter.read();
            let what = if of == 0 { size(done) } else { format!("{} of {}", size(done.min(of)), size(of)) };
            Work { what, done, of }
        };
        ProgressLine { work: Arc::new(Mutex::new(look())), _repeat: repeat(topic, look) }
    }

    /// Shows work whose bytes `meter` counts, in a command whose output has a purpose: shows nothing without
    /// a terminal.
    pub fn on_terminal(topic: &str, meter: Arc<Meter>) -> Self {
        if Bar::is_watched() {
            return Self::of_bytes(topic, meter);
        }
        let work = Work { what: String::new(), done: 0, of: 0 };
        ProgressLine { work: Arc::new(Mutex::new(work)), _repeat: None }
    }

    /// Sets the current work to `what`, of which `done` of `of` is done; `of` is 0 if unknown.
    pub fn set(&self, what: String, done: u64, of: u64) {
        // Any text may be shown.
        *self.work.lock().unwrap_or_else(PoisonError::into_inner) = Work { what, done, of };
    }
}

/// Shows the result of `look` repeatedly.
fn repeat(topic: &str, look: impl Fn() -> Work + Send + 'static) -> Option<Repeat> {
    let (topic, start) = (topic.to_owned(), Instant::now());
    match Bar::watched() {
        Some(bar) => {
            let draw = move || bar.draw(frame(&topic, &look(), start.elapsed(), bar.width()));
            draw();
            Repeat::every(FRAME, "kiln-progress", move |is_last| {
                if !is_last {
                    draw();
                }
            })
        }
        None => {
            let say = move |line: &str| say(line);
            every(PAUSE, move || told(&topic, &look(), start.elapsed()), say)
        }
    }
    .ok()
}

/// Passes the result of `text` to `say` after every `pause`.
fn every(
    pause: Duration,
    text: impl Fn() -> String + Send + 'static,
    say: impl Fn(&str) + Send + 'static,
) -> std::io::Result<Repeat> {
    Repeat::every(pause, "kiln-progress", move |is_last| {
        if !is_last {
            say(&text());
        }
    })
}

/// Returns the line without a terminal.
fn told(topic: &str, work: &Work, elapsed: Duration) -> String {
    format!("{topic}: {} ({} s so far)", work.what, elapsed.as_secs())
}

/// Returns the line on a terminal of `columns` columns. Names in it come from other people's files.
fn frame(topic: &str, work: &Work, elapsed: Duration, columns: usize) -> String {
    let text = format!("{topic}: {} | {} s", work.what, elapsed.as_secs());
    let text = printable(&text);
    let room = columns.saturating_sub(text.chars().count() + 1);
    match room {
        0..8 => text.chars().take(columns).collect(),
        _ => format!("{} {text}", gauge(work.done, work.of, room.min(GAUGE))),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use kiln_testkit::receive;

    use super::*;

    fn line(what: &str) -> Work {
        Work { what: what.to_owned(), done: 1, of: 4 }
    }

    #[test]
    fn what_is_done_now_is_said_again_and_again_until_it_ends() {
        let (sender, lines) = mpsc::channel();
        // Waits for the reader at every line.
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let work = Arc::new(Mutex::new(line("reading")));
        let seen = work.clone();
        let text = move || told("data", &seen.lock().unwrap().clone(), Duration::from_secs(7));
        let repeat = every(Duration::ZERO, text, move |line: &str| {
            let _ = sender.send(line.to_owned());
            let _ = may_go_on.recv();
        });
        assert_eq!(receive("a line", &lines), "data: reading (7 s so far)");
        *work.lock().unwrap() = line("encoded 3 MB");
        for _ in 0..3 {
            go_on.send(()).unwrap();
            assert_eq!(receive("a line", &lines), "data: encoded 3 MB (7 s so far)");
        }
        drop(go_on);
        drop(repeat.unwrap());
        // The thread has ended, and its end of the channel with it.
        for line in lines.iter() {
            assert!(line.starts_with("data: encoded"), "{line}");
        }
    }

    #[test]
    fn work_that_is_done_sooner_says_nothing() {
        let (sender, lines) = mpsc::channel();
        let repeat = every(Duration::from_secs(1 << 20), String::new, move |line: &str| {
            let _ = sender.send(line.to_owned());
        });
        drop(repeat.unwrap());
        assert!(lines.recv().is_err());
    }

    #[test]
    fn a_frame_is_never_wider_than_the_terminal() {
        let work = line("encoded 3 of 12 MB, 800000 tokens");
        for columns in [1, 20, 48, 60, 80, 200] {
            let frame = frame("data", &work, Duration::from_secs(61), columns);
            assert!(frame.chars().count() <= columns, "{columns}: {frame}");
        }
        let wide = frame("data", &line("\u{1b}[2J"), Duration::ZERO, 80);
        assert_eq!(wide, format!("{} data: \\u001b[2J | 0 s", gauge(1, 4, 24)));
    }
}
