//! `kiln watch`: runs on a full-screen terminal.
//!
//! Background threads read the runs and send updates. The drawing thread never waits for a run or its files.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::{Duration, Instant};

mod axis;
mod curves;
mod draw;
mod feed;
mod format;
mod gauges;
mod keys;
mod log_and_samples;
mod logs;
mod ranks;
mod runs;
mod screen;
mod state;
#[cfg(test)]
mod tests;
mod theme;

pub use theme::Theme;

use crate::status::LookAt;
use feed::Update;
use keys::{Action, on_key};
use screen::{Screen, Wake};
use state::Watch;

/// The screen is redrawn at least this often, to keep the displayed age of its data current.
const DRAW_EVERY: Duration = Duration::from_secs(1);

/// Longest delay of updates and signals. Keys are not delayed.
const PATIENCE: Duration = Duration::from_millis(200);

/// Options of [`run`].
#[derive(Clone)]
pub struct WatchOptions {
    /// Run folders, or folders of run folders. New runs appear automatically.
    pub runs: Vec<PathBuf>,
    /// Reads the state of a run.
    pub look_at: LookAt,
    /// Colours and characters of the terminal.
    pub theme: Theme,
}

impl WatchOptions {
    /// Creates options with the theme of the terminal, which is read from the environment.
    pub fn new(runs: Vec<PathBuf>, look_at: LookAt) -> Self {
        WatchOptions { runs, look_at, theme: Theme::from_environment(|name| std::env::var_os(name)) }
    }
}

/// An error of [`run`].
#[derive(Debug, thiserror::Error)]
pub enum WatchError {
    /// No run was named.
    #[error(
        "no run is named: use kiln watch RUN, where RUN is a run folder (--out), or a folder of run folders"
    )]
    NoRuns,
    /// There is no terminal to draw on.
    #[error(
        "kiln watch needs a terminal, and {stream} is not one; use kiln status RUN for text, kiln status RUN \
         --follow for continuous text, or kiln watch RUN --http for a page in a browser"
    )]
    NoTerminal {
        /// Standard input or output.
        stream: &'static str,
    },
    /// An operation on the terminal failed.
    #[error("cannot draw on the terminal: {0}")]
    Terminal(#[from] io::Error),
    /// A background thread panicked.
    #[error("a background thread panicked: this is a bug in kiln")]
    Panicked,
}

/// Shows the runs until the user quits. A signal ends the program after the terminal has been restored.
///
/// # Errors
///
/// If no run is named, standard input or output is not a terminal, or drawing fails.
pub fn run(options: WatchOptions) -> Result<(), WatchError> {
    if options.runs.is_empty() {
        return Err(WatchError::NoRuns);
    }
    if !io::stdin().is_terminal() {
        return Err(WatchError::NoTerminal { stream: "standard input" });
    }
    if !io::stdout().is_terminal() {
        return Err(WatchError::NoTerminal { stream: "standard output" });
    }
    // Before any thread starts, so that a panic of any thread restores the terminal.
    let mut screen = Screen::take()?;
    let updates = feed::start(options.runs, options.look_at)?;
    let mut watch = Watch::new(options.theme, Instant::now());
    let mut is_stale = true;
    loop {
        for update in updates.try_iter() {
            if matches!(update, Update::Panicked) {
                return Err(WatchError::Panicked);
            }
            watch.apply(update);
            is_stale = true;
        }
        if is_stale || watch.now.elapsed() >= DRAW_EVERY {
            watch.now = Instant::now();
            screen.draw(|frame| draw::draw(&mut watch, frame.area(), frame.buffer_mut()))?;
            is_stale = false;
        }
        match screen.wait(PATIENCE)? {
            Wake::Nothing => {}
            Wake::Redraw => is_stale = true,
            Wake::End(signal) => return Ok(screen.end_by(signal)?),
            Wake::Key(key) => {
                let action = on_key(&mut watch, key);
                match action {
                    Some(Action::Quit) => return Ok(()),
                    Some(Action::DrawAll) => screen.clear()?,
                    Some(Action::Suspend) => screen.suspend()?,
                    Some(Action::Draw) | None => {}
                }
                is_stale |= action.is_some();
            }
        }
    }
}
