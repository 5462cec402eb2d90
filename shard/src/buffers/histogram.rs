//! Histograms that all have the same buckets, so that the counts of different shards can be added.

use rayon::prelude::*;

/// Number of values that one task counts. Fixed, so that sums have the same bits for any number of threads.
const TASK: usize = 1 << 18;

/// Number of low bits of an f32 that do not affect its bucket. A bucket is determined by the exponent and two
/// bits of the mantissa, which gives four buckets per power of two.
const DROPPED: u32 = 21;

/// The bits of 2^-40, where buckets begin on both sides of 0.
const FIRST: u32 = (127 - 40) << 2;

/// Buckets on each side of 0, up to 2^24.
const SIDE: usize = 64 << 2;

/// Total number of buckets: for negative values, for values around 0, and for positive values.
const BUCKETS: usize = 2 * SIDE + 1;

/// A histogram of values. Values that are not finite are ignored.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueHistogram {
    /// The lowest value; infinite if there are no values.
    pub min: f64,
    /// The highest value; minus infinity if there are no values.
    pub max: f64,
    /// The sum of all values.
    pub sum: f64,
    /// The sum of the squares of all values.
    pub sum_squares: f64,
    /// Number of values in each bucket. A bucket begins where the previous one ends; see
    /// [`ValueHistogram::limits`].
    pub counts: Vec<f64>,
}

impl Default for ValueHistogram {
    fn default() -> Self {
        ValueHistogram {
            min: f64::INFINITY,
            max: f64::NEG_INFINITY,
            sum: 0.0,
            sum_squares: 0.0,
            counts: vec![0.0; BUCKETS],
        }
    }
}

impl ValueHistogram {
    /// Returns the upper limit of each bucket, in ascending order. The outermost buckets also contain all
    /// values beyond them.
    pub fn limits() -> Vec<f64> {
        let limit = |at: usize| f64::from(f32::from_bits((FIRST + at as u32) << DROPPED));
        let negative = (0..SIDE).rev().map(|at| -limit(at));
        let positive = (0..SIDE).map(limit);
        negative.chain(positive).chain([f64::MAX]).collect()
    }

    /// Counts `values`, each multiplied by `factor`.
    pub(crate) fn of(values: &[f32], factor: f32) -> Self {
        let parts: Vec<_> = values.par_chunks(TASK).map(|values| Self::from_part(values, factor)).collect();
        let mut all = ValueHistogram::default();
        parts.iter().for_each(|part| all.add(part));
        all
    }

    fn from_part(values: &[f32], factor: f32) -> Self {
        let mut part = ValueHistogram::default();
        for value in values.iter().map(|value| value * factor).filter(|value| value.is_finite()) {
            part.counts[bucket(value)] += 1.0;
            let value = f64::from(value);
            (part.min, part.max) = (part.min.min(value), part.max.max(value));
            part.sum += value;
            part.sum_squares += value * value;
        }
        part
    }

    /// Adds the counts of `other`.
    pub(crate) fn add(&mut self, other: &ValueHistogram) {
        (self.min, self.max) = (self.min.min(other.min), self.max.max(other.max));
        self.sum += other.sum;
        self.sum_squares += other.sum_squares;
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
    }
}

/// Returns the bucket of a finite value.
fn bucket(value: f32) -> usize {
    let magnitude = value.abs().to_bits() >> DROPPED;
    match magnitude.checked_sub(FIRST) {
        None => SIDE,
        Some(at) => {
            let at = (at as usize).min(SIDE - 1);
            if value < 0.0 { SIDE - 1 - at } else { SIDE + 1 + at }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_value_lies_within_its_bucket() {
        let limits = ValueHistogram::limits();
        assert_eq!(limits.len(), BUCKETS);
        assert!(limits.is_sorted());
        for value in [0.0, -0.0, 1e-20, -1e-20, 1.0, -1.0, 1.5, -1.5, 0.3, -1e-7, 1e30, -1e30, f32::MAX] {
            let at = bucket(value);
            let (value, last) = (f64::from(value), BUCKETS - 1);
            assert!(value <= limits[at], "{value}: {}", limits[at]);
            assert!(at == 0 || value >= limits[at - 1], "{value}: {}", limits[at - 1]);
            assert!((at == 0 || at == last) == (value.abs() >= f64::from(1 << 23) * 1.75), "{value}: {at}");
        }
    }

    #[test]
    fn values_that_are_not_finite_are_left_out() {
        let histogram = ValueHistogram::of(&[1.0, -3.0, f32::NAN, f32::INFINITY], 0.5);
        assert_eq!((histogram.min, histogram.max), (-1.5, 0.5));
        assert_eq!((histogram.sum, histogram.sum_squares), (-1.0, 2.5));
        assert_eq!(histogram.counts.iter().sum::<f64>(), 2.0);
    }
}
