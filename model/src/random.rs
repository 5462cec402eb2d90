//! Seeded, counter-based randomness: the n-th value of a stream is a function only of `(key, n)`.
//!
//! No generator has a state that advances, so a value does not depend on the rank, thread or micro-batch that
//! requests it, nor on earlier values. This makes the initial weights equal at every rank count and lets dropout
//! masks be recomputed instead of stored. The design follows splittable keys as in JAX (Claessen and Pałka, 2013);
//! the mixer is the finaliser of SplitMix64 (Steele, Lea and Flood, 2014).

use rayon::prelude::*;

/// Weyl increment of SplitMix64, the difference between consecutive counters before they are mixed: 2^64 divided by
/// the golden ratio, rounded to an odd number.
pub const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

/// The factors of [`mix`].
pub(crate) const FACTORS: [u64; 2] = [0xBF58_476D_1CE4_E5B9, 0x94D0_49BB_1331_11EB];

/// Mixes 64 bits bijectively with full avalanche (SplitMix64's finaliser).
#[inline(always)]
pub fn mix(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(FACTORS[0]);
    z = (z ^ (z >> 27)).wrapping_mul(FACTORS[1]);
    z ^ (z >> 31)
}

/// Identifies a stream of random values; fork a key to get further streams.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Key(u64);

impl Key {
    /// Returns the root key of a seed.
    pub fn new(seed: u64) -> Self {
        Key(mix(seed.wrapping_add(GOLDEN)))
    }

    /// Returns the key of the substream called `name`.
    pub fn fork(self, name: &str) -> Self {
        // FNV-1a folds the name; the mixer then spreads it over all bits.
        let folded = name.bytes().fold(0xCBF2_9CE4_8422_2325u64, |hash, byte| {
            (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01B3)
        });
        Key(mix(self.0 ^ mix(folded)))
    }

    /// Returns the key of the substream numbered `index`.
    pub fn fork_index(self, index: u64) -> Self {
        Key(mix(mix(self.0).wrapping_add(index.wrapping_mul(GOLDEN))))
    }

    /// Returns the bits that identify this stream.
    pub fn bits(self) -> u64 {
        self.0
    }

    /// Returns the `counter`-th 64 random bits of this stream.
    #[inline(always)]
    pub fn at(self, counter: u64) -> u64 {
        mix(self.0.wrapping_add(counter.wrapping_mul(GOLDEN)))
    }

    /// Returns `count` random ids below `end`, beginning with the `first`-th of this stream.
    pub fn ids(self, first: u64, count: usize, end: u64) -> Vec<i32> {
        (first..).take(count).map(|counter| (self.at(counter) % end) as i32).collect()
    }

    /// Returns the `counter`-th uniform value in `[0, 1)` of this stream.
    pub fn uniform(self, counter: u64) -> f64 {
        (self.at(counter) >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Returns the `counter`-th standard normal value of this stream (Box–Muller).
    #[inline(always)]
    pub fn normal(self, counter: u64) -> f64 {
        let bits = self.at(counter);
        // (0, 1] keeps the logarithm finite.
        let radius = (f64::from((bits >> 32) as u32) + 1.0) * (1.0 / 4_294_967_296.0);
        (-2.0 * ln(radius)).sqrt() * cos_of_turns(bits as u32)
    }

    /// Returns `count` normal values with the given standard deviation, computed in parallel in the current rayon
    /// pool.
    pub fn normal_vec(self, count: usize, std: f64) -> Vec<f32> {
        const BLOCK: usize = 1 << 14;
        // Zeros from the system cost nothing until they are accessed.
        let mut values = vec![0.0; count];
        if std == 0.0 {
            return values;
        }
        values.par_chunks_mut(BLOCK).enumerate().for_each(|(block, values)| {
            let first = (block * BLOCK) as u64;
            pulp::Arch::new().dispatch(Normals { key: self, first, std, values });
        });
        values
    }
}

/// Writes normal values, beginning with the `first`-th. A struct instead of a closure: a long closure is compiled
/// separately from its caller, and without this processor's vector instructions.
struct Normals<'a> {
    key: Key,
    first: u64,
    std: f64,
    values: &'a mut [f32],
}

impl pulp::NullaryFnOnce for Normals<'_> {
    type Output = ();

    #[inline(always)]
    fn call(self) {
        for (i, value) in self.values.iter_mut().enumerate() {
            *value = (self.key.normal(self.first + i as u64) * self.std) as f32;
        }
    }
}

// A model has as many initial weights as parameters, so these functions are written for loops that vectorise:
// without branches, calls or tables.

/// Computes the natural logarithm of a positive normal number, with an error of a few units in the last place.
///
/// For `x = 2^n · m` with `m` between √½ and √2, the logarithm is `n · ln 2 + 2 · artanh((m − 1) / (m + 1))`,
/// computed with the series of the inverse hyperbolic tangent.
#[inline(always)]
fn ln(x: f64) -> f64 {
    const ONE: u64 = 1.0f64.to_bits();
    const SQRT_HALF: u64 = std::f64::consts::FRAC_1_SQRT_2.to_bits();
    const MANTISSA: u64 = (1 << 52) - 1;
    /// ln 2 in two parts, the first of which has few enough bits for its multiples to be exact.
    const LN_2_HIGH: f64 = 0.693_145_751_953_125;
    const LN_2_LOW: f64 = 1.428_606_820_309_417e-6;

    // Relative to √½, so that the exponent changes there.
    let bits = x.to_bits().wrapping_add(ONE - SQRT_HALF);
    let n = f64::from((bits >> 52) as i32 - 1023);
    let m = f64::from_bits((bits & MANTISSA).wrapping_add(SQRT_HALF));
    let s = (m - 1.0) / (m + 1.0);
    let z = s * s;
    let mut series = 0.0;
    for odd in [23.0, 21.0, 19.0, 17.0, 15.0, 13.0, 11.0, 9.0, 7.0, 5.0, 3.0] {
        series = (series + 1.0 / odd) * z;
    }
    n * LN_2_HIGH + (2.0 * s + (2.0 * s * series + n * LN_2_LOW))
}

/// Computes the cosine of `bits` / 2³² turns: exact reduction to an eighth of a turn, then the Taylor series of sine
/// and cosine.
#[inline(always)]
fn cos_of_turns(bits: u32) -> f64 {
    // Rounded to the nearest quarter in integers: rounding down a float is a call on baseline processors, and
    // a loop with a call in it does not vectorise.
    let quarter = ((u64::from(bits) + (1 << 29)) >> 30) as i32;
    let turns = f64::from(bits) * (1.0 / 4_294_967_296.0);
    let x = std::f64::consts::TAU * (turns - f64::from(quarter) * 0.25);
    let z = x * x;
    let (mut cos, mut sin) = (1.0, 1.0);
    for n in [16.0, 14.0, 12.0, 10.0, 8.0, 6.0, 4.0, 2.0] {
        cos = 1.0 - cos * z * (1.0 / (n * (n - 1.0)));
        sin = 1.0 - sin * z * (1.0 / (n * (n + 1.0)));
    }
    let value = if quarter & 1 == 0 { cos } else { x * sin };
    if quarter == 1 || quarter == 2 { -value } else { value }
}
