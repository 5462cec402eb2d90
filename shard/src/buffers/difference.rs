//! Element-by-element comparison of two tensors, for `kiln diff`.

/// The comparison of two tensors of equal shape, which are passed part by part.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorDifference {
    /// Sum of squares of each tensor.
    squares: [f64; 2],
    /// Sum of squares of the differences.
    apart: f64,
    /// Number of elements with different bits.
    pub others: u64,
    /// The elements with the largest distance. All zero while no distance is above 0: a zero and its negative
    /// have distance 0, and NaN has none.
    pub furthest: FurthestElements,
}

/// The element in which two tensors differ most.
#[derive(Clone, Copy, Debug, Default)]
pub struct FurthestElements {
    /// Index of the element in the tensor.
    pub index: usize,
    /// Its two values.
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
            self.squares[0] += x * x;
            self.squares[1] += y * y;
            if a.to_bits() != b.to_bits() {
                self.others += 1;
                self.apart += (x - y) * (x - y);
                let distance = (x - y).abs();
                if distance > self.furthest.distance {
                    self.furthest = FurthestElements { index, values: [x, y], distance };
                }
            }
        }
    }

    /// Returns the norm of the difference over the larger norm of the two; 0 for two tensors of zeros.
    /// Meaningless if an element is NaN.
    pub fn relative(&self) -> f64 {
        let scale = f64::max(self.squares[0], self.squares[1]).sqrt();
        if scale > 0.0 { self.apart.sqrt() / scale } else { 0.0 }
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
}
