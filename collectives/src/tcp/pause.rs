//! Pauses between the attempts of a rank, which end early if the process is asked to stop.

use super::options::{JoinError, JoinOptions};
use std::thread;
use std::time::{Duration, Instant};

/// Pause between attempts, at first and at most.
pub(super) const PAUSE: [Duration; 2] = [Duration::from_millis(20), Duration::from_millis(500)];

/// Between two looks at whether this process was asked to stop.
pub(super) const LOOK_EVERY: Duration = Duration::from_millis(50);

/// Waits between two attempts, unless this process is asked to stop.
pub(super) fn pause_for(time: Duration, options: &JoinOptions) -> Result<(), JoinError> {
    let until = Instant::now() + time;
    loop {
        if options.is_stopped() {
            return Err(JoinError::Stopped { by: options.rank });
        }
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(());
        }
        thread::sleep(left.min(LOOK_EVERY));
    }
}
