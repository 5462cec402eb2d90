//! Checks that two cuBLASLt algorithms have computed the same product.

use std::ops::Range;

use half::{bf16, f16};

use super::problem::{Float, Problem};

/// Maximum bytes of an output to compare. A larger output is compared in pieces spread over its length.
const COMPARED: usize = 16 << 20;

const PIECE: usize = 64 << 10;

/// Returns the parts to compare of an output of `bytes` bytes, with elements of `width` bytes.
pub(super) fn compared(bytes: usize, width: usize) -> impl Iterator<Item = Range<usize>> {
    let (pieces, len) = if bytes <= COMPARED { (1, bytes) } else { (COMPARED / PIECE, PIECE) };
    (0..pieces).map(move |piece| {
        let start = (bytes - len) / width * piece / (pieces - 1).max(1) * width;
        start..start + len
    })
}

/// Returns the maximum difference between two algorithms, relative to the value plus the root mean square of all
/// values.
///
/// Algorithms add in `f32` in different orders. 2⁻⁷ is the distance of adjacent bf16 values, and TF32 differs by as
/// much. An incomplete sum or an unwritten output differs by more.
fn bound(problem: &Problem) -> f64 {
    let is_rounded = problem.tf32 || problem.output == Float::Bf16;
    f64::exp2(if is_rounded { -7.0 } else { -9.0 })
}

/// Returns whether two outputs of `problem` agree up to rounding.
pub(super) fn agree(problem: &Problem, first: &[u8], other: &[u8]) -> bool {
    let (first, other) = (values(first, problem.output), values(other, problem.output));
    let (squares, count) = first
        .clone()
        .filter(|value| value.is_finite())
        .fold((0.0, 0), |(sum, count), value| (sum + value * value, count + 1));
    let (bound, usual) = (bound(problem), (squares / f64::from(count.max(1))).sqrt());
    first.zip(other).all(|(a, b)| match a.is_finite() && b.is_finite() {
        true => (a - b).abs() <= bound * (a.abs().max(b.abs()) + usual),
        false => a == b || (a.is_nan() && b.is_nan()),
    })
}

fn values(bytes: &[u8], dtype: Float) -> impl Iterator<Item = f64> + Clone {
    bytes.chunks_exact(dtype.bytes()).map(move |value| match (dtype, value) {
        (Float::Bf16, &[a, b]) => bf16::from_ne_bytes([a, b]).to_f64(),
        (Float::F16, &[a, b]) => f16::from_ne_bytes([a, b]).to_f64(),
        (_, &[a, b, c, d]) => f64::from(f32::from_ne_bytes([a, b, c, d])),
        _ => unreachable!("invariant: a value has the bytes of its dtype"),
    })
}

#[cfg(test)]
mod tests {
    use super::super::problem::Operand;
    use super::*;

    fn problem(output: Float, tf32: bool) -> Problem {
        let operand = Operand { transposed: false, leading: 4 };
        Problem { m: 4, k: 4, n: 4, a: operand, b: operand, input: output, output, bias: false, tf32 }
    }

    fn bytes(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| value.to_ne_bytes()).collect()
    }

    #[test]
    fn parts_are_spread_over_the_output() {
        assert_eq!(compared(0, 4).collect::<Vec<_>>(), vec![0..0]);
        assert_eq!(compared(COMPARED, 4).collect::<Vec<_>>(), vec![0..COMPARED]);
        let bytes = 2 * (1_000_003 << 10);
        let parts: Vec<_> = compared(bytes, 2).collect();
        assert_eq!((parts.len(), parts[0].start, parts[255].end), (256, 0, bytes));
        assert!(parts.iter().all(|part| part.len() == PIECE && part.start.is_multiple_of(2)));
        assert!(parts.windows(2).all(|pair| pair[0].end < pair[1].start));
    }

    #[test]
    fn rounding_is_told_from_other_values() {
        let first = bytes(&[1.0, -2.0, 0.0, 1000.0]);
        let agrees = |tf32, other: &[f32]| agree(&problem(Float::F32, tf32), &first, &bytes(other));
        assert!(agrees(false, &[1.0, -2.0, 0.0, 1000.0]));
        // Small values next to large ones have the error of the large ones.
        assert!(agrees(false, &[1.5, -2.0, 0.5, 1001.0]));
        assert!(!agrees(false, &[1.0, -2.0, 0.0, 1004.0]));
        assert!(agrees(true, &[1.0, -2.0, 0.0, 1004.0]));
        assert!(!agrees(true, &[1.0, -2.0, 0.0, 1020.0]));
        assert!(!agrees(true, &[1.0, -2.0, f32::NAN, 1000.0]));
        assert!(!agrees(true, &[1.0, -2.0, f32::INFINITY, 1000.0]));
        let first = bytes(&[f32::NAN, f32::INFINITY]);
        let agrees = |other: &[f32]| agree(&problem(Float::F32, false), &first, &bytes(other));
        assert!(agrees(&[f32::NAN, f32::INFINITY]));
        assert!(!agrees(&[f32::NAN, f32::NEG_INFINITY]));
        assert!(!agrees(&[1.0, f32::INFINITY]));
    }

    #[test]
    fn halves_may_differ_by_a_neighbour() {
        let bytes = |values: [f32; 2]| values.map(|value| bf16::from_f32(value).to_ne_bytes()).concat();
        let agrees = |other| agree(&problem(Float::Bf16, false), &bytes([1.0, 2.0]), &bytes(other));
        assert!(agrees([1.0, 2.0]) && agrees([1.0 + 1.0 / 128.0, 2.0]));
        assert!(!agrees([1.0 + 4.0 / 128.0, 2.0]));
    }
}
