//! How often values lie where, counted in buckets that are the same for all values, so that counts of shards can
//! be added.

use rayon::prelude::*;

/// Values that one task counts at a time. Fixed, so that sums have the same bits at any number of threads.
const TASK: usize = 1 << 18;

/// Bits of an f32 below those that a bucket is known by: its exponent and two bits of its mantissa, which make four
/// buckets for each power of two.
const DROPPED: u32 = 21;

/// The bits of 2^-40, where buckets begin on both sides of 0.
const FIRST: u32 = (127 - 40) << 2;

/// Buckets on each side of 0, up to 2^24.
const SIDE: usize = 64 << 2;

/// All buckets: negative values, those around 0, positive values.
const BUCKETS: usize = 2 * SIDE + 1;

/// How often values lie where. Values that are not finite are left out.
#[derive(Clone, Debug, PartialEq)]
pub struct ValueHistogram {
    /// The lowest value; infinite if there is none.
    pub min: f64,
    /// The highest value; minus infinity if there is none.
    pub max: f64,
    /// The sum of all values.
    pub sum: f64,
    /// The sum of their squares.
    pub sum_squares: f64,
    /// Values in each bucket, which begins where the one before it ends. [`ValueHistogram::limits`] has the ends.
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
    /// The upper limit of each bucket, ascending. The outermost buckets have all that lies beyond as well.
    pub fn limits() -> Vec<f64> {
        let limit = |at: usize| f64::from(f32::from_bits((FIRST + at as u32) << DROPPED));
        let negative = (0..SIDE).rev().map(|at| -limit(at));
        let positive = (0..SIDE).map(limit);
        negative.chain(positive).chain([f64::MAX]).collect()
    }

    /// Counts `values`, each multiplied with `factor`.
    pub(crate) fn of(values: &[f32], factor: f32) -> Self {
        let parts: Vec<_> = values.par_chunks(TASK).map(|values| Self::of_part(values, factor)).collect();
        let mut all = ValueHistogram::default();
        parts.iter().for_each(|part| all.add(part));
        all
    }

    fn of_part(values: &[f32], factor: f32) -> Self {
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

    /// Adds what `other` has counted.
    pub(crate) fn add(&mut self, other: &ValueHistogram) {
        (self.min, self.max) = (self.min.min(other.min), self.max.max(other.max));
        self.sum += other.sum;
        self.sum_squares += other.sum_squares;
        self.counts.iter_mut().zip(&other.counts).for_each(|(count, more)| *count += more);
    }
}

/// The bucket of a finite value.
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
    fn every_value_lies_between_the_limits_of_its_bucket() {
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
