//! Random delays, with which tests find out whether anything depends on timing.

use crate::call::CallSite;
use std::time::Duration;

/// Delays drawn from a seed. The same seed gives the same delays.
#[derive(Clone, Debug)]
pub(super) struct Delay {
    pub(super) seed: u64,
    pub(super) max: Duration,
}

impl Delay {
    /// Draws the delay of a rank at one `point` of the operation at `site`: between zero and `max`.
    pub(super) fn draw(&self, world_rank: usize, site: &CallSite, point: u64) -> Duration {
        let mut hash = mix(self.seed);
        for byte in site.group.bytes() {
            hash = mix(hash ^ u64::from(byte));
        }
        for part in [world_rank as u64, site.sequence, point] {
            hash = mix(hash ^ part);
        }
        // The upper 24 bits, as a fraction of their range.
        let fraction = (hash >> 40) as f64 / (1u64 << 24) as f64;
        self.max.mul_f64(fraction)
    }
}

/// One step of SplitMix64 (Steele, Lea and Flood, "Fast splittable pseudorandom number
/// generators", 2014).
fn mix(state: u64) -> u64 {
    let state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let state = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let state = (state ^ (state >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    state ^ (state >> 31)
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
