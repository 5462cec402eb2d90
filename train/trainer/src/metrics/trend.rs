//! Extrapolation from the last steps: the trend of the loss, and the remaining time.

use std::collections::VecDeque;
use std::time::Duration;

/// Maximum number of steps in each of the two compared means.
const WINDOW: usize = 50;

const FEWEST: usize = 8;

/// Number of standard errors below which a difference of means is noise.
const ERRORS: f64 = 2.0;

/// The trend of the loss: compares the mean over the last steps with the mean over the steps before them.
#[derive(Debug, Default)]
pub(super) struct Trend {
    losses: VecDeque<f64>,
}

impl Trend {
    pub(super) fn add(&mut self, loss: f64) {
        if loss.is_finite() {
            self.losses.push_back(loss);
        }
        if self.losses.len() > 2 * WINDOW {
            self.losses.pop_front();
        }
    }

    /// Returns an arrow down or up if the means differ by more than noise, else right; a blank after too few steps.
    pub(super) fn arrow(&self) -> char {
        let half = self.losses.len() / 2;
        if 2 * half < FEWEST {
            return ' ';
        }
        let (before, before_error) = mean(self.losses.iter().take(half));
        let (last, last_error) = mean(self.losses.iter().skip(self.losses.len() - half));
        let noise = ERRORS * (before_error + last_error).sqrt();
        match last - before {
            difference if difference < -noise => '\u{2193}',
            difference if difference > noise => '\u{2191}',
            _ => '\u{2192}',
        }
    }
}

/// Returns the mean of at least two values, and the square of its standard error.
fn mean<'a>(values: impl ExactSizeIterator<Item = &'a f64> + Clone) -> (f64, f64) {
    let count = values.len() as f64;
    let mean = values.clone().sum::<f64>() / count;
    let squares: f64 = values.map(|value| (value - mean).powi(2)).sum();
    (mean, squares / (count - 1.0) / count)
}

const NEWEST: f64 = 0.1;

/// Estimates the remaining time from the mean duration of recent steps, and the average time between steps.
#[derive(Debug, Default)]
pub(super) struct Remaining {
    first: Option<Duration>,
    steps: u64,
    in_steps: f64,
    mean: f64,
}

impl Remaining {
    /// Records a step that ended at `now`, on a clock that all calls share; returns the time for `left` more steps.
    pub(super) fn after(&mut self, now: Duration, step_s: f64, left: u64) -> Duration {
        let between = match self.first {
            None => {
                (self.first, self.mean) = (Some(now), step_s);
                0.0
            }
            Some(first) => {
                self.steps += 1;
                self.in_steps += step_s;
                let newest = if self.steps == 1 { 1.0 } else { NEWEST };
                self.mean += newest * (step_s - self.mean);
                let passed = now.saturating_sub(first).as_secs_f64();
                (passed - self.in_steps).max(0.0) / self.steps as f64
            }
        };
        Duration::try_from_secs_f64((self.mean + between) * left as f64).unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn arrow_of(losses: impl Iterator<Item = f64>) -> char {
        let mut trend = Trend::default();
        losses.for_each(|loss| trend.add(loss));
        trend.arrow()
    }

    #[test]
    fn a_trend_is_more_than_noise() {
        let noise = |step: u32| f64::from(step * 7919 % 100) / 100.0;
        let along = |slope: f64| arrow_of((0..200).map(|step| slope * f64::from(step) + noise(step)));
        assert_eq!([along(-0.01), along(0.0), along(0.01)], ['\u{2193}', '\u{2192}', '\u{2191}']);
        assert_eq!(arrow_of((0..7).map(f64::from)), ' ', "too few steps");
        assert_eq!(arrow_of((0..8).map(|_| 1.0)), '\u{2192}');
        assert_eq!(arrow_of((0..20).map(|_| f64::NAN)), ' ');
    }

    #[test]
    fn what_is_left_takes_as_long_as_the_last_steps_and_what_comes_between() {
        let mut remaining = Remaining::default();
        let mut after =
            |now, step_s, left| remaining.after(Duration::from_secs(now), step_s, left).as_secs_f64();
        assert_eq!(after(10, 10.0, 9), 90.0);
        assert_eq!(after(12, 2.0, 8), 16.0);
        assert_eq!(after(16, 2.0, 7), 21.0);
        assert_eq!(after(16, 2.0, 0), 0.0);
        assert_eq!(remaining.after(Duration::ZERO, f64::INFINITY, 1), Duration::ZERO);
    }
}
