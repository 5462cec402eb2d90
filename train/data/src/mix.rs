//! A small pseudo-random generator with fixed output; a library's output might change between versions.

/// The increment of splitmix64: 2^64 divided by the golden ratio, as an odd number.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The finalizer of splitmix64, a bijection of `u64`.
pub(super) fn mix(value: u64) -> u64 {
    let mut mixed = value.wrapping_add(GOLDEN);
    mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    mixed ^ (mixed >> 31)
}

/// Hashes two numbers into one; their order matters.
pub(super) fn mix_pair(first: u64, second: u64) -> u64 {
    mix(mix(first) ^ second)
}

pub(super) struct SplitMix(u64);

impl SplitMix {
    pub(super) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(super) fn next_u64(&mut self) -> u64 {
        let value = mix(self.0);
        self.0 = self.0.wrapping_add(GOLDEN);
        value
    }

    /// Returns a number in `0..bound`, with a bias below `bound / 2^64`.
    pub(super) fn below(&mut self, bound: u64) -> u64 {
        debug_assert!(bound > 0, "a range needs at least one number");
        self.next_u64() % bound
    }

    pub(super) fn choose<'a>(&mut self, items: &[&'a str]) -> &'a str {
        items[self.below(items.len() as u64) as usize]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn reproduces_the_published_stream() {
        // From the reference implementation, for seed 1234567.
        let mut random = SplitMix::new(1_234_567);
        assert_eq!(random.next_u64(), 6_457_827_717_110_365_317);
        assert_eq!(random.next_u64(), 3_203_168_211_198_807_973);
        assert_eq!(random.next_u64(), 9_817_491_932_198_370_423);
    }

    #[test]
    fn pairs_are_ordered() {
        assert_ne!(mix_pair(1, 2), mix_pair(2, 1));
        assert_ne!(mix_pair(0, 0), mix_pair(0, 1));
    }
}
