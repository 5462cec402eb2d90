//! Redraws a line at the bottom of a terminal, without blocking.

use std::io::{self, IsTerminal};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::stream::{ORDER, STDERR, STDOUT, is_silent};

const COLUMNS: u16 = 80;

const BETWEEN_FRAMES: Duration = Duration::from_millis(50);

/// Frames that may be drawn without a pause, so that the last of a few quick steps is visible.
const BURST: u32 = 20;

const CLEAR: &str = "\r\x1b[2K";

/// At most one bar exists at a time.
static SHOWN: Mutex<Option<Shown>> = Mutex::new(None);

struct Shown {
    frame: String,
    burst: u32,
    at: Instant,
}

fn shown() -> MutexGuard<'static, Option<Shown>> {
    // A poisoned lock is fine: any text may be drawn.
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line at the bottom of the terminal, on standard error, below printed lines. Dropping it removes the line.
#[derive(Debug)]
pub struct Bar(());

impl Bar {
    /// Creates a bar if both streams are terminals that can draw one, and output is not silenced.
    pub fn watched() -> Option<Self> {
        Self::is_watched().then(|| {
            // From here on, all lines go to the bar's stream.
            STDOUT.let_go_first(ORDER);
            *shown() = Some(Shown { frame: String::new(), burst: BURST, at: Instant::now() });
            Bar(())
        })
    }

    pub(super) fn is_watched() -> bool {
        let is_dumb = std::env::var_os("TERM").is_some_and(|name| name == "dumb");
        !is_silent() && !is_dumb && io::stdout().is_terminal() && io::stderr().is_terminal()
    }

    /// Draws `line`, of at most [`Bar::width`] columns, unless too many frames were drawn recently.
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

pub(super) fn put_above_bar(bytes: &[u8]) -> bool {
    let shown = shown();
    let Some(Shown { frame, .. }) = &*shown else { return false };
    STDERR.put(&[CLEAR.as_bytes(), bytes].concat());
    STDERR.draw(frame.as_bytes());
    true
}

/// Returns the width of the terminal in columns; 80 without a terminal.
pub fn columns() -> usize {
    let size = rustix::termios::tcgetwinsize(io::stderr()).map(|size| size.ws_col);
    usize::from(size.ok().filter(|columns| *columns > 0).unwrap_or(COLUMNS))
}
