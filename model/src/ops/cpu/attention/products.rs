//! The matrix products that attention is written over.

use super::super::matrix::MatrixMut;
use super::tile::Tile;

/// The products of the forward pass, each with one tile.
pub trait Products<T>: Sync {
    /// Rows of a tile, at most.
    const ROWS: usize;

    /// Writes the scores, `q · kᵀ / sqrt(head_dim)`.
    fn scores(&self, tile: Tile, scores: &mut [T]);

    /// Adds the values times `weights` to `out`, `[rows, head_dim]`, or replaces it: see [`Tile::output`].
    fn add_values(&self, tile: Tile, weights: &[T], out: MatrixMut<'_, T>);
}

/// The products of the backward pass, each with one tile.
pub trait GradientProducts<T>: Sync {
    /// Rows of a tile, at most.
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
