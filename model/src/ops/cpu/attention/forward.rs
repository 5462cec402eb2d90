//! The forward pass: for each tile of rows, a loop over tiles of columns with a running maximum and sum.

use std::ops::Range;

use burn_flex::FlexTensor;

use super::super::matrix::MatrixMut;
use super::super::parallel::{for_each_item, simd};
use super::super::products::Products;
use super::super::scalar::{Real, Scalar, exp_sum, max};
use super::super::values::{new_tensor, tensor_of};
use super::products::ForwardProducts;
use super::tile::{COLUMNS, MOST_ROWS, Tile};
use crate::ops::attention::AttentionShape;

impl<S: Scalar, P: Products<S, S::Real>> ForwardProducts<'_, S, P> {
    /// Returns the result, like `q`, and the logarithm of each row's sum of exponentials, `[batch, seq, heads]`.
    pub fn forward(&self, q: &FlexTensor) -> (FlexTensor, FlexTensor) {
        const { assert!(P::ROWS <= MOST_ROWS) };
        let shape = self.operands.shape;
        let AttentionShape { batch, seq, heads, .. } = shape;
        let mut out = vec![S::Real::ZERO; self.operands.q.len()];
        let mut lse = vec![S::Real::ZERO; batch * seq * heads];
        let stride = shape.q_stride();
        let tiles: Vec<_> = out
            .chunks_mut((seq * stride).max(1))
            .zip(lse.chunks_mut((seq * heads).max(1)))
            .enumerate()
            .flat_map(|(batch, (out, lse))| {
                out.chunks_mut(P::ROWS * stride)
                    .zip(lse.chunks_mut(P::ROWS * heads))
                    .enumerate()
                    .map(move |(tile, (out, lse))| ((batch, tile * P::ROWS), out, lse))
            })
            .collect();
        for_each_item(tiles, usize::MAX, |_, (place, out, lse)| {
            let mut scores = vec![S::Real::ZERO; P::ROWS * COLUMNS];
            self.forward_rows(place, &mut scores, out, lse);
        });
        let out = tensor_of(out, q.layout().shape().clone(), q.dtype());
        (out, new_tensor(lse, [batch, seq, heads]))
    }

    /// Computes one tile of rows of every head. Divides the sums in `out` by the sum of the weights at the end.
    fn forward_rows(
        &self,
        (batch, start): (usize, usize),
        scores: &mut [S::Real],
        out: &mut [S::Real],
        lse: &mut [S::Real],
    ) {
        let shape = self.operands.shape;
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let q_stride = shape.q_stride();
        let rows = lse.len() / heads;
        let seen = shape.columns(start, rows);
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let mut running = [(S::Real::NEG_INFINITY, S::Real::ZERO); MOST_ROWS];
            for first in seen.clone().step_by(COLUMNS) {
                let columns = COLUMNS.min(seen.end - first);
                let is_first = first == seen.start;
                let tile = Tile { batch, head, kv_head, start, rows, first, columns, is_first };
                let scores = &mut scores[..rows * columns];
                self.scores(tile, scores);
                simd(
                    #[inline(always)]
                    || {
                        for (row, (scores, running)) in
                            scores.chunks_exact_mut(columns).zip(&mut running).enumerate()
                        {
                            let visible = shape.visible(start + row, first, columns);
                            let out = &mut out[row * q_stride + head * head_dim..][..head_dim];
                            softmax_step(scores, visible, running, out);
                        }
                    },
                );
                let out = MatrixMut::new(&mut out[head * head_dim..], [rows, head_dim], q_stride);
                self.add_values(tile, scores, out);
            }
            for (row, (max, sum)) in running.into_iter().take(rows).enumerate() {
                lse[row * heads + head] = max + sum.ln();
                let out = &mut out[row * q_stride + head * head_dim..][..head_dim];
                out.iter_mut().for_each(|value| *value = *value / sum);
            }
        }
    }
}

/// Turns scores into weights relative to the running maximum, and rescales the sums in `out` to that maximum.
#[inline(always)]
fn softmax_step<T: Real>(scores: &mut [T], visible: Range<usize>, running: &mut (T, T), out: &mut [T]) {
    // The loops below run over whole rows; the exponential of −∞ is 0.
    scores[..visible.start].fill(T::NEG_INFINITY);
    scores[visible.end..].fill(T::NEG_INFINITY);
    let (old_max, old_sum) = *running;
    let tile_max = max(scores);
    let new_max = if tile_max > old_max { tile_max } else { old_max };
    let sum = exp_sum(scores, new_max);
    // In the first tile, `old_max` is −∞, which makes the factor 0: there are no earlier sums.
    let factor = (old_max - new_max).exp();
    *running = (new_max, old_sum * factor + sum);
    if factor != T::ONE && old_max > T::NEG_INFINITY {
        out.iter_mut().for_each(|value| *value *= factor);
    }
}
