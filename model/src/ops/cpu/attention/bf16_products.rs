//! The matrix products of attention in bf16, by the processor's own instructions.
//!
//! Keys and values are packed once, head by head. Weights and gradients of scores are rounded to bf16 before
//! they are multiplied; sums are `f32`.

use std::ops::Range;

use burn::tensor::bf16;
use rayon::prelude::*;

use super::super::bf16::{Bf16Gemm, Right};
use super::super::gemm::{Output, Threads};
use super::super::matrix::{Matrix, MatrixMut};
use super::super::parallel::simd;
use super::super::scalar::Scalar;
use super::products::{GradientProducts, Products};
use super::tile::{Operands, Tile, query_rows};
use crate::ops::attention::AttentionShape;

/// Two panels of rows.
const ROWS: usize = 64;

/// Packed keys or values of all heads.
struct Heads {
    heads: Vec<Right>,
    kv_heads: usize,
}

impl Heads {
    /// Packs the rows of each head, `[keys, head_dim]`, after `of` has mapped them.
    fn new(
        gemm: Bf16Gemm,
        x: &[bf16],
        shape: AttentionShape,
        of: impl Fn(Matrix<'_, bf16>) -> Matrix<'_, bf16> + Sync,
    ) -> Self {
        let AttentionShape { batch, keys, kv_heads, head_dim, .. } = shape;
        let count = if shape.is_empty() { 0 } else { batch * kv_heads };
        let pack = |i: usize| {
            let x = &x[shape.kv_offset(i / kv_heads, 0, i % kv_heads)..];
            let rows = Matrix::new(x, [keys, head_dim], [shape.kv_stride(), 1]);
            gemm.right(of(rows), Threads::One)
        };
        Heads { heads: (0..count).into_par_iter().map(pack).collect(), kv_heads }
    }

    fn of(&self, tile: Tile) -> &Right {
        &self.heads[tile.batch * self.kv_heads + tile.kv_head]
    }
}

/// The columns of a tile.
fn columns(tile: Tile) -> Range<usize> {
    tile.first..tile.first + tile.columns
}

/// Rounded copies of a tile's values.
fn rounded(values: &[f32], tile: Tile) -> Vec<bf16> {
    let mut result = vec![bf16::ZERO; tile.rows * tile.columns];
    simd(
        #[inline(always)]
        || {
            for (result, &value) in result.iter_mut().zip(values) {
                *result = bf16::nearest(value);
            }
        },
    );
    result
}

/// Writes the scores of `q`, `[rows, head_dim]`, and the packed keys, `[head_dim, keys]`.
fn write_scores(gemm: Bf16Gemm, operands: &Operands<'_, bf16>, keys: &Heads, tile: Tile, scores: &mut [f32]) {
    let q = gemm.left(operands.queries(tile), Threads::One);
    let keys = keys.of(tile).slice(0..operands.shape.head_dim, columns(tile));
    let out = MatrixMut::rows(scores, [tile.rows, tile.columns]);
    gemm.multiply(out, Output::Overwrite, &q, keys, Threads::One);
    let scale = operands.scale();
    simd(
        #[inline(always)]
        || scores.iter_mut().for_each(|score| *score *= scale),
    );
}

/// The products of the forward pass.
pub struct Bf16Products<'a> {
    gemm: Bf16Gemm,
    operands: Operands<'a, bf16>,
    /// `[head_dim, keys]` each.
    keys: Heads,
    /// `[keys, head_dim]` each.
    values: Heads,
}

impl<'a> Bf16Products<'a> {
    /// Packs keys and values.
    pub fn new(gemm: Bf16Gemm, operands: Operands<'a, bf16>) -> Self {
        let keys = Heads::new(gemm, operands.k, operands.shape, |rows| rows.t());
        let values = Heads::new(gemm, operands.v, operands.shape, |rows| rows);
        Bf16Products { gemm, operands, keys, values }
    }
}

impl Products<f32> for Bf16Products<'_> {
    const ROWS: usize = ROWS;

    fn scores(&self, tile: Tile, scores: &mut [f32]) {
        write_scores(self.gemm, &self.operands, &self.keys, tile, scores);
    }

    fn add_values(&self, tile: Tile, weights: &[f32], out: MatrixMut<'_, f32>) {
        let weights = rounded(weights, tile);
        let weights = Matrix::rows(&weights, [tile.rows, tile.columns]);
        let weights = self.gemm.left(weights, Threads::One);
        let values = self.values.of(tile).slice(columns(tile), 0..self.operands.shape.head_dim);
        self.gemm.multiply(out, tile.output(), &weights, values, Threads::One);
    }
}

/// The products of the backward pass.
pub struct Bf16GradientProducts<'a> {
    gemm: Bf16Gemm,
    operands: Operands<'a, bf16>,
    dout: &'a [bf16],
    /// `[head_dim, keys]` each.
    keys: Heads,
    values: Heads,
    /// `[keys, head_dim]` each.
    key_rows: Heads,
}

impl<'a> Bf16GradientProducts<'a> {
    /// Packs keys and values; `dout` is the gradient of the result.
    pub fn new(gemm: Bf16Gemm, operands: Operands<'a, bf16>, dout: &'a [bf16]) -> Self {
        let (k, v, shape) = (operands.k, operands.v, operands.shape);
        let keys = Heads::new(gemm, k, shape, |rows| rows.t());
        let values = Heads::new(gemm, v, shape, |rows| rows.t());
        let key_rows = Heads::new(gemm, k, shape, |rows| rows);
        Bf16GradientProducts { gemm, operands, dout, keys, values, key_rows }
    }

    fn dout(&self, tile: Tile) -> Matrix<'_, bf16> {
        query_rows(self.dout, self.operands.shape, tile)
    }
}

impl GradientProducts<f32> for Bf16GradientProducts<'_> {
    const ROWS: usize = ROWS;

    fn scores(&self, tile: Tile, p: &mut [f32], ds: &mut [f32]) {
        let gemm = self.gemm;
        write_scores(gemm, &self.operands, &self.keys, tile, p);
        let dout = gemm.left(self.dout(tile), Threads::One);
        let values = self.values.of(tile).slice(0..self.operands.shape.head_dim, columns(tile));
        let out = MatrixMut::rows(ds, [tile.rows, tile.columns]);
        gemm.multiply(out, Output::Overwrite, &dout, values, Threads::One);
    }

    fn add_gradients(
        &self,
        tile: Tile,
        scores: [&[f32]; 2],
        dq: Option<MatrixMut<'_, f32>>,
        dk: Option<MatrixMut<'_, f32>>,
        dv: Option<MatrixMut<'_, f32>>,
    ) {
        let gemm = self.gemm;
        let rounded = scores.map(|scores| rounded(scores, tile));
        let [p, ds] = rounded.each_ref().map(|s| Matrix::rows(s, [tile.rows, tile.columns]));
        // out += weightsᵀ · rows
        let add = |out, weights: Matrix<'_, bf16>, rows: Matrix<'_, bf16>| {
            let weights = gemm.left(weights.t(), Threads::One);
            let rows = gemm.right(rows, Threads::One);
            gemm.multiply(out, Output::Add, &weights, rows.all(), Threads::One);
        };
        if let Some(dv) = dv {
            add(dv, p, self.dout(tile));
        }
        if let Some(dk) = dk {
            add(dk, ds, self.operands.queries(tile));
        }
        if let Some(dq) = dq {
            let keys = self.key_rows.of(tile).slice(columns(tile), 0..self.operands.shape.head_dim);
            gemm.multiply(dq, Output::Add, &gemm.left(ds, Threads::One), keys, Threads::One);
        }
    }
}
