//! The time from the start of a run until its first step is done, by stage.

use std::time::{Duration, Instant};

use kiln_sys::words::duration;

/// Measures the stages of starting a run.
#[derive(Clone, Debug)]
pub struct StartTimes {
    begun: Instant,
    stages: Vec<(&'static str, Duration)>,
}

const TOLD: Duration = Duration::from_millis(50);

impl Default for StartTimes {
    fn default() -> Self {
        StartTimes { begun: Instant::now(), stages: Vec::new() }
    }
}

impl StartTimes {
    pub(super) fn add(&mut self, what: &'static str, time: Duration) {
        self.stages.push((what, time));
    }

    pub(super) fn time<T>(&mut self, what: &'static str, work: impl FnOnce() -> T) -> T {
        let begun = Instant::now();
        let result = work();
        self.add(what, begun.elapsed());
        result
    }

    pub(super) fn elapsed(&self) -> Duration {
        self.begun.elapsed()
    }

    pub(super) fn until(&self, then: Instant) -> Duration {
        then.saturating_duration_since(self.begun)
    }

    pub(super) fn line(&self, done: Instant) -> String {
        line(self.until(done), &self.stages)
    }
}

fn line(all: Duration, stages: &[(&'static str, Duration)]) -> String {
    let known: Duration = stages.iter().map(|(_, time)| *time).sum();
    let other = [("other", all.saturating_sub(known))];
    let told = stages.iter().chain(&other).filter(|(_, time)| *time >= TOLD);
    let told: Vec<_> = told.map(|(what, time)| format!("{what} {}", duration(*time))).collect();
    let told = if told.len() < 2 { String::new() } else { format!(": {}", told.join(", ")) };
    format!("first step done {} after the start{told}", duration(all))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_that_take_time_are_told() {
        let ms = Duration::from_millis;
        let stages = [("join", ms(1250)), ("data", ms(40)), ("load", ms(3000)), ("first step", ms(500))];
        let told =
            "first step done 5.2 s after the start: join 1.2 s, load 3.0 s, first step 0.50 s, other 0.41 s";
        assert_eq!(line(ms(5200), &stages), told);
        assert_eq!(line(ms(60), &[("join", ms(20))]), "first step done 0.06 s after the start");
    }
}
