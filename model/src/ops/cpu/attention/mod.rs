//! The tiles of causal attention.
//!
//! Rows are `[batch, seq, heads, head_dim]`, so one head's rows are a strided matrix that the
//! matrix products (`products.rs`, `halves.rs`) read in place.

mod halves;
mod products;

use burn::backend::Flex;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use self::halves::{HalfGradients, Halves};
use self::products::{GradientProducts, Products, RealGradients, Reals};
use super::bf16::unit_for;
use super::gemm::Output;
use super::matrix::MatrixMut;
use super::real::{Real, Scalar, dot, exp_sum, max};
use super::values::Stored;
use super::{Values, simd, tensor_of, with_real, zeros};
use crate::ops::attention::{AttentionKernels, AttentionShape};

/// Rows (queries) that a tile has at most.
const MOST_ROWS: usize = 64;
/// Columns (keys) of a tile: a multiple of the vector loops' width and of the panels of `bf16`, and small
/// enough that two tiles of scores stay in a core's L2 cache beside the operands.
const COLUMNS: usize = 192;
/// Fewer queries than this read the keys where they are: transposing all keys would cost more than
/// multiplying with them.
const FEW_ROWS: usize = 16;

impl AttentionKernels for Flex {
    fn attention_forward(
        q: &FlexTensor,
        k: &FlexTensor,
        v: &FlexTensor,
        shape: AttentionShape,
    ) -> (FlexTensor, FlexTensor) {
        let few = shape.seq < FEW_ROWS && shape.seq < shape.keys;
        if let Some(unit) = unit_for([q, k, v]).filter(|_| !few) {
            let (q_values, k, v) = (Values::of(q), Values::of(k), Values::of(v));
            let operands = Operands { q: &q_values, k: &k, v: &v, shape };
            return operands.tensors(&Halves::new(unit, operands), q);
        }
        with_real!(q.dtype(), T => {
            let (q_values, k, v) = (Values::<T>::of(q), Values::<T>::of(k), Values::<T>::of(v));
            let operands = Operands { q: &q_values, k: &k, v: &v, shape };
            operands.tensors(&Reals::new(operands, few), q)
        })
    }

    fn attention_backward(
        qkv: &[FlexTensor; 3],
        (out, lse): &(FlexTensor, FlexTensor),
        dout: &FlexTensor,
        shape: AttentionShape,
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let [q, k, v] = qkv;
        if let Some(unit) = unit_for([q, k, v, out, dout]) {
            let (q, k, v) = (Values::of(q), Values::of(k), Values::of(v));
            let (out, lse, dout) = (Values::of(out), Values::<f32>::of(lse), Values::of(dout));
            let operands = Operands { q: &q, k: &k, v: &v, shape };
            let products = HalfGradients::new(unit, operands, &dout);
            return operands.gradients(&products, [&out, &dout], &lse, qkv, wanted);
        }
        with_real!(q.dtype(), T => {
            let (q, k, v) = (Values::<T>::of(q), Values::<T>::of(k), Values::<T>::of(v));
            let (out, lse, dout) = (Values::<T>::of(out), Values::of(lse), Values::<T>::of(dout));
            let operands = Operands { q: &q, k: &k, v: &v, shape };
            let products = RealGradients::new(operands, &dout);
            operands.gradients(&products, [&out, &dout], &lse, qkv, wanted)
        })
    }
}

impl AttentionShape {
    /// Elements between two rows of one query head.
    fn q_stride(self) -> usize {
        self.heads * self.head_dim
    }

    /// Elements between two rows of one key head.
    fn kv_stride(self) -> usize {
        self.kv_heads * self.head_dim
    }

    /// Where row `row` of a query head begins.
    fn q_offset(self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.seq + row) * self.heads + head) * self.head_dim
    }

    /// Where row `row` of a key head begins.
    fn kv_offset(self, batch: usize, row: usize, head: usize) -> usize {
        ((batch * self.capacity + row) * self.kv_heads + head) * self.head_dim
    }

    /// The row of the sequence that query `row` is.
    fn position(self, row: usize) -> usize {
        self.keys - self.seq + row
    }
}

/// What attention reads: `q` `[batch, seq, heads, head_dim]`, `k` and `v`
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
    batch: usize,
    head: usize,
    kv_head: usize,
    /// The first row, and how many there are.
    start: usize,
    rows: usize,
    /// The first column, and how many there are.
    first: usize,
    columns: usize,
}

impl Tile {
    /// What becomes of the sums of the columns before the tile's: there are none before the first, and the
    /// memory for them need not have been touched.
    fn output(self) -> Output {
        if self.first == 0 { Output::Overwrite } else { Output::Add }
    }
}

impl<S: Scalar> Operands<'_, S> {
    fn scale(&self) -> S::Real {
        S::Real::from_f64(1.0 / (self.shape.head_dim as f64).sqrt())
    }

    /// The result in the dtype of `q`, and the logarithm of the sum of each row's exponentials.
    fn tensors<P: Products<S::Real>>(
        &self,
        products: &P,
        q: &FlexTensor,
    ) -> (FlexTensor, FlexTensor) {
        let AttentionShape { batch, seq, heads, .. } = self.shape;
        let (out, lse) = self.forward(products);
        (
            tensor_of(out, q.layout().shape().clone(), q.dtype()),
            S::Real::tensor(lse, [batch, seq, heads].into()),
        )
    }

    /// The result, shaped as `q`, and the logarithm of the sum of each row's exponentials,
    /// `[batch, seq, heads]`.
    ///
    /// Parallel over tiles of rows, whose results are contiguous with all heads side by side.
    fn forward<P: Products<S::Real>>(&self, products: &P) -> (Vec<S::Real>, Vec<S::Real>) {
        const { assert!(P::ROWS <= MOST_ROWS) };
        let shape = self.shape;
        let AttentionShape { seq, heads, .. } = shape;
        let mut out = vec![S::Real::ZERO; self.q.len()];
        let mut lse = vec![S::Real::ZERO; shape.batch * seq * heads];
        if shape.is_empty() {
            return (out, lse);
        }
        let stride = shape.q_stride();
        let tiles: Vec<_> = out
            .chunks_mut(seq * stride)
            .zip(lse.chunks_mut(seq * heads))
            .enumerate()
            .flat_map(|(batch, (out, lse))| {
                out.chunks_mut(P::ROWS * stride)
                    .zip(lse.chunks_mut(P::ROWS * heads))
                    .enumerate()
                    .map(move |(tile, (out, lse))| ((batch, tile * P::ROWS), out, lse))
            })
            .collect();
        tiles.into_par_iter().for_each_init(
            || vec![S::Real::ZERO; P::ROWS * COLUMNS],
            |scores, (place, out, lse)| self.forward_rows(products, place, scores, out, lse),
        );
        (out, lse)
    }

    /// One tile of rows of every head. `out` holds the sums weighted so far, not yet divided by the
    /// sum of the weights.
    fn forward_rows<P: Products<S::Real>>(
        &self,
        products: &P,
        (batch, start): (usize, usize),
        scores: &mut [S::Real],
        out: &mut [S::Real],
        lse: &mut [S::Real],
    ) {
        let shape = self.shape;
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let q_stride = shape.q_stride();
        let rows = lse.len() / heads;
        let seen = shape.position(start + rows);
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let mut running = [(S::Real::NEG_INFINITY, S::Real::ZERO); MOST_ROWS];
            for first in (0..seen).step_by(COLUMNS) {
                let columns = COLUMNS.min(seen - first);
                let tile = Tile { batch, head, kv_head, start, rows, first, columns };
                let scores = &mut scores[..rows * columns];
                products.scores(tile, scores);
                simd(
                    #[inline(always)]
                    || {
                        for (row, (scores, running)) in
                            scores.chunks_exact_mut(columns).zip(&mut running).enumerate()
                        {
                            let visible = visible(shape.position(start + row), first, columns);
                            let out = &mut out[row * q_stride + head * head_dim..][..head_dim];
                            softmax_step(scores, visible, running, out);
                        }
                    },
                );
                let out = MatrixMut::new(&mut out[head * head_dim..], [rows, head_dim], q_stride);
                products.add_values(tile, scores, out);
            }
            for (row, (max, sum)) in running.into_iter().take(rows).enumerate() {
                lse[row * heads + head] = max + sum.ln();
                let out = &mut out[row * q_stride + head * head_dim..][..head_dim];
                out.iter_mut().for_each(|value| *value = *value / sum);
            }
        }
    }

    /// The gradients that are wanted of `qkv`, in their dtypes, where every row has a query. `results` are
    /// the result and its gradient.
    fn gradients<P: GradientProducts<S::Real>>(
        &self,
        products: &P,
        results: [&[S]; 2],
        lse: &[S::Real],
        qkv: &[FlexTensor; 3],
        wanted: [bool; 3],
    ) -> [Option<FlexTensor>; 3] {
        let mut parents = qkv.iter();
        self.backward(products, results, lse, wanted).map(|gradient| {
            let parent = parents.next()?;
            let shape = parent.layout().shape().clone();
            gradient.map(|values| tensor_of(values, shape, parent.dtype()))
        })
    }

    /// The gradients of `q`, `k` and `v` that are wanted.
    ///
    /// Parallel over key heads: one task owns the gradients of its key head and of the query heads
    /// that share it, so that no sum is shared between threads.
    fn backward<P: GradientProducts<S::Real>>(
        &self,
        products: &P,
        [out, dout]: [&[S]; 2],
        lse: &[S::Real],
        wanted: [bool; 3],
    ) -> [Option<Vec<S::Real>>; 3] {
        const { assert!(P::ROWS <= MOST_ROWS) };
        let shape = self.shape;
        let AttentionShape { seq, heads, kv_heads, .. } = shape;
        debug_assert!(seq == shape.keys && seq == shape.capacity, "{shape:?}");
        let group = heads / kv_heads;
        let mut dq = zeros::<S::Real>(wanted[0], self.q.len());
        let mut dk = zeros::<S::Real>(wanted[1], self.k.len());
        let mut dv = zeros::<S::Real>(wanted[2], self.v.len());
        if shape.is_empty() {
            return [dq, dk, dv];
        }
        by_key_head(dq.as_deref_mut(), shape, group)
            .into_par_iter()
            .zip(by_key_head(dk.as_deref_mut(), shape, 1))
            .zip(by_key_head(dv.as_deref_mut(), shape, 1))
            .enumerate()
            .for_each_init(
                || vec![S::Real::ZERO; 2 * P::ROWS * COLUMNS],
                |tiles, (i, ((dq, dk), dv))| {
                    let mut backward =
                        KeyHead { operands: self, products, out, lse, dout, dk, dv, tiles };
                    let mut dq = dq.map(|dq| dq.beside(group));
                    for member in 0..group {
                        let head = i % kv_heads * group + member;
                        let dq = dq.as_mut().and_then(Iterator::next);
                        backward.query_head([i / kv_heads, head], dq);
                    }
                },
            );
        [dq, dk, dv]
    }
}

/// Of each sequence and key head, the columns of `group` heads of `[batch, seq, heads, head_dim]`; all
/// `None` where there is nothing.
fn by_key_head<T: Real>(
    x: Option<&mut [T]>,
    shape: AttentionShape,
    group: usize,
) -> Vec<Option<MatrixMut<'_, T>>> {
    let AttentionShape { batch, seq, kv_heads, head_dim, .. } = shape;
    let width = group * kv_heads * head_dim;
    match x {
        None => std::iter::repeat_with(|| None).take(batch * kv_heads).collect(),
        Some(x) => x
            .chunks_exact_mut(seq * width)
            .flat_map(|x| MatrixMut::rows(x, [seq, width]).beside(kv_heads))
            .map(Some)
            .collect(),
    }
}

/// How many of the columns from `first` on row `row` sees. Of the first tile it is at least one, so
/// that the running maximum is finite from there on, and a tile that is hidden as a whole adds
/// nothing.
#[inline(always)]
fn visible(row: usize, first: usize, columns: usize) -> usize {
    (row + 1).saturating_sub(first).min(columns)
}

/// Turns a row of scores into weights relative to the running maximum, and rescales what was summed
/// under an older maximum.
#[inline(always)]
fn softmax_step<T: Real>(scores: &mut [T], visible: usize, running: &mut (T, T), out: &mut [T]) {
    // Whole rows run through the vectorised loops: e to the power of −∞ is 0.
    scores[visible..].fill(T::NEG_INFINITY);
    let (old_max, old_sum) = *running;
    let tile_max = max(scores);
    let new_max = if tile_max > old_max { tile_max } else { old_max };
    let sum = exp_sum(scores, new_max);
    // Of the first tile, old_max is −∞ and the factor 0; nothing has been summed before it.
    let factor = (old_max - new_max).exp();
    *running = (new_max, old_sum * factor + sum);
    if factor != T::ONE && old_max > T::NEG_INFINITY {
        out.iter_mut().for_each(|value| *value *= factor);
    }
}

/// One key head in the backward pass.
struct KeyHead<'a, 'b, S: Scalar, P> {
    operands: &'a Operands<'a, S>,
    products: &'a P,
    out: &'a [S],
    lse: &'a [S::Real],
    dout: &'a [S],
    /// The gradients of its keys and values, `[seq, head_dim]`.
    dk: Option<MatrixMut<'b, S::Real>>,
    dv: Option<MatrixMut<'b, S::Real>>,
    /// Room for two tiles: the weights and the gradient of the scores.
    tiles: &'b mut [S::Real],
}

impl<S: Scalar, P: GradientProducts<S::Real>> KeyHead<'_, '_, S, P> {
    /// Adds what one query head contributes; `dq` is `[seq, head_dim]`.
    fn query_head(&mut self, [batch, head]: [usize; 2], mut dq: Option<MatrixMut<'_, S::Real>>) {
        let shape = self.operands.shape;
        let AttentionShape { seq, heads, kv_heads, head_dim, .. } = shape;
        let (stride, kv_head) = (shape.q_stride(), head / (heads / kv_heads));
        let scale = self.operands.scale();
        let (p, ds) = self.tiles.split_at_mut(P::ROWS * COLUMNS);
        for start in (0..seq).step_by(P::ROWS) {
            let rows = P::ROWS.min(seq - start);
            let offset = shape.q_offset(batch, start, head);
            let (out, dout) = (&self.out[offset..], &self.dout[offset..]);
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

            for first in (0..start + rows).step_by(COLUMNS) {
                let columns = COLUMNS.min(start + rows - first);
                let tile = Tile { batch, head, kv_head, start, rows, first, columns };
                let (p, ds) = (&mut p[..rows * columns], &mut ds[..rows * columns]);
                self.products.scores(tile, p, ds);
                simd(
                    #[inline(always)]
                    || {
                        let tile = p.chunks_exact_mut(columns).zip(ds.chunks_exact_mut(columns));
                        for (row, ((p, ds), &(lse, product))) in tile.zip(&row_values).enumerate() {
                            // As in the forward pass: hidden weights become 0, and ds with them.
                            p[visible(start + row, first, columns)..].fill(S::Real::NEG_INFINITY);
                            for (p, ds) in p.iter_mut().zip(ds) {
                                *p = (*p - lse).exp();
                                *ds = *p * (*ds - product) * scale;
                            }
                        }
                    },
                );
                let seen = first..first + columns;
                self.products.add_gradients(
                    tile,
                    [p, ds],
                    dq.as_mut().map(|dq| dq.part(start..start + rows)),
                    self.dk.as_mut().map(|dk| dk.part(seen.clone())),
                    self.dv.as_mut().map(|dv| dv.part(seen)),
                );
            }
        }
    }
}
