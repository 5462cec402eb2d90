//! Element-by-element comparison of two tensors, for `kiln diff`.

/// Comparison of two tensors of equal shape, to which the tensors are passed in parts.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorDifference {
    /// Sum of squares of each tensor.
    squares: [f64; 2],
    /// Sum of squares of the differences.
    apart: f64,
    /// Number of elements with different bits.
    pub others: u64,
    /// Number of elements with different bits of which at least one is NaN or infinite.
    pub non_finite: u64,
    /// The pair of elements that differ most: the first pair in which one is NaN or infinite, if there is one. All
    /// zero if no pair differs in value; zero and negative zero are equal.
    pub furthest: FurthestElements,
}

/// The element in which two tensors differ most.
#[derive(Clone, Copy, Debug, Default)]
pub struct FurthestElements {
    /// Index of the element in the tensor.
    pub index: usize,
    /// The element's value in each tensor.
    pub values: [f64; 2],
    distance: f64,
}

impl TensorDifference {
    /// Compares elements of both tensors from index `first` on.
    ///
    /// # Panics
    ///
    /// If the slices differ in length.
    pub fn add(&mut self, first: usize, a: &[f32], b: &[f32]) {
        assert_eq!(a.len(), b.len(), "parts of two tensors");
        for (index, (a, b)) in (first..).zip(a.iter().zip(b)) {
            let (x, y) = (f64::from(*a), f64::from(*b));
            for (squares, value) in self.squares.iter_mut().zip([x, y]) {
                *squares += if value.is_finite() { value * value } else { 0.0 };
            }
            if a.to_bits() == b.to_bits() {
                continue;
            }
            self.others += 1;
            let is_finite = x.is_finite() && y.is_finite();
            let distance = if is_finite { (x - y).abs() } else { f64::INFINITY };
            self.apart += distance * distance;
            self.non_finite += u64::from(!is_finite);
            if distance > self.furthest.distance {
                self.furthest = FurthestElements { index, values: [x, y], distance };
            }
        }
    }

    /// The norm of the difference over the larger norm of the two; 0 for two tensors of zeros, infinite where
    /// [`non_finite`](Self::non_finite) elements differ. Elements with the same bits that are not finite count as 0.
    pub fn relative(&self) -> f64 {
        let scale = f64::max(self.squares[0], self.squares[1]).sqrt();
        match (self.non_finite, scale > 0.0) {
            (0, true) => self.apart.sqrt() / scale,
            (0, false) => 0.0,
            _ => f64::INFINITY,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn parts_are_compared_as_one_tensor() {
        let (a, b) = ([3.0, 0.0, 4.0, 0.0], [3.0, 0.5, 4.0, -0.0]);
        let mut difference = TensorDifference::default();
        difference.add(0, &a[..1], &b[..1]);
        assert_eq!((difference.others, difference.relative()), (0, 0.0));
        difference.add(1, &a[1..], &b[1..]);
        assert_eq!(difference.others, 2, "the two zeros have other bits");
        assert_eq!((difference.furthest.index, difference.furthest.values), (1, [0.0, 0.5]));
        let larger: f64 = 9.0 + 0.25 + 16.0;
        assert!((difference.relative() - 0.5 / larger.sqrt()).abs() < 1e-12);
    }

    #[test]
    fn a_non_finite_value_is_the_largest_difference() {
        let compare = |a: &[f32], b: &[f32]| {
            let mut difference = TensorDifference::default();
            difference.add(0, a, b);
            difference
        };
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for (a, b) in [([1.0, 5.0, value], [1.0, 9.0, 2.0]), ([1.0, 5.0, 2.0], [1.0, 9.0, value])] {
                let difference = compare(&a, &b);
                assert_eq!((difference.others, difference.non_finite), (2, 1), "{value}");
                assert_eq!((difference.furthest.index, difference.relative()), (2, f64::INFINITY), "{value}");
            }
            // A non-finite value that is equal in both tensors hides no other difference.
            let difference = compare(&[value, 4.0], &[value, 2.0]);
            assert_eq!((difference.others, difference.non_finite, difference.relative()), (1, 0, 0.5));
        }
        assert_eq!(compare(&[f32::NAN], &[f32::INFINITY]).non_finite, 1);
    }
}
