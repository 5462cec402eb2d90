//! The terminal on standard error as a progress bar draws on it, without ever waiting for it.

use std::io::{self, IsTerminal};
use std::mem;
use std::sync::{Mutex, MutexGuard, PoisonError};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle, TermLike};

use super::{STDERR, is_silent};

/// Columns and rows where the terminal does not tell.
const SIZE: (u16, u16) = (80, 24);

/// Frames of a progress bar per second, at most.
const FRAME_RATE: u8 = 20;

/// A progress bar of this length, in a style of indicatif's, on standard error, if somebody watches.
pub fn watched_bar(length: u64, style: &str) -> Option<ProgressBar> {
    let is_watched = !is_silent() && io::stdout().is_terminal() && io::stderr().is_terminal();
    is_watched.then(|| {
        let target = ProgressDrawTarget::term_like_with_hz(Box::new(Bar::default()), FRAME_RATE);
        let bar = ProgressBar::with_draw_target(Some(length), target);
        // Templates are constants that parse; the default style would do as well.
        let style = ProgressStyle::with_template(style);
        bar.with_style(style.unwrap_or_else(|_| ProgressStyle::default_bar()))
    })
}

/// Draws whole frames. Frames are left out while the terminal takes nothing.
#[derive(Debug, Default)]
struct Bar {
    frame: Mutex<String>,
}

impl Bar {
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

impl TermLike for Bar {
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

/// Columns of the terminal that lines are shown on; 80 where there is none.
pub fn columns() -> usize {
    size().0.into()
}

/// Columns and rows of the terminal.
fn size() -> (u16, u16) {
    let mut size = libc::winsize { ws_row: 0, ws_col: 0, ws_xpixel: 0, ws_ypixel: 0 };
    // SAFETY: the call writes at most one `winsize`, and fails where there is no terminal.
    let status = unsafe { libc::ioctl(libc::STDERR_FILENO, libc::TIOCGWINSZ, &raw mut size) };
    match status {
        0 if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col, size.ws_row),
        _ => SIZE,
    }
}
