//! Suspends deadlines while a rank is held for inspection.

use crate::sync::lock;
use std::collections::BTreeSet;
use std::sync::Mutex;
use std::time::{Duration, Instant};

/// The held ranks of the world, as known to one rank, and the total time of all holds, which extends every wait.
#[derive(Debug, Default)]
pub struct Holds(Mutex<State>);

#[derive(Debug, Default)]
struct State {
    held: BTreeSet<usize>,
    since: Option<Instant>,
    before: Duration,
}

impl Holds {
    pub(crate) fn set(&self, rank: usize, is_held: bool) {
        let mut state = lock(&self.0);
        if is_held {
            state.held.insert(rank);
            state.since.get_or_insert_with(Instant::now);
        } else {
            state.held.remove(&rank);
            if state.held.is_empty()
                && let Some(since) = state.since.take()
            {
                state.before += since.elapsed();
            }
        }
    }

    /// Returns the held world ranks.
    pub fn ranks(&self) -> Vec<usize> {
        lock(&self.0).held.iter().copied().collect()
    }

    /// Returns the total time of all holds so far.
    pub fn total(&self) -> Duration {
        let state = lock(&self.0);
        state.before + state.since.map_or(Duration::ZERO, |since| since.elapsed())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn holds_last_until_the_last_rank_is_released() {
        let holds = Holds::default();
        assert_eq!(holds.total(), Duration::ZERO);
        holds.set(1, true);
        holds.set(3, true);
        assert_eq!(holds.ranks(), [1, 3]);
        holds.set(1, false);
        let first = holds.total();
        assert!(holds.total() >= first);
        holds.set(3, false);
        let total = holds.total();
        assert!(total >= first);
        assert_eq!(holds.total(), total);
        holds.set(2, false);
        assert_eq!((holds.ranks(), holds.total()), (vec![], total));
    }
}
