//! Detects periods in which this process was not running.

use crate::flight::Stall;
use std::time::{Duration, Instant};

/// Minimum oversleep that counts as a stall. On a busy machine, all sleeps are slightly too long.
const LEAST: Duration = Duration::from_secs(3);

/// Observes a thread's sleeps of fixed length. A much longer sleep means that the process was stopped or frozen.
pub(super) struct StallDetector {
    length: Duration,
    rests_since: Option<Instant>,
    stalled: Option<(Instant, Duration)>,
}

impl StallDetector {
    pub(super) fn new(length: Duration) -> StallDetector {
        StallDetector { length, rests_since: None, stalled: None }
    }

    pub(super) fn rest(&mut self, now: Instant) {
        self.rests_since = Some(now);
    }

    pub(super) fn wake(&mut self, now: Instant) {
        self.stalled = self.at(now);
        self.rests_since = None;
    }

    /// Returns the last stall. May be called before the sleeping thread wakes up.
    pub(super) fn stall(&self, now: Instant) -> Option<Stall> {
        let (end, length) = self.at(now)?;
        let ago = now.saturating_duration_since(end).as_secs_f64();
        Some(Stall { seconds: length.as_secs_f64(), ago })
    }

    fn at(&self, now: Instant) -> Option<(Instant, Duration)> {
        let rested = self.rests_since.map(|since| now.saturating_duration_since(since));
        let surplus = rested.map(|rested| rested.saturating_sub(self.length));
        surplus.filter(|surplus| *surplus >= LEAST).map(|surplus| (now, surplus)).or(self.stalled)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_sleep_far_too_long_is_a_stall() {
        let start = Instant::now();
        let at = |seconds: u64| start + Duration::from_secs(seconds);
        let mut detector = StallDetector::new(Duration::from_secs(1));
        detector.rest(at(0));
        assert_eq!(detector.stall(at(2)), None);
        assert_eq!(detector.stall(at(61)), Some(Stall { seconds: 60.0, ago: 0.0 }));
        detector.wake(at(61));
        assert_eq!(detector.stall(at(64)), Some(Stall { seconds: 60.0, ago: 3.0 }));
        detector.rest(at(64));
        detector.wake(at(65));
        detector.rest(at(65));
        assert_eq!(detector.stall(at(66)), Some(Stall { seconds: 60.0, ago: 5.0 }));
        assert_eq!(detector.stall(at(76)), Some(Stall { seconds: 10.0, ago: 0.0 }));
    }
}
