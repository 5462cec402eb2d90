//! The operands of attention, and the tiles of the scores.

use super::super::matrix::Matrix;
use super::super::products::Output;
use super::super::scalar::{Real, Scalar};
use crate::ops::attention::AttentionShape;

/// Rows (queries) that a tile has at most.
pub const MOST_ROWS: usize = 64;
/// Columns (keys) of a tile: a multiple of the vector loops' width and of the panels of `bf16`, and small
/// enough that two tiles of scores stay in a core's L2 cache beside the operands.
pub const COLUMNS: usize = 192;

/// The places of rows in memory.
impl AttentionShape {
    /// Elements between two rows of one query head.
    pub fn q_stride(self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements between two rows of one key head.
    pub fn kv_stride(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// The index of the first element of row `row` of a query head.
    pub fn q_offset(self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.seq + row) * self.heads + head) * self.head_dim
    }

    /// The index of the first element of row `row` of a key head.
    pub fn kv_offset(self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.capacity + row) * self.kv_heads + head) * self.head_dim
    }

    /// The row of the sequence that the query in row `row` belongs to.
    pub fn position(self, row: usize) -> usize {
        self.keys - self.seq + row
    }
}

/// The operands of attention: `q` is `[batch, seq, heads, head_dim]`, `k` and `v` are
/// `[batch, capacity, kv_heads, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, T> {
    /// Queries.
    pub q: &'a [T],
    /// Keys.
    pub k: &'a [T],
    /// Values.
    pub v: &'a [T],
    /// Their sizes.
    pub shape: AttentionShape,
}

/// A tile of the scores of one head.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// The sequence.
    pub batch: usize,
    /// The query head.
    pub head: usize,
    /// The key head that it shares.
    pub kv_head: usize,
    /// The first row (query).
    pub start: usize,
    /// Number of rows.
    pub rows: usize,
    /// The first column (key).
    pub first: usize,
    /// Number of columns.
    pub columns: usize,
}

impl Tile {
    /// What a product with this tile does to the sums over the columns before it. Before the first column
    /// there are no sums, and their memory need not have been touched.
    pub fn output<T: Real>(self) -> Output<T> {
        if self.first == 0 { Output::Overwrite(T::ONE) } else { Output::Add }
    }
}

impl<S: Scalar> Operands<'_, S> {
    /// The factor of scores.
    pub fn scale(&self) -> S::Real {
        S::Real::from_f64(1.0 / (self.shape.head_dim as f64).sqrt())
    }

    /// The rows of a tile in `x`, which has the shape of the queries: `[rows, head_dim]`.
    pub fn rows<'a>(&self, x: &'a [S], tile: Tile) -> Matrix<'a, S> {
        let shape = self.shape;
        let x = &x[shape.q_offset(tile.batch, tile.start, tile.head)..];
        Matrix::new(x, [tile.rows, shape.head_dim], [shape.q_stride(), 1])
    }
}

/// How many of the columns from `first` on are visible to row `row`. In the first tile it is at least one, so
/// that the running maximum is finite from there on, and a tile without a visible column adds nothing.
#[inline(always)]
pub fn visible(row: usize, first: usize, columns: usize) -> usize {
    (row + 1).saturating_sub(first).min(columns)
}
