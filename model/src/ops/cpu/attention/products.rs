//! The matrix products of attention, one tile at a time.

use std::ops::Range;

use super::super::matrix::{Matrix, MatrixMut};
use super::super::parallel::map_items;
use super::super::products::{Output, Products, Threads};
use super::super::scalar::{Real, Scalar};
use super::tile::{Operands, Tile};

struct Heads<R> {
    heads: Vec<R>,
    kv_heads: usize,
}

impl<R: Send> Heads<R> {
    fn new<'a, S: Scalar>(
        x: &'a [S],
        operands: Operands<'a, S>,
        right: impl Fn(Matrix<'a, S>) -> R + Sync,
    ) -> Self {
        let shape = operands.shape;
        let (kv_heads, size) = (shape.kv_heads, [shape.keys, shape.head_dim]);
        let count = if shape.is_empty() { 0 } else { shape.batch * kv_heads };
        let head = |i: usize| {
            let x = &x[shape.kv_offset(i / kv_heads, 0, i % kv_heads)..];
            right(Matrix::new(x, size, [shape.kv_stride(), 1]))
        };
        Heads { heads: map_items(0..count, head), kv_heads }
    }

    fn of(&self, tile: Tile) -> &R {
        &self.heads[tile.batch * self.kv_heads + tile.kv_head]
    }
}

fn columns(tile: Tile) -> Range<usize> {
    tile.first..tile.first + tile.columns
}

/// Products of the forward pass, of type `S` with sums in `S::Real`.
pub struct ForwardProducts<'a, S: Scalar, P: Products<S, S::Real>> {
    pub operands: Operands<'a, S>,
    products: P,
    /// `[head_dim, keys]` each.
    keys: Heads<P::Right<'a>>,
    /// `[keys, head_dim]` each.
    values: Heads<P::Right<'a>>,
}

impl<'a, S: Scalar, P: Products<S, S::Real>> ForwardProducts<'a, S, P> {
    /// Prepares the operands. If `few`, reads keys in place: transposing would take longer than the product.
    pub fn new(products: P, operands: Operands<'a, S>, few: bool) -> Self {
        let keys = Heads::new(operands.k, operands, |rows| match few {
            true => products.right(rows.t(), Threads::One),
            false => products.transposed_right(rows.t()),
        });
        let values = Heads::new(operands.v, operands, |rows| products.right(rows, Threads::One));
        ForwardProducts { operands, products, keys, values }
    }

    /// Writes the scores, `q · kᵀ / sqrt(head_dim)`.
    pub fn scores(&self, tile: Tile, scores: &mut [S::Real]) {
        let (queries, scale) = (self.operands.rows(self.operands.q, tile), self.operands.scale());
        write_scores(self.products, queries, self.keys.of(tile), scale, tile, scores);
    }

    /// Adds the values times `weights` to `out`, `[rows, head_dim]`, or overwrites `out`: see [`Tile::output`].
    pub fn add_values(&self, tile: Tile, weights: &[S::Real], out: MatrixMut<'_, S::Real>) {
        let weights = self.products.operands(weights.into());
        let weights = Matrix::rows(&weights, [tile.rows, tile.columns]);
        let weights = self.products.left(weights, Threads::One);
        let part = [columns(tile), 0..self.operands.shape.head_dim];
        self.products.multiply(out, tile.output(), &weights, self.values.of(tile), part, Threads::One);
    }
}

pub struct BackwardProducts<'a, S: Scalar, P: Products<S, S::Real>> {
    pub operands: Operands<'a, S>,
    pub dout: &'a [S],
    products: P,
    /// `[head_dim, keys]` each.
    keys: Heads<P::Right<'a>>,
    values: Heads<P::Right<'a>>,
    /// `[keys, head_dim]` each.
    key_rows: Heads<P::Right<'a>>,
}

impl<'a, S: Scalar, P: Products<S, S::Real>> BackwardProducts<'a, S, P> {
    pub fn new(products: P, operands: Operands<'a, S>, dout: &'a [S]) -> Self {
        let transposed = |x| Heads::new(x, operands, |rows| products.transposed_right(rows.t()));
        let (keys, values) = (transposed(operands.k), transposed(operands.v));
        let key_rows = Heads::new(operands.k, operands, |rows| products.right(rows, Threads::One));
        BackwardProducts { operands, dout, products, keys, values, key_rows }
    }

    /// Writes the scores to `p`, and `dout · vᵀ` to `ds`.
    pub fn scores(&self, tile: Tile, p: &mut [S::Real], ds: &mut [S::Real]) {
        let [q, dout] = [self.operands.q, self.dout].map(|x| self.operands.rows(x, tile));
        write_scores(self.products, q, self.keys.of(tile), self.operands.scale(), tile, p);
        write_scores(self.products, dout, self.values.of(tile), S::Real::ONE, tile, ds);
    }

    /// Adds the requested gradients: of `q` for the tile's rows, of `k` and `v` for its columns.
    pub fn add_gradients(
        &self,
        tile: Tile,
        scores: [&[S::Real]; 2],
        dq: Option<MatrixMut<'_, S::Real>>,
        dk: Option<MatrixMut<'_, S::Real>>,
        dv: Option<MatrixMut<'_, S::Real>>,
    ) {
        let products = self.products;
        let scores = scores.map(|scores| products.operands(scores.into()));
        let [p, ds] = scores.each_ref().map(|scores| Matrix::rows(scores, [tile.rows, tile.columns]));
        let head_dim = self.operands.shape.head_dim;
        let add = |out: Option<MatrixMut<'_, S::Real>>, weights: Matrix<'_, S>, x: &[S]| {
            let Some(out) = out else { return };
            let lhs = products.left(weights.t(), Threads::One);
            let rhs = products.right(self.operands.rows(x, tile), Threads::One);
            let all = [0..tile.rows, 0..head_dim];
            products.multiply(out, Output::Add, &lhs, &rhs, all, Threads::One);
        };
        add(dv, p, self.dout);
        add(dk, ds, self.operands.q);
        if let Some(dq) = dq {
            let (lhs, rhs) = (products.left(ds, Threads::One), self.key_rows.of(tile));
            products.multiply(dq, Output::Add, &lhs, rhs, [columns(tile), 0..head_dim], Threads::One);
        }
    }
}

/// Writes `scale` times `rows`, `[rows, head_dim]`, times a tile of the columns of `keys`, `[head_dim, keys]`.
fn write_scores<'a, S: Scalar, P: Products<S, S::Real>>(
    products: P,
    rows: Matrix<'_, S>,
    keys: &P::Right<'a>,
    scale: S::Real,
    tile: Tile,
    scores: &mut [S::Real],
) {
    let [_, head_dim] = rows.shape();
    let lhs = products.left(rows, Threads::One);
    let out = MatrixMut::rows(scores, [tile.rows, tile.columns]);
    let part = [0..head_dim, columns(tile)];
    products.multiply(out, Output::Overwrite(scale), &lhs, keys, part, Threads::One);
}
