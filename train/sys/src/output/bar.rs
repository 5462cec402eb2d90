//! A line at the bottom of the terminal that is redrawn repeatedly, without ever waiting for the terminal.

use std::io::{self, IsTerminal};
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use super::silence::is_silent;
use super::streams::{ORDER, STDERR, STDOUT};

/// Columns and rows if the terminal does not report them.
const SIZE: (u16, u16) = (80, 24);

/// Maximum number of frames of a bar per second.
const FRAME_RATE: u8 = 20;

/// The value of `TERM` for terminals that cannot move their cursor.
const DUMB: &str = "dumb";

/// The bar that is on the terminal. There is one at a time.
static SHOWN: Mutex<Option<ProgressBar>> = Mutex::new(None);

fn shown() -> MutexGuard<'static, Option<ProgressBar>> {
    // The value is replaced as a whole.
    SHOWN.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A line at the bottom of the terminal, on standard error. Lines of [`say`](super::say) and
/// [`complain`](super::complain) appear above it. Dropping it removes the line.
#[derive(Debug)]
pub struct Bar(ProgressBar);

impl Bar {
    /// Creates a bar if someone watches: both streams are terminals that can draw one, and silence is off.
    pub fn watched() -> Option<Self> {
        Self::is_watched().then(|| {
            // From here on, all lines go through the bar.
            STDOUT.let_go_first(ORDER);
            let target = ProgressDrawTarget::term_like_with_hz(Box::new(Screen::default()), FRAME_RATE);
            let bar = ProgressBar::with_draw_target(None, target);
            // The template is a constant that parses; the default style would also do.
            let style = ProgressStyle::with_template("{msg}");
            let bar = bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()));
            *shown() = Some(bar.clone());
            Bar(bar)
        })
    }

    /// Returns true if a bar would be shown.
    pub(super) fn is_watched() -> bool {
        let is_dumb = std::env::var_os("TERM").is_some_and(|name| name == DUMB);
        !is_silent() && !is_dumb && io::stdout().is_terminal() && io::stderr().is_terminal()
    }

    /// Draws `line`, which has at most [`Bar::width`] columns, unless a frame was drawn a moment ago.
    pub fn draw(&self, line: String) {
        self.0.set_message(line);
    }

    /// Returns the number of available columns.
    pub fn width(&self) -> usize {
        usize::from(size().0)
    }
}

impl Drop for Bar {
    fn drop(&mut self) {
        self.0.finish_and_clear();
        *shown() = None;
    }
}

/// Returns true if a bar is shown.
pub(super) fn is_shown() -> bool {
    shown().is_some()
}

/// Calls `write` while no bar is drawn.
pub(super) fn hidden_while(write: impl FnOnce()) {
    // The lock is released first: other threads can check for a bar during the drawing.
    let bar = shown().clone();
    match bar {
        Some(bar) => bar.suspend(write),
        None => write(),
    }
}

/// Draws `done` of `of` as a bar of `columns` columns; an empty one if `of` is 0.
pub fn gauge(done: u64, of: u64, columns: usize) -> String {
    let share = if of == 0 { 0.0 } else { done.min(of) as f64 / of as f64 };
    let full = (share * columns as f64) as usize;
    "\u{2588}".repeat(full) + &"\u{2591}".repeat(columns - full)
}

/// Draws whole frames. Frames are skipped while the terminal accepts nothing.
#[derive(Debug, Default)]
struct Screen {
    frame: Mutex<String>,
}

impl Screen {
    fn frame(&self) -> MutexGuard<'_, String> {
        // Any text may be drawn.
        self.frame.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn add(&self, text: &str) -> io::Result<()> {
        self.frame().push_str(text);
        Ok(())
    }

    /// Moves the cursor by `count` in the direction of an ANSI letter.
    fn go(&self, count: usize, direction: char) -> io::Result<()> {
        if count == 0 { Ok(()) } else { self.add(&format!("\x1b[{count}{direction}")) }
    }
}

impl TermLike for Screen {
    fn width(&self) -> u16 {
        size().0
    }

    fn height(&self) -> u16 {
        size().1
    }

    fn move_cursor_up(&self, n: usize) -> io::Result<()> {
        self.go(n, 'A')
    }

    fn move_cursor_down(&self, n: usize) -> io::Result<()> {
        self.go(n, 'B')
    }

    fn move_cursor_right(&self, n: usize) -> io::Result<()> {
        self.go(n, 'C')
    }

    fn move_cursor_left(&self, n: usize) -> io::Result<()> {
        self.go(n, 'D')
    }

    fn write_line(&self, text: &str) -> io::Result<()> {
        self.add(text)?;
        self.add("\n")
    }

    fn write_str(&self, text: &str) -> io::Result<()> {
        self.add(text)
    }

    fn clear_line(&self) -> io::Result<()> {
        self.add("\r\x1b[2K")
    }

    fn flush(&self) -> io::Result<()> {
        let frame = mem::take(&mut *self.frame());
        STDERR.draw(frame.as_bytes());
        Ok(())
    }
}

/// Returns the columns of the terminal that lines are shown on; 80 without a terminal.
pub fn columns() -> usize {
    size().0.into()
}

/// Returns the columns and rows of the terminal.
fn size() -> (u16, u16) {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes at most one `winsize`, and fails without a terminal.
    let status = unsafe { libc::ioctl(libc::STDERR_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    match status {
        0 if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col, size.ws_row),
        _ => SIZE,
    }
}

#[cfg(test)]
mod tests {
    use super::gauge;

    #[test]
    fn a_gauge_is_as_full_as_the_work_is_done() {
        let count = |done, of| gauge(done, of, 10).chars().filter(|c| *c == '\u{2588}').count();
        assert_eq!([count(0, 4), count(1, 4), count(4, 4), count(9, 4), count(3, 0)], [0, 2, 10, 10, 0]);
        assert_eq!(gauge(1, 3, 10).chars().count(), 10);
    }
}
