//! The matrix products of attention, of the operands as they are.
//!
//! Keys are copied once, transposed: the products then read every operand along its contiguous axis and pack
//! nothing.

use super::super::for_each_block;
use super::super::gemm::{Output, Threads, gemm};
use super::super::matrix::{Matrix, MatrixMut};
use super::super::real::Real;
use super::super::transpose::transpose;
use super::super::unwritten::Unwritten;
use super::{Operands, Tile};
use crate::ops::attention::AttentionShape;

/// The products of the forward pass, of a tile each.
pub trait Products<T>: Sync {
    /// Rows of a tile.
    const ROWS: usize;

    /// Writes the scores, `q · kᵀ / sqrt(head_dim)`.
    fn scores(&self, tile: Tile, scores: &mut [T]);

    /// Adds the values times `weights` to `out`, `[rows, head_dim]`, or replaces it: see [`Tile::output`].
    fn add_values(&self, tile: Tile, weights: &[T], out: MatrixMut<'_, T>);
}

/// The products of the backward pass, of a tile each.
pub trait GradientProducts<T>: Sync {
    /// Rows of a tile.
    const ROWS: usize;

    /// Writes the scores as [`Products::scores`] to `p`, and `dout · vᵀ` to `ds`.
    fn scores(&self, tile: Tile, p: &mut [T], ds: &mut [T]);

    /// Adds the gradients of the rows of the tile in `q`, and of its columns in `k` and `v`, that are wanted.
    fn add_gradients(
        &self,
        tile: Tile,
        scores: [&[T]; 2],
        dq: Option<MatrixMut<'_, T>>,
        dk: Option<MatrixMut<'_, T>>,
        dv: Option<MatrixMut<'_, T>>,
    );
}

/// The most rows that `gemm` multiplies without packing the other operand: eight register tiles of six.
const ROWS: usize = 48;

impl<'a, S> Operands<'a, S> {
    /// The queries of a tile, `[rows, head_dim]`.
    pub fn queries(&self, tile: Tile) -> Matrix<'a, S> {
        query_rows(self.q, self.shape, tile)
    }

    /// The keys of a tile, `[columns, head_dim]`.
    pub fn keys(&self, tile: Tile) -> Matrix<'a, S> {
        key_rows(self.k, self.shape, tile)
    }

    /// The values of a tile, `[columns, head_dim]`.
    pub fn values(&self, tile: Tile) -> Matrix<'a, S> {
        key_rows(self.v, self.shape, tile)
    }
}

/// The rows of a tile of what is shaped as the queries.
pub fn query_rows<S>(x: &[S], shape: AttentionShape, tile: Tile) -> Matrix<'_, S> {
    let x = &x[shape.q_offset(tile.batch, tile.start, tile.head)..];
    Matrix::new(x, [tile.rows, shape.head_dim], [shape.q_stride(), 1])
}

fn key_rows<S>(x: &[S], shape: AttentionShape, tile: Tile) -> Matrix<'_, S> {
    let x = &x[shape.kv_offset(tile.batch, tile.first, tile.kv_head)..];
    Matrix::new(x, [tile.columns, shape.head_dim], [shape.kv_stride(), 1])
}

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
        let mut result = Unwritten::new(batch * kv_heads * head_dim * seq);
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
        // SAFETY: the blocks are all heads, and `transpose` writes all of a head; if the shape is empty, so
        // is the result, or nobody reads it.
        Transposed { values: unsafe { result.written() }, shape }
    }

    /// The columns of a tile, `[head_dim, columns]`.
    fn columns(&self, tile: Tile) -> Matrix<'_, T> {
        let AttentionShape { keys, kv_heads, head_dim, .. } = self.shape;
        let head = (tile.batch * kv_heads + tile.kv_head) * head_dim * keys;
        Matrix::new(&self.values[head + tile.first..], [head_dim, tile.columns], [keys, 1])
    }
}

/// The products of the forward pass.
pub struct Reals<'a, T> {
    operands: Operands<'a, T>,
    keys: Option<Transposed<T>>,
}

impl<'a, T: Real> Reals<'a, T> {
    /// For `few` queries, keys are read where they are: transposing all of them would cost more than
    /// multiplying with them.
    pub fn new(operands: Operands<'a, T>, few: bool) -> Self {
        let keys = (!few).then(|| Transposed::new(operands.k, operands.shape));
        Reals { operands, keys }
    }
}

impl<T: Real> Products<T> for Reals<'_, T> {
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
pub struct RealGradients<'a, T> {
    operands: Operands<'a, T>,
    dout: &'a [T],
    keys: Transposed<T>,
    values: Transposed<T>,
}

impl<'a, T: Real> RealGradients<'a, T> {
    /// `dout` is the gradient of the result.
    pub fn new(operands: Operands<'a, T>, dout: &'a [T]) -> Self {
        let [keys, values] = [operands.k, operands.v].map(|x| Transposed::new(x, operands.shape));
        RealGradients { operands, dout, keys, values }
    }

    fn dout(&self, tile: Tile) -> Matrix<'_, T> {
        query_rows(self.dout, self.operands.shape, tile)
    }
}

impl<T: Real> GradientProducts<T> for RealGradients<'_, T> {
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
