use super::mix::{mix, mix_pair};
use super::{DataError, Result};

/// Rounds of the Feistel network. Four suffice for large domains; a few samples need more.
const ROUNDS: u64 = 8;

/// Maps each position of an endless run to a sample, in constant memory.
///
/// Every epoch visits each sample once. If shuffled, an epoch's order depends only on the seed and the epoch's number.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SampleOrder {
    num_samples: u64,
    shuffle: bool,
    seed: u64,
}

impl SampleOrder {
    /// Creates an order over `num_samples` samples.
    ///
    /// # Errors
    ///
    /// If there are no samples.
    pub fn new(num_samples: u64, shuffle: bool, seed: u64) -> Result<Self> {
        if num_samples == 0 {
            return Err(DataError::NoSamples);
        }
        Ok(Self { num_samples, shuffle, seed })
    }

    /// Returns the number of samples in an epoch.
    pub fn num_samples(&self) -> u64 {
        self.num_samples
    }

    /// Returns the sample at a position, counted from the start of the first epoch.
    pub fn sample_at(&self, global_index: u64) -> u64 {
        let epoch = global_index / self.num_samples;
        let position = global_index % self.num_samples;
        if !self.shuffle {
            return position;
        }
        let key = mix_pair(self.seed, epoch);
        let half_bits = half_bits(self.num_samples);
        // Cycle walking: the network permutes a domain of up to four times `num_samples` values. Repeating it until the
        // value is a sample again gives a permutation of the samples.
        let mut sample = feistel(position, half_bits, key);
        while sample >= self.num_samples {
            sample = feistel(sample, half_bits, key);
        }
        sample
    }
}

fn half_bits(count: u64) -> u32 {
    let bits = u64::BITS - (count - 1).leading_zeros();
    bits.div_ceil(2).max(1)
}

/// Permutes the numbers below `4^half_bits` with a Feistel network.
fn feistel(value: u64, half_bits: u32, key: u64) -> u64 {
    let mask = (1 << half_bits) - 1;
    let (mut left, mut right) = (value >> half_bits, value & mask);
    for round in 0..ROUNDS {
        let mixed = mix(right ^ key.wrapping_add(round << 56)) & mask;
        (left, right) = (right, left ^ mixed);
    }
    (left << half_bits) | right
}

#[cfg(test)]
mod tests {
    use super::*;

    fn epoch(num_samples: u64, seed: u64, epoch: u64) -> Vec<u64> {
        let order = SampleOrder::new(num_samples, true, seed).unwrap();
        let start = epoch * num_samples;
        (start..start + num_samples).map(|index| order.sample_at(index)).collect()
    }

    #[test]
    fn every_epoch_visits_every_sample_once() {
        for num_samples in 1..=1000 {
            let mut samples = epoch(num_samples, num_samples ^ 5, num_samples % 3);
            samples.sort_unstable();
            assert!(samples.into_iter().eq(0..num_samples), "{num_samples}");
        }
    }

    #[test]
    fn without_shuffling_samples_come_in_order() {
        let order = SampleOrder::new(3, false, 9).unwrap();
        let samples: Vec<u64> = (0..7).map(|index| order.sample_at(index)).collect();
        assert_eq!(samples, [0, 1, 2, 0, 1, 2, 0]);
        assert!(matches!(SampleOrder::new(0, true, 0), Err(DataError::NoSamples)));
    }

    #[test]
    fn epochs_and_seeds_differ() {
        let base = epoch(100, 1, 0);
        assert_eq!(base, epoch(100, 1, 0));
        assert_ne!(base, epoch(100, 1, 1));
        assert_ne!(base, epoch(100, 2, 0));
    }

    #[test]
    fn all_orders_of_few_samples_occur() {
        let mut counts = std::collections::BTreeMap::new();
        for seed in 0..6000 {
            *counts.entry(epoch(3, seed, 0)).or_insert(0) += 1;
        }
        assert_eq!(counts.len(), 6);
        assert!(counts.values().all(|count| (700..1300).contains(count)), "{counts:?}");
    }

    #[test]
    fn samples_are_spread_evenly() {
        const SAMPLES: u64 = 1000;
        const EPOCHS: u64 = 200;
        let mut table = [[0_u64; 10]; 10];
        let mut neighbours = 0;
        for number in 0..EPOCHS {
            let samples = epoch(SAMPLES, 42, number);
            for (position, sample) in samples.iter().enumerate() {
                table[position / 100][*sample as usize / 100] += 1;
            }
            neighbours += samples.windows(2).filter(|pair| pair[1] == pair[0] + 1).count();
        }
        // Expected: 2000 per field, with a standard deviation of about 40.
        assert!(table.iter().flatten().all(|count| (1800..2200).contains(count)), "{table:?}");
        assert!((140..260).contains(&neighbours), "{neighbours}");
    }

    #[test]
    fn the_largest_domains_work() {
        for num_samples in [u64::MAX, (1 << 63) + 1, 1 << 62, (1 << 40) + 3] {
            let order = SampleOrder::new(num_samples, true, 7).unwrap();
            let samples: Vec<u64> = (0..100).map(|index| order.sample_at(index)).collect();
            assert!(samples.iter().all(|&sample| sample < num_samples));
            let distinct: std::collections::BTreeSet<_> = samples.iter().collect();
            assert_eq!(distinct.len(), 100);
        }
    }

    #[test]
    fn the_order_is_fixed_for_all_time() {
        // Checkpoints of older builds must continue with the same samples.
        assert_eq!(epoch(8, 1, 0), [7, 4, 0, 2, 5, 1, 6, 3]);
    }
}
