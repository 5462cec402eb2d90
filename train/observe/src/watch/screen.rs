//! The terminal while it is drawn on: taken, given back in whatever way the program ends, and the signals that concern
//! it.

use std::io::{self, Stdout};
use std::panic;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::{self, Event, KeyEvent};
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use signal_hook::SigId;
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP};
use signal_hook::{flag, low_level};

use kiln_process::is_ignored;

/// Signals that end the program.
const ENDS: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// The terminal, taken from the shell. Dropping it gives the terminal back.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    /// Whether the terminal is taken; a panic gives it back.
    is_taken: Arc<AtomicBool>,
    signals: Signals,
}

/// Why the program is woken.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Wake {
    /// A key.
    Key(KeyEvent),
    /// The size has changed.
    Resized,
    /// A signal asks the program to stop until it is told to go on.
    Suspend,
    /// It goes on after it was stopped: others may have changed the terminal.
    Continued,
    /// This signal ends the program.
    End(i32),
    /// Nothing has happened for some time.
    Nothing,
}

impl Screen {
    /// Takes the terminal.
    ///
    /// # Errors
    ///
    /// If the terminal refuses.
    pub(super) fn take() -> io::Result<Screen> {
        let signals = Signals::hear()?;
        let is_taken = Arc::new(AtomicBool::new(true));
        let (taken, earlier) = (Arc::clone(&is_taken), panic::take_hook());
        panic::set_hook(Box::new(move |panic| {
            // The message belongs on the shell's screen.
            if taken.swap(false, Ordering::AcqRel) {
                give_back();
            }
            earlier(panic);
        }));
        let terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        let mut screen = Screen { terminal, is_taken, signals };
        screen.enter()?;
        Ok(screen)
    }

    /// Draws. Cells that have not changed are not sent.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut ratatui::Frame<'_>)) -> io::Result<()> {
        self.terminal.draw(draw)?;
        Ok(())
    }

    /// Draws every cell the next time.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        self.terminal.clear()
    }

    /// Waits for `patience` at most.
    pub(super) fn wait(&mut self, patience: Duration) -> io::Result<Wake> {
        if let Some(wake) = self.signals.next() {
            return Ok(wake);
        }
        if !event::poll(patience)? {
            return Ok(self.signals.next().unwrap_or(Wake::Nothing));
        }
        Ok(match event::read()? {
            Event::Key(key) => Wake::Key(key),
            Event::Resize(..) => Wake::Resized,
            _ => Wake::Nothing,
        })
    }

    /// Gives the terminal back and stops, as Ctrl-Z does; takes it again when the program goes on.
    pub(super) fn suspend(&mut self) -> io::Result<()> {
        give_back();
        // Stops this process.
        low_level::emulate_default_handler(SIGTSTP)?;
        self.signals.has_continued.store(false, Ordering::Release);
        self.enter()?;
        self.clear()
    }

    /// Takes the terminal again after somebody else may have had it.
    pub(super) fn take_again(&mut self) -> io::Result<()> {
        give_back();
        self.enter()?;
        self.clear()
    }

    /// Gives the terminal back and ends the program as `signal` does by default.
    pub(super) fn end_by(self, signal: i32) -> io::Result<()> {
        drop(self);
        low_level::emulate_default_handler(signal)
    }

    fn enter(&mut self) -> io::Result<()> {
        enable_raw_mode()?;
        execute!(io::stdout(), EnterAlternateScreen)?;
        self.terminal.hide_cursor()
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        if self.is_taken.swap(false, Ordering::AcqRel) {
            give_back();
        }
    }
}

/// Gives the terminal back. If it is gone, there is nothing to give.
fn give_back() {
    let _ = execute!(io::stdout(), LeaveAlternateScreen, Show);
    let _ = disable_raw_mode();
}

/// Signals that have come.
struct Signals {
    /// The last one that ends the program; 0 for none.
    end: Arc<AtomicUsize>,
    is_to_stop: Arc<AtomicBool>,
    has_continued: Arc<AtomicBool>,
    registered: Vec<SigId>,
}

impl Signals {
    fn hear() -> io::Result<Signals> {
        let mut signals = Signals {
            end: Arc::default(),
            is_to_stop: Arc::default(),
            has_continued: Arc::default(),
            registered: Vec::new(),
        };
        // What whoever started the program had ignored stays ignored, as under nohup.
        for signal in ENDS.into_iter().filter(|signal| !is_ignored(*signal)) {
            let end = Arc::clone(&signals.end);
            signals.registered.push(flag::register_usize(signal, end, signal.unsigned_abs() as usize)?);
        }
        let others = [(SIGTSTP, &signals.is_to_stop), (SIGCONT, &signals.has_continued)];
        for (signal, flag) in others.into_iter().filter(|(signal, _)| !is_ignored(*signal)) {
            signals.registered.push(flag::register(signal, Arc::clone(flag))?);
        }
        Ok(signals)
    }

    fn next(&self) -> Option<Wake> {
        match self.end.swap(0, Ordering::AcqRel) {
            0 => {}
            signal => return Some(Wake::End(signal as i32)),
        }
        if self.is_to_stop.swap(false, Ordering::AcqRel) {
            return Some(Wake::Suspend);
        }
        self.has_continued.swap(false, Ordering::AcqRel).then_some(Wake::Continued)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
