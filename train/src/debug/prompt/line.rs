//! The lines of a prompt, on their way to all ranks that are held.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kiln_shard::{Engine, ShardError};

use super::debugger::Debugger;
use crate::debug::share::share;
use crate::error::Result;

/// How often a rank that waits for a line looks whether the others are still there.
const LOOK: Duration = Duration::from_millis(100);

/// How often ranks that are processes ask each other whether the run is to stop.
const ASK_EVERY: Duration = Duration::from_secs(2);

// Lines that nobody can type: they have a byte that no terminal sends.

/// The ranks ask each other whether the run is to stop.
const ASK: &str = "\0ask";

/// The run is to stop.
pub(super) const STOP: &str = "\0stop";

/// Nobody can reach the prompt.
pub(super) const UNREACHABLE: &str = "\0unreachable";

impl Debugger {
    /// The next line, which `reader` reads and all ranks that are held get. Collective unless `alone`.
    pub(super) fn read(&mut self, engine: &Engine, reader: usize, alone: bool) -> Result<String> {
        // Threads of one process are asked to stop together.
        let asks_others = !alone && engine.world().backend() != "local";
        loop {
            let line = match reader == self.rank {
                true => self.wait_for_line(engine, asks_others)?,
                false => String::new(),
            };
            let line = match alone {
                true => line,
                false => String::from_utf8_lossy(&share(engine, line.into_bytes(), reader)?).into_owned(),
            };
            if line != ASK {
                return Ok(line);
            }
            let asked = f64::from(u8::from(self.stop.load(Ordering::Relaxed)));
            if engine.sum_over_ranks("debugger", &[asked])?[0] > 0.0 {
                return Ok(STOP.to_owned());
            }
        }
    }

    /// The next line for this rank. With `asks_others`, [`ASK`] once in a while.
    fn wait_for_line(&self, engine: &Engine, asks_others: bool) -> Result<String> {
        if !self.desk.is_open() {
            tracing::warn!("a breakpoint holds nothing: this process has no socket for kiln attach");
            return Ok(UNREACHABLE.to_owned());
        }
        let begun = Instant::now();
        loop {
            if let Some(line) = self.desk.next(self.rank, LOOK) {
                return Ok(line);
            }
            if let Some(error) = engine.world().failure() {
                return Err(ShardError::from(error).into());
            }
            // Whoever asks for a stop wants the run to save and end, and not to wait for a prompt.
            if self.stop.load(Ordering::Relaxed) {
                return Ok(STOP.to_owned());
            }
            if asks_others && begun.elapsed() > ASK_EVERY {
                return Ok(ASK.to_owned());
            }
        }
    }
}
