//! The terminal while it is drawn on: taken, given back in whatever way the program ends, and the signals that concern
//! it.

use std::io::{self, Stdout};
use std::panic;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::Duration;

use ratatui::Terminal;
use ratatui::backend::CrosstermBackend;
use ratatui::crossterm::cursor::Show;
use ratatui::crossterm::event::KeyEvent;
use ratatui::crossterm::execute;
use ratatui::crossterm::terminal::{
    Clear, ClearType, EnterAlternateScreen, LeaveAlternateScreen, disable_raw_mode, enable_raw_mode,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use signal_hook::SigId;
use signal_hook::consts::{SIGCONT, SIGHUP, SIGINT, SIGQUIT, SIGTERM, SIGTSTP, SIGWINCH};
use signal_hook::{flag, low_level};

use kiln_process::is_ignored;

use super::input::Input;

/// Signals that end the program.
const ENDS: [i32; 4] = [SIGHUP, SIGINT, SIGQUIT, SIGTERM];

/// How long the rest of a key may take that begins with an escape character; else it is the key Esc.
const REST_OF_KEY: Duration = Duration::from_millis(50);

/// The terminal, taken from the shell. Dropping it gives the terminal back.
pub(super) struct Screen {
    terminal: Terminal<CrosstermBackend<Stdout>>,
    taken: Arc<Taken>,
    signals: Signals,
    input: Input,
}

/// Whether the terminal is taken. A panic of any thread gives it back, but not in the middle of a drawing.
#[derive(Default)]
struct Taken {
    is_taken: AtomicBool,
    drawing: Mutex<()>,
}

impl Taken {
    /// Keeps panics of other threads from giving the terminal back. `None` if that has happened.
    fn hold(&self) -> Option<MutexGuard<'_, ()>> {
        let guard = self.drawing.lock().unwrap_or_else(PoisonError::into_inner);
        self.is_taken.load(Ordering::Acquire).then_some(guard)
    }

    fn give_back(&self) {
        if self.is_taken.swap(false, Ordering::AcqRel) {
            give_back();
        }
    }
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
        let taken = Arc::new(Taken::default());
        taken.is_taken.store(true, Ordering::Release);
        let (of_panics, earlier, owner) = (Arc::clone(&taken), panic::take_hook(), thread::current().id());
        panic::set_hook(Box::new(move |panic| {
            // The message belongs on the shell's screen. The thread that draws may be in the middle of that.
            let guard = (thread::current().id() != owner).then(|| of_panics.hold());
            of_panics.give_back();
            drop(guard);
            earlier(panic);
        }));
        let terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
        let mut screen = Screen { terminal, taken, signals, input: Input::default() };
        screen.enter()?;
        Ok(screen)
    }

    /// Draws. Cells that have not changed are not sent.
    pub(super) fn draw(&mut self, draw: impl FnOnce(&mut ratatui::Frame<'_>)) -> io::Result<()> {
        let taken = Arc::clone(&self.taken);
        if let Some(_guard) = taken.hold() {
            self.terminal.draw(draw)?;
        }
        Ok(())
    }

    /// Draws every cell the next time. [`Terminal::clear`] would ask the terminal where its cursor is, and wait.
    pub(super) fn clear(&mut self) -> io::Result<()> {
        let taken = Arc::clone(&self.taken);
        if let Some(_guard) = taken.hold() {
            execute!(io::stdout(), Clear(ClearType::All))?;
            self.terminal = Terminal::new(CrosstermBackend::new(io::stdout()))?;
            self.terminal.hide_cursor()?;
        }
        Ok(())
    }

    /// Waits for `patience` at most.
    pub(super) fn wait(&mut self, patience: Duration) -> io::Result<Wake> {
        if let Some(wake) = self.signals.next() {
            return Ok(wake);
        }
        if let Some(key) = self.input.next(false) {
            return Ok(Wake::Key(key));
        }
        let stdin = io::stdin();
        // The rest of a key comes at once.
        let patience = if self.input.is_waiting() { patience.min(REST_OF_KEY) } else { patience };
        let patience = Timespec::try_from(patience).map_err(io::Error::other)?;
        match poll(&mut [PollFd::new(&stdin, PollFlags::IN)], Some(&patience)) {
            Ok(0) => {
                let key = self.input.next(true).map(Wake::Key);
                return Ok(key.or_else(|| self.signals.next()).unwrap_or(Wake::Nothing));
            }
            Ok(_) => {}
            Err(Errno::INTR) => return Ok(self.signals.next().unwrap_or(Wake::Nothing)),
            Err(error) => return Err(error.into()),
        }
        let mut bytes = [0; 1024];
        match rustix::io::read(&stdin, &mut bytes) {
            Err(Errno::INTR | Errno::AGAIN) => Ok(Wake::Nothing),
            // Nobody will ever press a key again: the terminal is gone.
            Ok(0) | Err(_) => Ok(Wake::End(SIGHUP)),
            Ok(count) => {
                self.input.add(&bytes[..count]);
                Ok(self.input.next(false).map_or(Wake::Nothing, Wake::Key))
            }
        }
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
        let taken = Arc::clone(&self.taken);
        if let Some(_guard) = taken.hold() {
            enable_raw_mode()?;
            execute!(io::stdout(), EnterAlternateScreen)?;
            self.terminal.hide_cursor()?;
        }
        Ok(())
    }
}

impl Drop for Screen {
    fn drop(&mut self) {
        self.taken.give_back();
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
    is_resized: Arc<AtomicBool>,
    registered: Vec<SigId>,
}

impl Signals {
    fn hear() -> io::Result<Signals> {
        let mut signals = Signals {
            end: Arc::default(),
            is_to_stop: Arc::default(),
            has_continued: Arc::default(),
            is_resized: Arc::default(),
            registered: Vec::new(),
        };
        // What whoever started the program had ignored stays ignored, as under nohup.
        for signal in ENDS.into_iter().filter(|signal| !is_ignored(*signal)) {
            let end = Arc::clone(&signals.end);
            signals.registered.push(flag::register_usize(signal, end, signal.unsigned_abs() as usize)?);
        }
        let others = [
            (SIGTSTP, &signals.is_to_stop),
            (SIGCONT, &signals.has_continued),
            (SIGWINCH, &signals.is_resized),
        ];
        for (signal, flag) in
            others.into_iter().filter(|(signal, _)| *signal != SIGTSTP || !is_ignored(*signal))
        {
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
        if self.has_continued.swap(false, Ordering::AcqRel) {
            return Some(Wake::Continued);
        }
        self.is_resized.swap(false, Ordering::AcqRel).then_some(Wake::Resized)
    }
}

impl Drop for Signals {
    fn drop(&mut self) {
        for id in self.registered.drain(..) {
            low_level::unregister(id);
        }
    }
}
