//! Random delays that expose dependencies on timing in tests.

use crate::call::CallSite;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::time::Duration;

/// The same seed gives the same delays.
#[derive(Clone, Debug)]
pub(super) struct Delay {
    pub(super) seed: u64,
    pub(super) max: Duration,
}

impl Delay {
    pub(super) fn draw(&self, world_rank: usize, site: &CallSite, point: u64) -> Duration {
        let mut hasher = DefaultHasher::new();
        (self.seed, &site.group, world_rank, site.sequence, point).hash(&mut hasher);
        let fraction = (hasher.finish() >> 40) as f64 / (1u64 << 24) as f64;
        self.max.mul_f64(fraction)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::label::{Label, Phase};
    use crate::operation::Operation;

    #[test]
    fn delays_repeat_with_the_seed_and_stay_in_range() {
        let max = Duration::from_millis(3);
        let draw = |seed| {
            let delay = Delay { seed, max };
            let site = |sequence| CallSite {
                group: "world".into(),
                sequence,
                rank: 1,
                operation: Operation::Barrier,
                label: Label::new("block", Phase::Forward),
            };
            (0..64).map(|sequence| delay.draw(1, &site(sequence), 0)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
        assert!(draw(7).iter().all(|time| *time < max));
    }
}
