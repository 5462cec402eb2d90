//! A line at the bottom of a terminal that is redrawn in place. Nothing here ever waits for the terminal.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::stream::{ORDER, STDERR, STDOUT, is_silent};

/// Number of columns if the terminal does not report it.
const COLUMNS: u16 = 80;

/// Average minimum time between two frames of a bar.
const BETWEEN_FRAMES: Duration = Duration::from_millis(50);

/// Number of frames that may be drawn without a pause. It covers a few quick steps, after which the last
/// frame may stay for a long time.
const BURST: u32 = 20;

/// Erases the line that the cursor is on.
const CLEAR: &str = "\r\x1b[2K";

/// The frame on the terminal. At most one bar exists at a time.
static SHOWN: Mutex<Option<Shown>> = Mutex::new(None);

struct Shown {
    frame: String,
    /// Number of frames that could be drawn without a pause at the time `at`.
    burst: u32,
    at: Instant,
}

fn shown() -> MutexGuard<'static, Option<Shown>> {
    // Usable after a panic: any text may be drawn.
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line at the bottom of the terminal, on standard error. Lines of [`print_line`](super::print_line) and
/// [`eprint_line`](super::eprint_line) appear above it. Dropping it removes the line.
#[derive(Debug)]
pub struct Bar(());

impl Bar {
    /// Creates a bar if it would be visible: both streams are terminals that can draw one, and output is not
    /// silenced.
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

    /// Draws `line`, which has at most [`Bar::width`] columns. Skips it if too many frames were drawn
    /// recently.
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

/// Returns the number of columns of the terminal that shows the lines; 80 without a terminal.
pub fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(io::stderr()).map(|size| size.ws_col);
    usize::from(size.ok().filter(|columns| *columns > 0).unwrap_or(COLUMNS))
}
