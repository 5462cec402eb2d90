//! Seeded, counter-based randomness: the n-th value of a stream is a function of `(key, n)` alone.
//!
//! Nothing here has a state to advance, so a value does not depend on which rank, thread or
//! micro-batch asks for it, nor on what was asked before. That is what makes the initial weights
//! equal at every rank count and lets dropout masks be recomputed instead of stored.
//! The design follows splittable keys as in JAX (Claessen and Pałka, 2013); the mixer is the
//! finaliser of SplitMix64 (Steele, Lea and Flood, 2014).

use rayon::prelude::*;

/// Weyl increment of SplitMix64: 2^64 divided by the golden ratio, odd.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// A bijective 64-bit mixer with full avalanche (SplitMix64's finaliser).
#[inline(always)]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Names a stream of random values; fork it to name further streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(u64);

impl Key {
    /// The root key of a seed.
    pub fn new(seed: u64) -> Self {
        Key(mix(seed.wrapping_add(GOLDEN)))
    }

    /// The key of the stream called `name` below this one.
    pub fn fork(self, name: &str) -> Self {
        // FNV-1a folds the name; the mixer then spreads it over all bits.
        let folded = name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
        });
        Key(mix(self.0 ^ mix(folded)))
    }

    /// The key of the stream numbered `index` below this one.
    pub fn fork_index(self, index: u64) -> Self {
        Key(mix(mix(self.0).wrapping_add(index.wrapping_mul(GOLDEN))))
    }

    /// The bits that name this stream.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// The `counter`-th 64 random bits of this stream.
    #[inline(always)]
    pub fn at(self, counter: u64) -> u64 {
        mix(self.0.wrapping_add(counter.wrapping_mul(GOLDEN)))
    }

    /// The `counter`-th uniform value in `[0, 1)` of this stream.
    pub fn uniform(self, counter: u64) -> f64 {
        (self.at(counter) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// The `counter`-th standard normal value of this stream (Box–Muller).
    pub fn normal(self, counter: u64) -> f64 {
        let bits = self.at(counter);
        // (0, 1] keeps the logarithm finite.
        let radius = ((bits >> 32) as f64 + 1.0) * (1.0 / 4_294_967_296.0);
        let angle = (bits & 0xFFFF_FFFF) as f64 * (1.0 / 4_294_967_296.0);
        (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * angle).cos()
    }

    /// `count` normal values with the given standard deviation, in parallel on the current pool.
    pub fn normal_vec(self, count: usize, std: f64) -> Vec<f32> {
        (0..count)
            .into_par_iter()
            .with_min_len(4096)
            .map(|counter| (self.normal(counter as u64) * std) as f32)
            .collect()
    }
}
