//! Limits the rate of warnings about callers.

use crate::sync::lock;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// Minimum time between two logged warnings. Warnings in between are counted.
pub(super) const PERIOD: Duration = Duration::from_secs(10);

pub(super) struct Warnings {
    state: Mutex<State>,
    period: Duration,
    say: fn(&str),
}

#[derive(Default)]
struct State {
    said: Option<Instant>,
    unsaid: Option<(u64, String)>,
}

impl Warnings {
    pub(super) fn new() -> Warnings {
        Warnings { state: Mutex::default(), period: PERIOD, say: |text| tracing::warn!("{text}") }
    }

    pub(super) fn warn(&self, text: String) {
        let mut state = lock(&self.state);
        let count = state.unsaid.take().map_or(0, |(count, _)| count);
        if state.said.is_some_and(|said| said.elapsed() < self.period) {
            state.unsaid = Some((count + 1, text));
        } else {
            state.said = Some(Instant::now());
            (self.say)(&with_count(&text, count));
        }
    }

    pub(super) fn is_waiting(&self) -> bool {
        lock(&self.state).unsaid.is_some()
    }

    pub(super) fn catch_up(&self) {
        let mut state = lock(&self.state);
        if state.said.is_none_or(|said| said.elapsed() >= self.period) {
            self.say_rest(&mut state);
        }
    }

    fn say_rest(&self, state: &mut State) {
        if let Some((count, text)) = state.unsaid.take() {
            state.said = Some(Instant::now());
            (self.say)(&with_count(&text, count - 1));
        }
    }
}

impl Drop for Warnings {
    fn drop(&mut self) {
        let mut state = std::mem::take(&mut *lock(&self.state));
        self.say_rest(&mut state);
    }
}

fn with_count(text: &str, others: u64) -> String {
    match others {
        0 => text.to_owned(),
        _ => format!("{text} (and {others} more like this)"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::{AtomicU64, Ordering};

    #[test]
    fn a_thousand_warnings_become_two_with_a_count() {
        static SAID: Mutex<Vec<String>> = Mutex::new(Vec::new());
        let say = |text: &str| lock(&SAID).push(text.to_owned());
        let warnings = Warnings { state: Mutex::default(), period: Duration::MAX, say };
        (0..1000).for_each(|number| warnings.warn(format!("caller {number}")));
        assert!(warnings.is_waiting());
        warnings.catch_up();
        assert_eq!(*lock(&SAID), ["caller 0"]);
        drop(warnings);
        assert_eq!(*lock(&SAID), ["caller 0", "caller 999 (and 998 more like this)"]);
    }

    #[test]
    fn warnings_far_apart_are_all_logged() {
        static SAID: AtomicU64 = AtomicU64::new(0);
        let say = |_: &str| {
            SAID.fetch_add(1, Ordering::Relaxed);
        };
        let warnings = Warnings { state: Mutex::default(), period: Duration::ZERO, say };
        (0..3).for_each(|_| warnings.warn("a caller".into()));
        assert!(!warnings.is_waiting());
        drop(warnings);
        assert_eq!(SAID.load(Ordering::Relaxed), 3);
    }
}
