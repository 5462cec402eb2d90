//! The terminal in raw mode, and signals. The terminal is restored however the program ends.

use std::collections::VecDeque;
use std::io;
use std::panic;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use kiln_sys::is_ignored;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyEvent};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use ratatui::{DefaultTerminal, Frame, Terminal};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::iterator::Signals;
use signal_hook::low_level::emulate_default_handler;

const SIGNALS: [i32; 7] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGCONT, SIGWINCH];

const PAUSE: Duration = Duration::from_millis(20);

/// Set while the terminal is in raw mode and shows its alternate screen.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// Locked while drawing, so that a panic in another thread does not restore the terminal in the middle.
static DRAWING: Mutex<()> = Mutex::new(());

/// The terminal. Dropping it restores the shell's screen.
pub(super) struct Screen {
    terminal: DefaultTerminal,
    signals: Signals,
    pending: Vec<i32>,
    keys: VecDeque<KeyEvent>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    Key(KeyEvent),
    /// The terminal has a new size, or another program has used it.
    Redraw,
    End(i32),
    Nothing,
}

impl Screen {
    pub(super) fn take() -> io::Result<Screen> {
        // A signal that was ignored at program start stays ignored, as under nohup.
        let is_handled = |signal: &i32| matches!(*signal, SIGCONT | SIGWINCH) || !is_ignored(*signal);
        let signals = Signals::new(SIGNALS.iter().filter(|signal| is_handled(signal)))?;
        let (earlier, owner) = (panic::take_hook(), thread::current().id());
        panic::set_hook(Box::new(move |panic| {
            // The message is printed on the shell's screen. The owner may already hold the lock.
            let drawing = (thread::current().id() != owner).then(hold);
            restore();
            drop(drawing);
            earlier(panic);
        }));
        let terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        let mut screen = Screen { terminal, signals, pending: Vec::new(), keys: VecDeque::new() };
        screen.enter()?;
        Ok(screen)
    }

    /// Draws a frame, sending only changed cells. Does nothing after a panic has restored the terminal.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let _drawing = hold();
        if IS_TAKEN.load(Ordering::Acquire) {
            self.terminal.draw(draw)?;
        }
        Ok(())
    }

    /// Makes the next frame draw every cell. [`Terminal::clear`] would wait for the terminal's cursor position.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        let area = self.terminal.size()?.into();
        self.terminal.resize(area)
    }

    pub(super) fn wait(&mut self, patience: Duration) -> io::Result<Wake> {
        self.pending.extend(self.signals.pending());
        if let Some(signal) = self.pending.pop() {
            match signal {
                SIGWINCH => {}
                SIGTSTP => self.suspend()?,
                SIGCONT => {
                    restore();
                    self.enter()?;
                }
                signal => return Ok(Wake::End(signal)),
            }
            return Ok(Wake::Redraw);
        }
        if self.keys.is_empty() {
            self.read_keys(patience)?;
        }
        Ok(self.keys.pop_front().map_or(Wake::Nothing, Wake::Key))
    }

    /// Waits for keys. A closed terminal counts as SIGHUP.
    fn read_keys(&mut self, patience: Duration) -> io::Result<()> {
        let stdin = io::stdin();
        let mut polled = [PollFd::new(&stdin, PollFlags::IN)];
        let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
        match poll(&mut polled, Some(&patience)) {
            Ok(0) | Err(Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        // crossterm 0.29 would loop forever.
        if polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            self.pending.push(SIGHUP);
            return Ok(());
        }
        while event::poll(Duration::ZERO)? {
            if let Event::Key(key) = event::read()? {
                self.keys.push_back(key);
            }
        }
        // crossterm returns the rest of a long paste with the next key.
        if self.keys.is_empty() {
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Restores the terminal and stops the program, like Ctrl-Z. Takes the terminal again when the program continues.
    pub(super) fn suspend(&mut self) -> io::Result<()> {
        restore();
        emulate_default_handler(SIGTSTP)?;
        self.pending.extend(self.signals.pending());
        self.pending.retain(|signal| *signal != SIGCONT);
        self.enter()
    }

    pub(super) fn end_by(self, signal: i32) -> io::Result<()> {
        drop(self);
        emulate_default_handler(signal)
    }

    fn enter(&mut self) -> io::Result<()> {
        let _drawing = hold();
        IS_TAKEN.store(true, Ordering::Release);
        enable_raw_mode()?;
        execute!(io::stdout(), EnterAlternateScreen)?;
        self.clear()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        restore();
    }
}

fn hold() -> MutexGuard<'static, ()> {
    DRAWING.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Restores the terminal if it is taken. Ignores errors, because the terminal is then gone.
fn restore() {
    if IS_TAKEN.swap(false, Ordering::AcqRel) {
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}
