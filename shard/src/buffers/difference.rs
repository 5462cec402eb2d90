//! How far two tensors are apart, element by element: for `kiln diff`.

/// The comparison of two tensors of one shape, which are given part by part.
#[derive(Clone, Copy, Debug, Default)]
pub struct TensorDifference {
    /// Sums of the squares of either.
    squares: [f64; 2],
    /// Of the squares of the differences.
    apart: f64,
    /// Elements with other bits.
    pub others: u64,
    /// The elements that are furthest apart. All zero while no two are a distance above 0 apart: a zero and its
    /// negative are not, and NaN has no distance.
    pub furthest: FurthestElements,
}

/// The element of two tensors that differs most.
#[derive(Clone, Copy, Debug, Default)]
pub struct FurthestElements {
    /// Its number in the tensor.
    pub index: usize,
    /// Its two values.
    pub values: [f64; 2],
    distance: f64,
}

impl TensorDifference {
    /// Compares elements of both from the number `first` on.
    ///
    /// # Panics
    ///
    /// If one slice is longer.
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

    /// The norm of the difference over the larger norm of the two; 0 for two tensors of zeros. It says
    /// nothing where an element is NaN.
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
