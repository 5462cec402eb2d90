//! The terminal while the view has it, and the signals that concern it. However the program ends, the terminal is
//! restored.

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

/// The handled signals: they end, stop or continue the program, or report a new size of the terminal.
const SIGNALS: [i32; 7] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGCONT, SIGWINCH];

/// Pause after input that contains no keys.
const PAUSE: Duration = Duration::from_millis(20);

/// Set while the terminal is in raw mode and shows its alternate screen.
static IS_TAKEN: AtomicBool = AtomicBool::new(false);

/// Held while something is drawn: other threads that panic must not restore the terminal in the middle of it.
static DRAWING: Mutex<()> = Mutex::new(());

/// The terminal, taken from the shell. Dropping it restores the terminal.
pub(super) struct Screen {
    terminal: DefaultTerminal,
    signals: Signals,
    /// Signals that have arrived but are not handled yet.
    pending: Vec<i32>,
    /// Keys that have arrived but are not handled yet.
    keys: VecDeque<KeyEvent>,
}

/// How a [`Screen::wait`] ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    Key(KeyEvent),
    /// The terminal's size has changed, or another program has used the terminal.
    Redraw,
    /// This signal ends the program.
    End(i32),
    /// The time is over.
    Nothing,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    ///
    /// If the terminal refuses.
    pub(super) fn take() -> io::Result<Screen> {
        // A signal that was ignored when the program started stays ignored, as under nohup.
        let is_handled = |signal: &i32| matches!(*signal, SIGCONT | SIGWINCH) || !is_ignored(*signal);
        let signals = Signals::new(SIGNALS.iter().filter(|signal| is_handled(signal)))?;
        let (earlier, owner) = (panic::take_hook(), thread::current().id());
        panic::set_hook(Box::new(move |panic| {
            // Restores the shell's screen, on which the message is then printed. The owner may hold the lock itself.
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

    /// Draws a frame; only cells that have changed are sent. Does nothing after a panic has restored the terminal.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut Frame<'_>)) -> io::Result<()> {
        let _drawing = hold();
        if IS_TAKEN.load(Ordering::Acquire) {
            self.terminal.draw(draw)?;
        }
        Ok(())
    }

    /// Lets the next frame draw every cell. [`Terminal::clear`] would ask the terminal for its cursor, and wait.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        let area = self.terminal.size()?.into();
        self.terminal.resize(area)
    }

    /// Waits for a key or a signal, for at most `patience`.
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

    /// Waits for keys. A closed terminal counts as the signal SIGHUP.
    fn read_keys(&mut self, patience: Duration) -> io::Result<()> {
        let stdin = io::stdin();
        let mut polled = [PollFd::new(&stdin, PollFlags::IN)];
        let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
        match poll(&mut polled, Some(&patience)) {
            Ok(0) | Err(Errno::INTR) => return Ok(()),
            Ok(_) => {}
            Err(error) => return Err(error.into()),
        }
        // crossterm (0.29) would try to read for ever.
        if polled[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) {
            self.pending.push(SIGHUP);
            return Ok(());
        }
        while event::poll(Duration::ZERO)? {
            if let Event::Key(key) = event::read()? {
                self.keys.push_back(key);
            }
        }
        // Of a long paste, crossterm reads the rest with the next key.
        if self.keys.is_empty() {
            thread::sleep(PAUSE);
        }
        Ok(())
    }

    /// Restores the terminal and stops the program, as Ctrl-Z does; takes the terminal again when it continues.
    pub(super) fn suspend(&mut self) -> io::Result<()> {
        restore();
        emulate_default_handler(SIGTSTP)?;
        self.pending.extend(self.signals.pending());
        self.pending.retain(|signal| *signal != SIGCONT);
        self.enter()
    }

    /// Restores the terminal and ends the program as `signal` does by default.
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

/// Restores the terminal, if it is taken. Ignores errors: the terminal is then gone.
fn restore() {
    if IS_TAKEN.swap(false, Ordering::AcqRel) {
        let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
        let _ = disable_raw_mode();
    }
}
