//! `kiln watch`: runs on a whole terminal.
//!
//! Threads of their own look at the runs (`feed.rs`) and leave what they find in a `Subject` each (`subject.rs`).
//! The thread that has the terminal (`screen.rs`) takes that over into the state of the screen (`state.rs`), changes
//! the state with each key (`keys.rs`), and draws it (`draw/`): it never waits for a run or its files.

use std::io::{self, IsTerminal};
use std::path::PathBuf;
use std::time::{Duration, Instant};

mod chart;
mod cpu;
mod curve;
mod draw;
mod error;
mod feed;
mod gpu;
mod input;
mod keys;
mod logs;
mod rows;
mod screen;
mod state;
mod subject;
mod summary;
#[cfg(test)]
mod tests;
mod text;
mod theme;
mod ticks;

pub use error::WatchError;
pub use theme::Theme;

use crate::status::LookAt;
use feed::Feed;
use keys::{Action, on_key};
use screen::{Screen, Wake};
use state::Watch;

/// The screen is drawn at least this often, for what is told to be so old.
const DRAW_EVERY: Duration = Duration::from_secs(1);

/// How long news of runs and signals may wait. Keys do not wait.
const PATIENCE: Duration = Duration::from_millis(100);

/// What to watch.
#[derive(Clone)]
pub struct WatchOptions {
    /// Run folders, or folders of run folders. Those that begin later are shown when they are there.
    pub runs: Vec<PathBuf>,
    /// Looks at a run.
    pub look_at: LookAt,
    /// What the terminal can show.
    pub theme: Theme,
}

impl WatchOptions {
    /// The runs on a terminal that can show what the environment says.
    pub fn new(runs: Vec<PathBuf>, look_at: LookAt) -> Self {
        WatchOptions { runs, look_at, theme: Theme::of_environment(|name| std::env::var_os(name)) }
    }
}

/// Shows the runs until the user leaves. A signal that ends programs ends this one in the same way, after the terminal
/// has been given back.
///
/// # Errors
///
/// If no run is named, if standard input or output is no terminal, or if the terminal refuses.
pub fn run(options: WatchOptions) -> Result<(), WatchError> {
    if options.runs.is_empty() {
        return Err(WatchError::NoRuns);
    }
    for (is_terminal, what) in
        [(io::stdin().is_terminal(), "standard input"), (io::stdout().is_terminal(), "standard output")]
    {
        if !is_terminal {
            return Err(WatchError::NoTerminal { what });
        }
    }
    // First, so that a panic of any thread finds the terminal taken and gives it back.
    let mut screen = Screen::take()?;
    let feed = Feed::start(options.runs, options.look_at)?;
    let mut watch = Watch::new(options.theme, Instant::now());
    loop {
        let told = feed.told();
        watch.update(feed.subjects(), feed.notes(), Instant::now());
        screen.draw(|frame| draw::draw(&mut watch, frame.area(), frame.buffer_mut()))?;
        let drawn = Instant::now();
        while feed.told() == told && drawn.elapsed() < DRAW_EVERY {
            if feed.has_panicked() {
                drop(screen);
                return Err(WatchError::Panicked);
            }
            let action = match screen.wait(PATIENCE)? {
                Wake::Nothing => continue,
                Wake::Key(key) => on_key(&mut watch, key),
                Wake::Resized => Some(Action::Draw),
                Wake::Suspend => Some(Action::Suspend),
                Wake::Continued => {
                    screen.take_again()?;
                    Some(Action::Draw)
                }
                Wake::End(signal) => return Ok(screen.end_by(signal)?),
            };
            match action {
                None => continue,
                Some(Action::Draw) => {}
                Some(Action::DrawAll) => screen.clear()?,
                Some(Action::Suspend) => screen.suspend()?,
                Some(Action::Quit) => return Ok(()),
            }
            break;
        }
    }
}
