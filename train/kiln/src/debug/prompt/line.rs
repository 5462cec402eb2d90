//! Distribution of a prompt's lines to all held ranks.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kiln_shard::{Engine, ShardError};

use super::debugger::Debugger;
use crate::debug::share::share;
use crate::error::Result;

/// Interval at which a rank that waits for a line checks that the others are still there.
const LOOK: Duration = Duration::from_millis(100);

/// Interval at which ranks in different processes agree on whether the run should stop.
const ASK_EVERY: Duration = Duration::from_secs(2);

// Lines that cannot be typed: they contain a byte that no terminal sends.

/// The ranks agree on whether the run should stop.
const ASK: &str = "\0ask";

/// The run should stop.
pub(super) const STOP: &str = "\0stop";

/// No prompt can connect.
pub(super) const UNREACHABLE: &str = "\0unreachable";

impl Debugger {
    /// Reads the next line on `reader` and returns it on all held ranks. Collective unless `alone`.
    pub(super) fn read(&mut self, engine: &Engine, reader: usize, alone: bool) -> Result<String> {
        // A stop request reaches the threads of one process together.
        let asks_others = !alone && !engine.world().is_one_process();
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

    /// Waits for the next line for this rank. With `asks_others`, returns [`ASK`] at regular intervals.
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
            // A stop request means that the run should save and end instead of waiting for a prompt.
            if self.stop.load(Ordering::Relaxed) {
                return Ok(STOP.to_owned());
            }
            if asks_others && begun.elapsed() > ASK_EVERY {
                return Ok(ASK.to_owned());
            }
        }
    }
}
