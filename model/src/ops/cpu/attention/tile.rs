//! The operands of attention, and the tiles of the scores.

use std::ops::Range;

use super::super::matrix::Matrix;
use super::super::products::Output;
use super::super::scalar::{Real, Scalar};
use crate::ops::attention::AttentionShape;

/// Maximum rows (queries) of a tile.
pub const MOST_ROWS: usize = 64;
/// Columns (keys) of a tile: whole vectors and panels, and two tiles of scores fit in a core's L2 cache.
pub const COLUMNS: usize = 192;
/// Alignment of the first tile of columns, as products require.
const ALIGNMENT: usize = 32;
// Each row sees at least one column of the first tile.
const _: () = assert!(ALIGNMENT + MOST_ROWS <= COLUMNS);

impl AttentionShape {
    /// Elements between two rows of one query head.
    pub fn q_stride(self) -> usize {
        self.heads * self.head_dim
    }

    pub fn kv_stride(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Index of the first element of row `row` of a query head.
    pub fn q_offset(self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.seq + row) * self.heads + head) * self.head_dim
    }

    pub fn kv_offset(self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.capacity + row) * self.kv_heads + head) * self.head_dim
    }

    /// Returns the position in the sequence of the query in row `row`.
    pub fn position(self, row: usize) -> usize {
        self.keys - self.seq + row
    }

    /// Returns the columns to which `rows` rows from `start` on attend, from a multiple of `ALIGNMENT` on.
    pub fn columns(self, start: usize, rows: usize) -> Range<usize> {
        let first = self.first_seen(self.position(start));
        first - first % ALIGNMENT..self.position(start + rows)
    }

    /// Returns the columns, of `columns` from `first` on, to which row `row` attends. The first tile has at least one,
    /// which makes the running maximum finite: later tiles without visible columns add nothing.
    #[inline(always)]
    pub fn visible(self, row: usize, first: usize, columns: usize) -> Range<usize> {
        let position = self.position(row);
        let end = (position + 1).saturating_sub(first).min(columns);
        self.first_seen(position).saturating_sub(first).min(end)..end
    }
}

/// Operands of attention: `q` is `[batch, seq, heads, head_dim]`, others `[batch, capacity, kv_heads, head_dim]`.
#[derive(Clone, Copy, Debug)]
pub struct Operands<'a, T> {
    pub q: &'a [T],
    pub k: &'a [T],
    pub v: &'a [T],
    pub shape: AttentionShape,
}

/// A tile of the scores of one head.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    pub batch: usize,
    pub head: usize,
    pub kv_head: usize,
    /// The first row (query).
    pub start: usize,
    pub rows: usize,
    /// The first column (key).
    pub first: usize,
    pub columns: usize,
    /// True if no row of the tile attends to an earlier column.
    pub is_first: bool,
}

impl Tile {
    /// Returns how products treat the sums over earlier columns. The first tile overwrites uninitialised memory.
    pub fn output<T: Real>(self) -> Output<T> {
        if self.is_first { Output::Overwrite(T::ONE) } else { Output::Add }
    }
}

impl<S: Scalar> Operands<'_, S> {
    pub fn scale(&self) -> S::Real {
        S::Real::from_f64(1.0 / (self.shape.head_dim as f64).sqrt())
    }

    /// Returns a tile's rows of `x`, which has the shape of the queries: `[rows, head_dim]`.
    pub fn rows<'a>(&self, x: &'a [S], tile: Tile) -> Matrix<'a, S> {
        let shape = self.shape;
        let x = &x[shape.q_offset(tile.batch, tile.start, tile.head)..];
        Matrix::new(x, [tile.rows, shape.head_dim], [shape.q_stride(), 1])
    }
}
