//! Products of matrices whose elements are distributed over the lanes of a warp, as described in PTX's
//! manual.
//!
//! Products are exact in f32. They are added to the accumulator one after another in the order of k, and each
//! sum is rounded to the nearest. Tensor cores add several at once and truncate instead, so results differ in
//! the last bits.

use crate::float;
use crate::lanes::{LANES, Lanes, Registers, lanes_of};
use crate::program::{Kind, Matrix};

pub const ROWS: usize = 16;
pub const COLUMNS: usize = 8;

/// Row and column, in its matrix, of an element that a lane holds: the element `half` of a register with
/// `halves` elements.
///
/// For `mma`, `B` has 8 columns; the registers of `wmma` are those of two such products next to each other.
pub fn element(matrix: Matrix, halves: usize, lane: usize, register: usize, half: usize) -> (usize, usize) {
    let (group, thread) = (lane / 4, lane % 4);
    // Number of elements along k in one register of all four threads.
    let along = 4 * halves;
    match matrix {
        Matrix::A => (group + 8 * (register % 2), thread * halves + half + along * (register / 2)),
        Matrix::B => (thread * halves + half + along * (register % 2), group + 8 * (register / 2)),
        Matrix::Accumulator => {
            (group + 8 * (register / 2 % 2), 2 * thread + register % 2 + 8 * (register / 4))
        }
    }
}

/// Returns the numbers represented by the bits of a register.
#[inline(always)]
fn numbers(values: &Lanes<u32>, half: usize, kind: Kind) -> Lanes<f32> {
    let shift = 16 * half as u32;
    match kind {
        // The lowest bits are ignored.
        Kind::TF32 => lanes_of(values, |bits| f32::from_bits(bits & 0xffff_e000)),
        Kind::F16 => lanes_of(values, |bits| float::from_f16(bits >> shift & 0xffff)),
        _ => lanes_of(values, |bits| float::from_bf16(bits >> shift & 0xffff)),
    }
}

pub fn halves(kind: Kind) -> usize {
    if kind == Kind::TF32 { 1 } else { 2 }
}

/// `D = A · B + C` of 16 × k, k × 8 and 16 × 8, where K is at least k.
#[inline(always)]
fn sums<const K: usize>(
    k: usize,
    a: &[[f32; K]; ROWS],
    b: &[[f32; COLUMNS]; K],
    c: &mut [[f32; COLUMNS]; ROWS],
) {
    for (row, sums) in a.iter().zip(c) {
        for (&a, b) in row.iter().zip(b).take(k) {
            for (sum, &b) in sums.iter_mut().zip(b) {
                *sum = a.mul_add(b, *sum);
            }
        }
    }
}

/// Returns the 16 rows of A that the lanes hold.
#[inline(always)]
pub fn left(r: &Registers, kind: Kind, a: &[u16]) -> [[f32; 16]; ROWS] {
    let halves = halves(kind);
    let mut left = [[0.0; 16]; ROWS];
    for (register, &name) in a.iter().enumerate() {
        let values = r.narrow(name);
        for half in 0..halves {
            for (lane, &number) in numbers(values, half, kind).iter().enumerate() {
                let (row, column) = element(Matrix::A, halves, lane, register, half);
                left[row % ROWS][column % 16] = number;
            }
        }
    }
    left
}

/// `D = A · B + C`, with `D = A · B` if there are no registers of C.
#[inline(always)]
pub fn add_product(
    r: &mut Registers,
    k: usize,
    [d, c]: [&[u16]; 2],
    left: &[[f32; 16]; ROWS],
    right: &[[f32; COLUMNS]; 16],
) {
    let mut sum = [[0.0; COLUMNS]; ROWS];
    for (register, &name) in c.iter().enumerate() {
        for (lane, &bits) in r.narrow(name).iter().enumerate() {
            let (row, column) = element(Matrix::Accumulator, 1, lane, register, 0);
            sum[row][column] = f32::from_bits(bits);
        }
    }
    sums(k, left, right, &mut sum);
    for (register, &name) in d.iter().enumerate() {
        let mut values = [0; LANES];
        for (lane, value) in values.iter_mut().enumerate() {
            let (row, column) = element(Matrix::Accumulator, 1, lane, register, 0);
            *value = float::canonical(sum[row][column]).to_bits();
        }
        r.set_narrow(name, &values, u32::MAX);
    }
}

#[inline(always)]
fn multiply_lanes(r: &mut Registers, k: usize, kind: Kind, d: &[u16], a: &[u16], b: &[u16], c: &[u16]) {
    let halves = halves(kind);
    let left = left(r, kind, a);
    let mut right = [[0.0; COLUMNS]; 16];
    for (register, &name) in b.iter().enumerate() {
        let values = r.narrow(name);
        for half in 0..halves {
            for (lane, &number) in numbers(values, half, kind).iter().enumerate() {
                let (row, column) = element(Matrix::B, halves, lane, register, half);
                right[row % 16][column % COLUMNS] = number;
            }
        }
    }
    add_product(r, k, [d, c], &left, &right);
}

/// Operands of `mma`: the registers of D, A, B and C, in that order.
#[inline(always)]
pub fn mma(r: &mut Registers, k: u8, kind: Kind, o: &[u16]) {
    let (d, rest) = o.split_at(4);
    let (ab, c) = rest.split_at(rest.len() - 4);
    let (a, b) = ab.split_at(ab.len() / 3 * 2);
    multiply_lanes(r, usize::from(k), kind, d, a, b, c);
}

/// `wmma.mma`: two products next to each other. Fragments of f16 have every register twice.
#[inline(always)]
pub fn wmma(r: &mut Registers, k: u8, kind: Kind, o: &[u16]) {
    let (d, rest) = o.split_at(8);
    let (ab, c) = rest.split_at(rest.len() - 8);
    let (a, b) = ab.split_at(ab.len() / 2);
    for half in 0..2 {
        let (four, two) = (4 * half..4 * half + 4, 2 * half..2 * half + 2);
        multiply_lanes(r, usize::from(k), kind, &d[four.clone()], &a[..4], &b[two], &c[four]);
    }
}
