//! Transposition of squares of 16 × 16 elements, each row a cache line of `f32`.

use std::mem::MaybeUninit;

/// Side of a square: a cache line of `f32`.
pub const SQUARE: usize = 16;

/// Transposes one square between matrices whose rows are `x_stride` and `y_stride` apart.
#[inline(always)]
pub fn transpose_square<T: Copy + Default>(
    x: &[T],
    x_stride: usize,
    y: &mut [MaybeUninit<T>],
    y_stride: usize,
) {
    let mut square = [[T::default(); SQUARE]; SQUARE];
    for i in 0..SQUARE {
        let row = &x[i * x_stride..][..SQUARE];
        for j in 0..SQUARE {
            square[j][i] = row[j];
        }
    }
    for (j, column) in square.iter().enumerate() {
        y[j * y_stride..][..SQUARE].write_copy_of_slice(column);
    }
}

/// Transposes like [`transpose_square`], in registers if the machine has 32 registers of 512 bits.
#[inline(always)]
pub fn transpose_square_f32(x: &[f32], x_stride: usize, y: &mut [MaybeUninit<f32>], y_stride: usize) {
    #[cfg(target_arch = "x86_64")]
    if let Some(simd) = pulp::x86::V4::try_new() {
        return avx512::transpose_square(simd, x, x_stride, y, y_stride);
    }
    transpose_square(x, x_stride, y, y_stride);
}

#[cfg(target_arch = "x86_64")]
pub mod avx512 {

    use std::mem::MaybeUninit;

    use pulp::x86::V4;
    use pulp::{NullaryFnOnce, cast, f32x16};

    use super::SQUARE;

    #[inline(always)]
    pub fn transpose_square(
        simd: V4,
        x: &[f32],
        x_stride: usize,
        y: &mut [MaybeUninit<f32>],
        y_stride: usize,
    ) {
        simd.vectorize(Square { simd, x, x_stride, y, y_stride });
    }

    struct Square<'a> {
        simd: V4,
        x: &'a [f32],
        x_stride: usize,
        y: &'a mut [MaybeUninit<f32>],
        y_stride: usize,
    }

    impl NullaryFnOnce for Square<'_> {
        type Output = ();

        #[inline(always)]
        fn call(self) {
            let Square { simd, x, x_stride, y, y_stride } = self;
            let mut rows = [cast::<[f32; SQUARE], f32x16>([0.0; SQUARE]); SQUARE];
            for (i, row) in rows.iter_mut().enumerate() {
                *row = cast(x[i * x_stride..].as_chunks::<SQUARE>().0[0]);
            }
            for (j, column) in transposed(simd, rows).into_iter().enumerate() {
                let column: [f32; SQUARE] = cast(column);
                y[j * y_stride..][..SQUARE].write_copy_of_slice(&column);
            }
        }
    }

    /// Exchanges single elements within quarters of a register, then pairs of elements, then whole quarters.
    #[inline(always)]
    pub fn transposed(simd: V4, rows: [f32x16; SQUARE]) -> [f32x16; SQUARE] {
        let f = simd.avx512f;
        let mut pairs = rows;
        for i in 0..8 {
            let (a, b) = (cast(rows[2 * i]), cast(rows[2 * i + 1]));
            pairs[2 * i] = cast(f._mm512_unpacklo_ps(a, b));
            pairs[2 * i + 1] = cast(f._mm512_unpackhi_ps(a, b));
        }
        let mut fours = pairs;
        for i in 0..4 {
            for c in 0..2 {
                let (a, b) = (cast(pairs[4 * i + c]), cast(pairs[4 * i + 2 + c]));
                fours[4 * i + 2 * c] = cast(f._mm512_unpacklo_pd(a, b));
                fours[4 * i + 2 * c + 1] = cast(f._mm512_unpackhi_pd(a, b));
            }
        }
        let mut columns = fours;
        for c in 0..4 {
            let [a, b, e, g] = [0, 4, 8, 12].map(|i| cast(fours[i + c]));
            let (even, odd) = (f._mm512_shuffle_f32x4::<0x88>(a, b), f._mm512_shuffle_f32x4::<0xdd>(a, b));
            let (even_below, odd_below) =
                (f._mm512_shuffle_f32x4::<0x88>(e, g), f._mm512_shuffle_f32x4::<0xdd>(e, g));
            columns[c] = cast(f._mm512_shuffle_f32x4::<0x88>(even, even_below));
            columns[8 + c] = cast(f._mm512_shuffle_f32x4::<0xdd>(even, even_below));
            columns[4 + c] = cast(f._mm512_shuffle_f32x4::<0x88>(odd, odd_below));
            columns[12 + c] = cast(f._mm512_shuffle_f32x4::<0xdd>(odd, odd_below));
        }
        columns
    }
}
