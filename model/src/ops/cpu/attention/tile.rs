//! The operands of attention, and the tiles of the scores.

use std::ops::Range;

use super::super::matrix::Matrix;
use super::super::products::Output;
use super::super::scalar::{Real, Scalar};
use crate::ops::attention::AttentionShape;

/// Maximum rows (queries) of a tile.
pub const MOST_ROWS: usize = 64;
/// Columns (keys) of a tile: a multiple of the vector loops' width and of the panels of `bf16`, and small
/// enough that two tiles of scores and the operands stay in a core's L2 cache.
pub const COLUMNS: usize = 192;
/// Alignment of the first tile of columns, as products require.
const ALIGNMENT: usize = 32;
// Guarantees that the first tile of columns has at least one column that is visible to each of its rows.
const _: () = assert!(ALIGNMENT + MOST_ROWS <= COLUMNS);

/// Offsets of rows in memory.
impl AttentionShape {
    /// Returns the number of elements between two rows of one query head.
    pub fn q_stride(self) -> usize {
        self.heads * self.head_dim
    }

    /// Returns the number of elements between two rows of one key head.
    pub fn kv_stride(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Returns the index of the first element of row `row` of a query head.
    pub fn q_offset(self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.seq + row) * self.heads + head) * self.head_dim
    }

    /// Returns the index of the first element of row `row` of a key head.
    pub fn kv_offset(self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.capacity + row) * self.kv_heads + head) * self.head_dim
    }

    /// Returns the position in the sequence of the query in row `row`.
    pub fn position(self, row: usize) -> usize {
        self.keys - self.seq + row
    }

    /// Returns the range of columns to which `rows` rows from `start` on attend, extended to whole tiles.
    pub fn columns(self, start: usize, rows: usize) -> Range<usize> {
        let first = self.first_seen(self.position(start));
        first - first % ALIGNMENT..self.position(start + rows)
    }

    /// Returns which of the `columns` columns from `first` on row `row` attends to. In the first tile, there is at
    /// least one such column: this makes the running maximum finite, so that later tiles without visible columns add
    /// nothing.
    #[inline(always)]
    pub fn visible(self, row: usize, first: usize, columns: usize) -> Range<usize> {
        let position = self.position(row);
        let end = (position + 1).saturating_sub(first).min(columns);
        self.first_seen(position).saturating_sub(first).min(end)..end
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
    /// The sizes of the operands.
    pub shape: AttentionShape,
}

/// A tile of the scores of one head.
#[derive(Clone, Copy, Debug)]
pub struct Tile {
    /// Index of the sequence.
    pub batch: usize,
    /// Index of the query head.
    pub head: usize,
    /// Index of the key head that the query head uses.
    pub kv_head: usize,
    /// The first row (query).
    pub start: usize,
    /// Number of rows.
    pub rows: usize,
    /// The first column (key).
    pub first: usize,
    /// Number of columns.
    pub columns: usize,
    /// True if no row of the tile attends to an earlier column.
    pub is_first: bool,
}

impl Tile {
    /// Returns whether a product with this tile adds to the sums over earlier columns, or overwrites them. The first
    /// tile overwrites, so its output memory need not be initialised.
    pub fn output<T: Real>(self) -> Output<T> {
        if self.is_first { Output::Overwrite(T::ONE) } else { Output::Add }
    }
}

impl<S: Scalar> Operands<'_, S> {
    /// Returns the factor for the scores.
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
