//! Sums over the elements of a tensor, which let two runs be compared without storing their tensors.
//!
//! The sums identify each element by its sample or parameter and by its index there. So the sums of ranks and
//! micro-batches can be added, no matter which elements each of them holds.
//!
//! The hash is a sum of integers: two tensors with the same bits have the same hash, and different tensors almost
//! never do. If the hashes differ, the sketch estimates by how much: it contains sums of the values with
//! pseudo-random signs. The squared difference of two such sums is, on average over the signs, the squared norm of
//! the difference of the tensors (Alon, Matias and Szegedy, 1996).

use std::ops::Range;

use burn::tensor::{DType, DataError, TensorData};
use half::{bf16, f16};
use rayon::prelude::*;
use serde::{Deserialize, Serialize};

/// Number of elements that one task sums. Fixed, so that sums of floats have the same bits for any number of
/// threads.
const TASK: usize = 1 << 15;

/// Sums over the elements of a tensor, or of a part of it: written by `--hash`, and compared by `kiln diff`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct TensorSums {
    /// Sum over all elements of a hash of the element's bits and position.
    pub hash: u64,
    /// Number of elements.
    pub count: u64,
    /// Number of elements that are not finite, which the sums below ignore.
    pub non_finite: u64,
    /// Sum of squares.
    pub squares: f64,
    /// Sums of the values with pseudo-random signs.
    pub sketch: [f64; TensorSums::SKETCHES],
}

/// The finalizer of SplitMix64 (Steele, Lea and Flood, 2014): a bijection in which every bit affects every
/// bit.
fn mix(mut x: u64) -> u64 {
    x = (x ^ (x >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    x = (x ^ (x >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    x ^ (x >> 31)
}

/// Difference between consecutive counters before they are mixed.
const GOLDEN: u64 = 0x9E37_79B9_7F4A_7C15;

impl TensorSums {
    /// Number of sums in [`TensorSums::sketch`].
    pub const SKETCHES: usize = 4;

    /// Returns the number that stands for a string, such as the name of a parameter, in sums.
    pub fn block_of(name: &str) -> u64 {
        name.bytes().fold(0, |block, byte| mix(block.wrapping_add(GOLDEN) ^ u64::from(byte)))
    }

    /// Returns the sums over `values`, the elements of `block` from index `first` on. A block is a sample of the run,
    /// or a parameter.
    pub fn of(block: u64, first: usize, values: &[f32]) -> Self {
        let of_task = |(task, values): (usize, &[f32])| {
            let mut sums = TensorSums::default();
            let (key, first) = (mix(block), (first + task * TASK) as u64);
            for (place, value) in (first..).zip(values) {
                sums.put(key, place, u64::from(value.to_bits()), f64::from(*value));
            }
            sums
        };
        let tasks: Vec<_> = values.par_chunks(TASK).enumerate().map(of_task).collect();
        tasks.into_iter().fold(TensorSums::default(), TensorSums::plus)
    }

    /// Returns the sums over one sample of a batch, whose elements are `range` of `data`.
    ///
    /// # Errors
    ///
    /// If the elements are neither floats nor `i32`.
    ///
    /// # Panics
    ///
    /// If `data` has fewer elements.
    pub fn from_sample(sample: u64, data: &TensorData, range: Range<usize>) -> Result<Self, DataError> {
        Ok(match data.dtype() {
            DType::F64 => Self::from_bits(sample, &data.as_slice::<f64>()?[range], |x| (x.to_bits(), x)),
            DType::F16 => {
                let bits = |x: f16| (u64::from(x.to_bits()), f64::from(x));
                Self::from_bits(sample, &data.as_slice::<f16>()?[range], bits)
            }
            DType::BF16 => {
                let bits = |x: bf16| (u64::from(x.to_bits()), f64::from(x));
                Self::from_bits(sample, &data.as_slice::<bf16>()?[range], bits)
            }
            DType::I32 => Self::from_ids(sample, &data.as_slice::<i32>()?[range]),
            _ => Self::of(sample, 0, &data.as_slice::<f32>()?[range]),
        })
    }

    /// Returns the sums over the tokens of one sample.
    pub fn from_ids(sample: u64, ids: &[i32]) -> Self {
        Self::from_bits(sample, ids, |id| (u64::from(id.cast_unsigned()), f64::from(id)))
    }

    /// Like [`TensorSums::of`], for values of types other than f32.
    fn from_bits<T: Copy>(block: u64, values: &[T], bits: impl Fn(T) -> (u64, f64)) -> Self {
        let (mut sums, key) = (TensorSums::default(), mix(block));
        for (place, &value) in (0..).zip(values) {
            let (bits, value) = bits(value);
            sums.put(key, place, bits, value);
        }
        sums
    }

    /// Returns the sums of one number.
    pub fn from_number(value: f64) -> Self {
        let mut sums = TensorSums::default();
        let is_finite = value.is_finite();
        sums.hash = mix(value.to_bits());
        (sums.count, sums.non_finite) = (1, u64::from(!is_finite));
        if is_finite {
            (sums.squares, sums.sketch) = (value * value, [value; Self::SKETCHES]);
        }
        sums
    }

    fn put(&mut self, key: u64, place: u64, bits: u64, value: f64) {
        let place = mix(key.wrapping_add(place.wrapping_mul(GOLDEN)));
        self.hash = self.hash.wrapping_add(mix(place ^ bits));
        self.count += 1;
        if !value.is_finite() {
            self.non_finite += 1;
            return;
        }
        self.squares += value * value;
        for (index, sum) in self.sketch.iter_mut().enumerate() {
            let sign = (place << index) & (1 << 63);
            *sum += f64::from_bits(value.to_bits() ^ sign);
        }
    }

    /// Adds the sums of `other` to these.
    pub fn plus(mut self, other: TensorSums) -> TensorSums {
        self.hash = self.hash.wrapping_add(other.hash);
        self.count += other.count;
        self.non_finite += other.non_finite;
        self.squares += other.squares;
        self.sketch.iter_mut().zip(other.sketch).for_each(|(sum, other)| *sum += other);
        self
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn values(count: usize) -> Vec<f32> {
        (0..count).map(|at| ((at * at) as f32).sin()).collect()
    }

    #[test]
    fn parts_add_up_in_any_order() {
        let all = values(3 * TASK / 2);
        let whole = TensorSums::of(7, 0, &all);
        let (head, tail) = all.split_at(1000);
        let parts = TensorSums::of(7, 1000, tail).plus(TensorSums::of(7, 0, head));
        assert_eq!((parts.hash, parts.count), (whole.hash, whole.count));
        assert!((parts.squares - whole.squares).abs() < 1e-9 * whole.squares);
        let bits = |x: f32| (u64::from(x.to_bits()), f64::from(x));
        assert_eq!(TensorSums::from_bits(7, &all, bits).hash, whole.hash);
        let (half, len) = (TensorData::from(&*all).convert::<bf16>(), all.len());
        let of_half = |range| TensorSums::from_sample(7, &half, range).expect("floats");
        assert_eq!(of_half(0..len).count, len as u64);
        assert!((of_half(0..len).squares - whole.squares).abs() < 1e-2 * whole.squares);
        assert_ne!(of_half(0..len).hash, of_half(1..len).hash);
    }

    #[test]
    fn every_bit_and_every_place_counts() {
        let all = values(100);
        let hash = |block, first, values: &[f32]| TensorSums::of(block, first, values).hash;
        let known = hash(0, 0, &all);
        assert_ne!(hash(1, 0, &all), known);
        assert_ne!(hash(0, 1, &all), known);
        let mut other = all.clone();
        other.swap(3, 4);
        assert_ne!(hash(0, 0, &other), known, "the norm would be the same");
        other.clone_from(&all);
        other[50] = f32::from_bits(other[50].to_bits() ^ 1);
        assert_ne!(hash(0, 0, &other), known);
        assert_ne!(hash(0, 0, &[0.0]), hash(0, 0, &[-0.0]));
        let odd = TensorSums::of(0, 0, &[1.0, f32::NAN, f32::INFINITY]);
        assert_eq!((odd.count, odd.non_finite, odd.squares), (3, 2, 1.0));
        assert_ne!(TensorSums::block_of("a.weight"), TensorSums::block_of("b.weight"));
    }

    #[test]
    fn sketches_tell_how_far_two_tensors_are_apart() {
        let a = values(10_000);
        for size in [1e-6, 1e-3, 1.0] {
            let b: Vec<_> =
                a.iter().enumerate().map(|(at, value)| value + size * (at as f32).cos()).collect();
            let exact = a.iter().zip(&b).map(|(a, b)| f64::from(a - b).powi(2)).sum::<f64>().sqrt();
            let [a, b] = [&a, &b].map(|values| TensorSums::of(3, 0, values).sketch);
            let squares: f64 = a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum();
            let estimate = (squares / TensorSums::SKETCHES as f64).sqrt();
            assert!((0.2 * exact..3.0 * exact).contains(&estimate), "{estimate} for {exact}");
        }
    }
}
