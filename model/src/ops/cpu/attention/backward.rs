//! The backward pass, which recomputes the tiles of scores, one key head per task.

use burn_flex::FlexTensor;

use super::super::matrix::MatrixMut;
use super::super::parallel::{for_each_item, simd};
use super::super::products::Products;
use super::super::scalar::{Real, Scalar, dot};
use super::super::uninit::zeros;
use super::super::values::tensor_of;
use super::products::BackwardProducts;
use super::tile::{COLUMNS, MOST_ROWS, Tile};
use crate::ops::attention::AttentionShape;

impl<S: Scalar, P: Products<S, S::Real>> BackwardProducts<'_, S, P> {
    /// Returns the requested gradients of `qkv`, in their dtypes. Requires a query for every row; `out` is the result.
    ///
    /// A task computes the gradients of one key head and of its query heads, so that threads share no sums.
    pub fn backward(
        &self,
        out: &[S],
        lse: &[S::Real],
        qkv: &[FlexTensor; 3],
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        const { assert!(P::ROWS <= MOST_ROWS) };
        let (operands, shape) = (self.operands, self.operands.shape);
        let AttentionShape { seq, heads, kv_heads, .. } = shape;
        debug_assert!(seq == shape.keys && seq == shape.capacity, "{shape:?}");
        let group = heads / kv_heads;
        let mut dq = zeros::<S::Real>(wanted[0], operands.q.len());
        let mut dk = zeros::<S::Real>(wanted[1], operands.k.len());
        let mut dv = zeros::<S::Real>(wanted[2], operands.v.len());
        let gradients = by_key_head(dq.as_deref_mut(), shape, group)
            .into_iter()
            .zip(by_key_head(dk.as_deref_mut(), shape, 1))
            .zip(by_key_head(dv.as_deref_mut(), shape, 1));
        for_each_item(gradients, usize::MAX, |i, ((dq, dk), dv)| {
            let mut tiles = vec![S::Real::ZERO; 2 * P::ROWS * COLUMNS];
            let mut backward = KeyHead { products: self, out, lse, dk, dv, tiles: &mut tiles };
            let mut dq = dq.map(|dq| dq.split_columns(group));
            for member in 0..group {
                let head = i % kv_heads * group + member;
                let dq = dq.as_mut().and_then(Iterator::next);
                backward.query_head([i / kv_heads, head], dq);
            }
        });
        let tensor = |gradient: Option<_>, like: &FlexTensor| {
            gradient.map(|values| tensor_of(values, like.layout().shape().clone(), like.dtype()))
        };
        [tensor(dq, &qkv[0]), tensor(dk, &qkv[1]), tensor(dv, &qkv[2])]
    }
}

/// Splits `x`, `[batch, seq, heads, head_dim]`, into one matrix per sequence and key head, with the columns of the
/// key head's `group` query heads.
fn by_key_head<T: Real>(
    x: Option<&mut [T]>,
    shape: AttentionShape,
    group: usize,
) -> Vec<Option<MatrixMut<'_, T>>> {
    let AttentionShape { batch, seq, kv_heads, head_dim, .. } = shape;
    let width = group * kv_heads * head_dim;
    match x {
        _ if shape.is_empty() => Vec::new(),
        None => std::iter::repeat_with(|| None).take(batch * kv_heads).collect(),
        Some(x) => x
            .chunks_exact_mut(seq * width)
            .flat_map(|x| MatrixMut::rows(x, [seq, width]).split_columns(kv_heads))
            .map(Some)
            .collect(),
    }
}

struct KeyHead<'a, 'b, S: Scalar, P: Products<S, S::Real>> {
    products: &'b BackwardProducts<'a, S, P>,
    out: &'b [S],
    lse: &'b [S::Real],
    /// `[seq, head_dim]` each.
    dk: Option<MatrixMut<'b, S::Real>>,
    dv: Option<MatrixMut<'b, S::Real>>,
    tiles: &'b mut [S::Real],
}

impl<S: Scalar, P: Products<S, S::Real>> KeyHead<'_, '_, S, P> {
    /// Adds the contributions of one query head; `dq` is `[seq, head_dim]`.
    fn query_head(&mut self, [batch, head]: [usize; 2], mut dq: Option<MatrixMut<'_, S::Real>>) {
        let BackwardProducts { operands, dout, .. } = *self.products;
        let shape = operands.shape;
        let AttentionShape { seq, heads, kv_heads, head_dim, .. } = shape;
        let (stride, kv_head) = (shape.q_stride(), head / (heads / kv_heads));
        let scale = operands.scale();
        let (p, ds) = self.tiles.split_at_mut(P::ROWS * COLUMNS);
        for start in (0..seq).step_by(P::ROWS) {
            let rows = P::ROWS.min(seq - start);
            let offset = shape.q_offset(batch, start, head);
            let (out, dout) = (&self.out[offset..], &dout[offset..]);
            // The logarithm of each row's sum, and D = rowsum(dO ∘ O).
            let mut row_values = [(S::Real::ZERO, S::Real::ZERO); MOST_ROWS];
            for (row, value) in row_values[..rows].iter_mut().enumerate() {
                let range = row * stride..row * stride + head_dim;
                let product = simd(
                    #[inline(always)]
                    || dot(&out[range.clone()], &dout[range.clone()]),
                );
                *value = (self.lse[(batch * seq + start + row) * heads + head], product);
            }

            let seen = shape.columns(start, rows);
            for first in seen.clone().step_by(COLUMNS) {
                let columns = COLUMNS.min(seen.end - first);
                let is_first = first == seen.start;
                let tile = Tile { batch, head, kv_head, start, rows, first, columns, is_first };
                let (p, ds) = (&mut p[..rows * columns], &mut ds[..rows * columns]);
                self.products.scores(tile, p, ds);
                simd(
                    #[inline(always)]
                    || {
                        let tile = p.chunks_exact_mut(columns).zip(ds.chunks_exact_mut(columns));
                        for (row, ((p, ds), &(lse, product))) in tile.zip(&row_values).enumerate() {
                            let visible = shape.visible(start + row, first, columns);
                            p[..visible.start].fill(S::Real::NEG_INFINITY);
                            p[visible.end..].fill(S::Real::NEG_INFINITY);
                            for (p, ds) in p.iter_mut().zip(ds) {
                                *p = (*p - lse).exp();
                                *ds = *p * (*ds - product) * scale;
                            }
                        }
                    },
                );
                let keys = first..first + columns;
                self.products.add_gradients(
                    tile,
                    [p, ds],
                    dq.as_mut().map(|dq| dq.slice(start..start + rows)),
                    self.dk.as_mut().map(|dk| dk.slice(keys.clone())),
                    self.dv.as_mut().map(|dv| dv.slice(keys)),
                );
            }
        }
    }
}
