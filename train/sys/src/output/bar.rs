//! The line at the bottom of a terminal that changes. Nothing here ever waits for the terminal.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::stream::{ORDER, STDERR, STDOUT, is_silent};

/// Columns if the terminal does not report them.
const COLUMNS: u16 = 80;

/// Time between two frames of a bar, on average.
const BETWEEN_FRAMES: Duration = Duration::from_millis(50);

/// Number of frames that may be drawn without a pause: those of a few quick steps, after which the last frame may stay
/// for long.
const BURST: u32 = 20;

/// Erases the line that the cursor is in.
const CLEAR: &str = "\r\x1b[2K";

/// The frame on the terminal. There is one bar at a time.
static SHOWN: Mutex<Option<Shown>> = Mutex::new(None);

struct Shown {
    frame: String,
    /// Frames that may be drawn at once, as of `at`.
    burst: u32,
    at: Instant,
}

fn shown() -> MutexGuard<'static, Option<Shown>> {
    // Any text may be drawn.
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line at the bottom of the terminal, on standard error. Lines of [`say`](super::say) and
/// [`complain`](super::complain) appear above it. Dropping it removes the line.
#[derive(Debug)]
pub struct Bar(());

impl Bar {
    /// Creates a bar if someone watches: both streams are terminals that can draw one, and silence is off.
    pub fn watched() -> Option<Self> {
        Self::is_watched().then(|| {
            // From here on, all lines go to the stream of the bar.
            STDOUT.let_go_first(ORDER);
            *shown() = Some(Shown { frame: String::new(), burst: BURST, at: Instant::now() });
            Bar(())
        })
    }

    pub(super) fn is_watched() -> bool {
        let is_dumb = std::env::var_os("TERM").is_some_and(|name| name == "dumb");
        !is_silent() && !is_dumb && io::stdout().is_terminal() && io::stderr().is_terminal()
    }

    /// Draws `line`, which has at most [`Bar::width`] columns, unless many frames were drawn a moment ago.
    pub fn draw(&self, line: String) {
        let mut shown = shown();
        let Some(Shown { frame, burst, at }) = &mut *shown else { return };
        let more = (at.elapsed().as_millis() / BETWEEN_FRAMES.as_millis()).min(BURST.into()) as u32;
        if more > 0 {
            (*burst, *at) = ((*burst + more).min(BURST), Instant::now());
        }
        if *burst > 0 {
            *burst -= 1;
            STDERR.draw(format!("{CLEAR}{line}").as_bytes());
            *frame = line;
        }
    }

    /// Returns the number of available columns.
    pub fn width(&self) -> usize {
        columns()
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        *shown() = None;
        STDERR.draw(CLEAR.as_bytes());
    }
}

/// Writes `bytes` above the bar. Returns false if there is no bar.
pub(super) fn put_above_bar(bytes: &[u8]) -> bool {
    let shown = shown();
    let Some(Shown { frame, .. }) = &*shown else { return false };
    STDERR.put(&[CLEAR.as_bytes(), bytes].concat());
    STDERR.draw(frame.as_bytes());
    true
}

/// Returns the columns of the terminal that lines are shown on; 80 without a terminal.
pub fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(io::stderr()).map(|size| size.ws_col);
    usize::from(size.ok().filter(|columns| *columns > 0).unwrap_or(COLUMNS))
}
