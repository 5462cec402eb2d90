//! The matrix products of attention in `f32` and `f64`.
//!
//! Keys are copied once, transposed: the products then read every operand along its contiguous axis and pack
//! nothing.

use super::super::gemm::{Output, Threads, gemm};
use super::super::matrix::{Matrix, MatrixMut};
use super::super::parallel::for_each_block;
use super::super::scalar::Real;
use super::super::transpose::transpose;
use super::super::uninit::UninitVec;
use super::products::{GradientProducts, Products};
use super::tile::{Operands, Tile, query_rows};
use crate::ops::attention::AttentionShape;

/// The most rows that `gemm` multiplies without packing the other operand: eight register tiles of six.
const ROWS: usize = 48;

/// Keys or values of all heads, `[batch, kv_heads, head_dim, keys]`.
struct Transposed<T> {
    values: Vec<T>,
    shape: AttentionShape,
}

impl<T: Real> Transposed<T> {
    /// Copies the first `keys` rows of `[batch, capacity, kv_heads, head_dim]`.
    fn new(x: &[T], shape: AttentionShape) -> Self {
        let AttentionShape { batch, keys: seq, kv_heads, head_dim, .. } = shape;
        let stride = shape.kv_stride();
        let mut result = UninitVec::new(batch * kv_heads * head_dim * seq);
        if !shape.is_empty() {
            for_each_block(
                result.slots(),
                head_dim * seq,
                #[inline(always)]
                |start, result| {
                    let i = start / (head_dim * seq);
                    let x = &x[shape.kv_offset(i / kv_heads, 0, i % kv_heads)..];
                    transpose(x, stride, result, seq, [head_dim, seq]);
                },
            );
        }
        // SAFETY: the blocks are all heads, and `transpose` writes every element of a head. If the shape is
        // empty, the result is empty or is not read.
        Transposed { values: unsafe { result.assume_init() }, shape }
    }

    /// The columns of a tile, `[head_dim, columns]`.
    fn columns(&self, tile: Tile) -> Matrix<'_, T> {
        let AttentionShape { keys, kv_heads, head_dim, .. } = self.shape;
        let head = (tile.batch * kv_heads + tile.kv_head) * head_dim * keys;
        Matrix::new(&self.values[head + tile.first..], [head_dim, tile.columns], [keys, 1])
    }
}

/// The products of the forward pass.
pub struct FloatProducts<'a, T> {
    operands: Operands<'a, T>,
    keys: Option<Transposed<T>>,
}

impl<'a, T: Real> FloatProducts<'a, T> {
    /// For `few` queries, keys are read in place: transposing all of them would take longer than multiplying
    /// with them.
    pub fn new(operands: Operands<'a, T>, few: bool) -> Self {
        let keys = (!few).then(|| Transposed::new(operands.k, operands.shape));
        FloatProducts { operands, keys }
    }
}

impl<T: Real> Products<T> for FloatProducts<'_, T> {
    const ROWS: usize = ROWS;

    fn scores(&self, tile: Tile, scores: &mut [T]) {
        let keys = match &self.keys {
            Some(keys) => keys.columns(tile),
            None => self.operands.keys(tile).t(),
        };
        let out = MatrixMut::rows(scores, [tile.rows, tile.columns]);
        let (q, scale) = (self.operands.queries(tile), self.operands.scale());
        gemm(out, Output::Overwrite, scale, q, keys, Threads::One);
    }

    fn add_values(&self, tile: Tile, weights: &[T], out: MatrixMut<'_, T>) {
        let weights = Matrix::rows(weights, [tile.rows, tile.columns]);
        gemm(out, tile.output(), T::ONE, weights, self.operands.values(tile), Threads::One);
    }
}

/// The products of the backward pass.
pub struct FloatGradientProducts<'a, T> {
    operands: Operands<'a, T>,
    dout: &'a [T],
    keys: Transposed<T>,
    values: Transposed<T>,
}

impl<'a, T: Real> FloatGradientProducts<'a, T> {
    /// `dout` is the gradient of the result.
    pub fn new(operands: Operands<'a, T>, dout: &'a [T]) -> Self {
        let [keys, values] = [operands.k, operands.v].map(|x| Transposed::new(x, operands.shape));
        FloatGradientProducts { operands, dout, keys, values }
    }

    fn dout(&self, tile: Tile) -> Matrix<'_, T> {
        query_rows(self.dout, self.operands.shape, tile)
    }
}

impl<T: Real> GradientProducts<T> for FloatGradientProducts<'_, T> {
    const ROWS: usize = ROWS;

    fn scores(&self, tile: Tile, p: &mut [T], ds: &mut [T]) {
        let [p, ds] = [p, ds].map(|scores| MatrixMut::rows(scores, [tile.rows, tile.columns]));
        let (q, keys) = (self.operands.queries(tile), self.keys.columns(tile));
        gemm(p, Output::Overwrite, self.operands.scale(), q, keys, Threads::One);
        let values = self.values.columns(tile);
        gemm(ds, Output::Overwrite, T::ONE, self.dout(tile), values, Threads::One);
    }

    fn add_gradients(
        &self,
        tile: Tile,
        scores: [&[T]; 2],
        dq: Option<MatrixMut<'_, T>>,
        dk: Option<MatrixMut<'_, T>>,
        dv: Option<MatrixMut<'_, T>>,
    ) {
        let [p, ds] = scores.map(|scores| Matrix::rows(scores, [tile.rows, tile.columns]));
        if let Some(dv) = dv {
            gemm(dv, Output::Add, T::ONE, p.t(), self.dout(tile), Threads::One);
        }
        if let Some(dk) = dk {
            gemm(dk, Output::Add, T::ONE, ds.t(), self.operands.queries(tile), Threads::One);
        }
        if let Some(dq) = dq {
            gemm(dq, Output::Add, T::ONE, ds, self.operands.keys(tile), Threads::One);
        }
    }
}
