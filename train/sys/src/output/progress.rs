//! Shows the progress of long work without blocking: redraws a line on a terminal, otherwise prints lines rarely.

use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::bar::Bar;
use super::{eprint_line, print_line, printable};
use crate::Repeat;
use crate::words::size;

/// Time between two frames on a terminal. Short, so that the displayed time keeps moving.
const FRAME: Duration = Duration::from_millis(200);

/// Without a terminal: minimum time between two lines, and before the first line.
const PAUSE: Duration = Duration::from_secs(2);

/// Without a terminal: elapsed time divided by this is the pause before the next line, so long work prints few lines.
const PAUSE_SHARE: u32 = 4;

const GAUGE: usize = 24;

/// Draws `done` of `of` as a bar of `columns` columns; the bar is empty if `of` is 0.
pub fn gauge(done: u64, of: u64, columns: usize) -> String {
    let share = if of == 0 { 0.0 } else { done.min(of) as f64 / of as f64 };
    let full = (share * columns as f64) as usize;
    "\u{2588}".repeat(full) + &"\u{2591}".repeat(columns - full)
}

/// Counts finished parts of some work without blocking, for a thread that shows their number.
#[derive(Debug, Default)]
pub struct Meter {
    done: AtomicU64,
    of: AtomicU64,
}

impl Meter {
    /// Begins work of `of` parts, such as bytes; 0 if unknown.
    pub fn begin(&self, of: u64) {
        self.done.store(0, Ordering::Relaxed);
        self.of.store(of, Ordering::Relaxed);
    }

    /// Adds `count` finished parts.
    pub fn add(&self, count: u64) {
        self.done.fetch_add(count, Ordering::Relaxed);
    }

    /// Returns the number of finished parts and the total.
    pub fn read(&self) -> (u64, u64) {
        (self.done.load(Ordering::Relaxed), self.of.load(Ordering::Relaxed))
    }
}

/// Shows the progress of some work until it is dropped.
#[derive(Debug)]
pub struct ProgressLine {
    work: Arc<Mutex<Work>>,
    _repeat: Option<Repeat>,
}

#[derive(Clone, Debug)]
struct Work {
    what: String,
    done: u64,
    of: u64,
    since: Instant,
}

impl Work {
    fn new(what: String, done: u64, of: u64) -> Self {
        Work { what, done, of, since: Instant::now() }
    }

    fn remaining(&self, elapsed: Duration) -> Option<Duration> {
        let is_known = self.done > 0 && self.done < self.of && elapsed >= PAUSE;
        is_known.then(|| elapsed.mul_f64((self.of - self.done) as f64 / self.done as f64))
    }
}

impl ProgressLine {
    /// Starts to show work. `topic` begins every line; `what` is the current work. Short work prints no lines.
    pub fn start(topic: &str, what: &str) -> Self {
        Self::printing(topic, what, print_line)
    }

    /// Like [`ProgressLine::start`], but prints to standard error, for commands whose standard output is a result.
    pub fn on_stderr(topic: &str, what: &str) -> Self {
        Self::printing(topic, what, eprint_line)
    }

    fn printing(topic: &str, what: &str, print: fn(&str)) -> Self {
        let work = Arc::new(Mutex::new(Work::new(what.to_owned(), 0, 0)));
        let seen = work.clone();
        // Cloned so that the work never waits for a reader.
        let look = move || seen.lock().unwrap_or_else(PoisonError::into_inner).clone();
        ProgressLine { work, _repeat: repeat(topic, look, print) }
    }

    /// Shows work whose bytes `meter` counts.
    pub fn for_bytes(topic: &str, meter: Arc<Meter>) -> Self {
        let since = Instant::now();
        let look = move || {
            let (done, of) = meter.read();
            let what = if of == 0 { size(done) } else { format!("{} of {}", size(done.min(of)), size(of)) };
            Work { what, done, of, since }
        };
        ProgressLine { work: unused(), _repeat: repeat(topic, look, print_line) }
    }

    /// Like [`ProgressLine::for_bytes`], but shows nothing without a terminal.
    pub fn on_terminal(topic: &str, meter: Arc<Meter>) -> Self {
        match Bar::is_watched() {
            true => Self::for_bytes(topic, meter),
            false => ProgressLine { work: unused(), _repeat: None },
        }
    }

    /// Sets the current work to `what`, with `done` of `of` finished; `of` is 0 if the total is unknown.
    pub fn set(&self, what: String, done: u64, of: u64) {
        let mut work = self.work.lock().unwrap_or_else(PoisonError::into_inner);
        let since =
            if (work.of, work.done) <= (of, done) && work.of == of { work.since } else { Instant::now() };
        *work = Work { what, done, of, since };
    }
}

fn unused() -> Arc<Mutex<Work>> {
    Arc::new(Mutex::new(Work::new(String::new(), 0, 0)))
}

fn repeat(topic: &str, look: impl Fn() -> Work + Send + 'static, print: fn(&str)) -> Option<Repeat> {
    let (topic, start) = (topic.to_owned(), Instant::now());
    match Bar::watched() {
        Some(bar) => {
            let draw = move || bar.draw(frame(&topic, &look(), start.elapsed(), bar.width()));
            draw();
            every(FRAME, draw)
        }
        None => {
            let mut due = PAUSE;
            every(PAUSE, move || {
                let elapsed = start.elapsed();
                if elapsed >= due {
                    due = elapsed + elapsed / PAUSE_SHARE;
                    print(&line(&topic, &look(), elapsed));
                }
            })
        }
    }
    .ok()
}

fn every(pause: Duration, mut show: impl FnMut() + Send + 'static) -> io::Result<Repeat> {
    Repeat::every(pause, "kiln-progress", move |is_last| {
        if !is_last {
            show();
        }
    })
}

fn line(topic: &str, work: &Work, elapsed: Duration) -> String {
    let left = work.remaining(work.since.elapsed()).map(|left| format!(", about {} s left", left.as_secs()));
    format!("{topic}: {} ({} s so far{})", work.what, elapsed.as_secs(), left.unwrap_or_default())
}

/// Printable, because names come from other people's files.
fn frame(topic: &str, work: &Work, elapsed: Duration, columns: usize) -> String {
    let left = work.remaining(work.since.elapsed()).map(|left| format!(" | about {} s left", left.as_secs()));
    let text = format!("{topic}: {} | {} s{}", work.what, elapsed.as_secs(), left.unwrap_or_default());
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

    fn work(what: &str) -> Work {
        Work::new(what.to_owned(), 1, 4)
    }

    #[test]
    fn the_remaining_time_follows_the_share_that_is_done() {
        let seconds = Duration::from_secs;
        assert_eq!(work("").remaining(seconds(1)), None);
        assert_eq!(work("").remaining(seconds(3)), Some(seconds(9)));
        assert_eq!(Work::new(String::new(), 4, 4).remaining(seconds(3)), None);
        assert_eq!(Work::new(String::new(), 4, 0).remaining(seconds(3)), None);
    }

    #[test]
    fn a_gauge_shows_the_share_done() {
        let count = |done, of| gauge(done, of, 10).chars().filter(|c| *c == '\u{2588}').count();
        assert_eq!([count(0, 4), count(1, 4), count(4, 4), count(9, 4), count(3, 0)], [0, 2, 10, 10, 0]);
        assert_eq!(gauge(1, 3, 10).chars().count(), 10);
    }

    #[test]
    fn current_work_is_repeated_until_it_ends() {
        let (sender, lines) = mpsc::channel();
        let (go_on, may_go_on) = mpsc::channel::<()>();
        let current = Arc::new(Mutex::new(work("reading")));
        let seen = current.clone();
        let repeat = every(Duration::ZERO, move || {
            let _ = sender.send(line("data", &seen.lock().unwrap().clone(), Duration::from_secs(7)));
            let _ = may_go_on.recv();
        });
        assert_eq!(receive("a line", &lines), "data: reading (7 s so far)");
        *current.lock().unwrap() = work("encoded 3 MB");
        for _ in 0..3 {
            go_on.send(()).unwrap();
            assert_eq!(receive("a line", &lines), "data: encoded 3 MB (7 s so far)");
        }
        drop(go_on);
        drop(repeat.unwrap());
        for line in lines.iter() {
            assert!(line.starts_with("data: encoded"), "{line}");
        }
    }

    #[test]
    fn short_work_prints_nothing() {
        let (sender, lines) = mpsc::channel();
        let repeat = every(Duration::from_secs(1 << 20), move || {
            let _ = sender.send(());
        });
        drop(repeat.unwrap());
        assert!(lines.recv().is_err());
    }

    #[test]
    fn a_frame_fits_the_terminal() {
        let long = work("encoded 3 of 12 MB, 800000 tokens");
        for columns in [1, 20, 48, 60, 80, 200] {
            let frame = frame("data", &long, Duration::from_secs(61), columns);
            assert!(frame.chars().count() <= columns, "{columns}: {frame}");
        }
        let wide = frame("data", &work("\u{1b}[2J"), Duration::ZERO, 80);
        assert_eq!(wide, format!("{} data: \\u001b[2J | 0 s", gauge(1, 4, 24)));
    }
}
