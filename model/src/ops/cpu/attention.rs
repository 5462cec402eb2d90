//! The tiles of causal attention.
//!
//! Rows are `[batch, seq, heads, head_dim]`, so one head's rows are a strided matrix that the
//! matrix products read in place. Keys are copied once, transposed: the products then read every
//! operand along its contiguous axis and pack nothing.

use burn::backend::Flex;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::gemm::{Output, Threads, gemm};
use super::matrix::{Matrix, MatrixMut};
use super::real::{Real, dot, exp_sum, max};
use super::transpose::transpose;
use super::unwritten::Unwritten;
use super::values::Stored;
use super::{Values, simd, tensor_of, with_real, zeros};
use crate::ops::attention::{AttentionKernels, AttentionShape};

/// Rows (queries) of a tile: the most that `gemm` multiplies without packing the other operand
/// (eight register tiles of six).
const ROWS: usize = 48;
/// Columns (keys) of a tile: a multiple of the vector loops' width, and small enough that two tiles
/// of scores stay in a core's L2 cache beside the operands.
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
        with_real!(q.dtype(), T => {
            let (q_values, k, v) = (Values::<T>::of(q), Values::<T>::of(k), Values::<T>::of(v));
            let (out, lse) = Operands { q: &q_values, k: &k, v: &v, shape }.forward();
            let lse_shape = [shape.batch, shape.seq, shape.heads];
            (
                tensor_of(out, q.layout().shape().clone(), q.dtype()),
                tensor_of(lse, lse_shape, T::DTYPE),
            )
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
        with_real!(q.dtype(), T => {
            let q_values = Values::<T>::of(q);
            let (k_values, v_values) = (Values::<T>::of(k), Values::<T>::of(v));
            let (out, lse) = (Values::<T>::of(out), Values::<T>::of(lse));
            let dout = Values::<T>::of(dout);
            let operands = Operands { q: &q_values, k: &k_values, v: &v_values, shape };
            let gradients = operands.backward(&out, &lse, &dout, wanted);
            let mut parents = qkv.iter();
            gradients.map(|gradient| {
                let parent = parents.next()?;
                let shape = parent.layout().shape().clone();
                gradient.map(|values| tensor_of(values, shape, parent.dtype()))
            })
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

impl<T: Real> Operands<'_, T> {
    fn scale(&self) -> T {
        T::from_f64(1.0 / (self.shape.head_dim as f64).sqrt())
    }

    /// The result, shaped as `q`, and the logarithm of the sum of each row's exponentials,
    /// `[batch, seq, heads]`.
    ///
    /// Parallel over tiles of rows, whose results are contiguous with all heads side by side.
    pub fn forward(&self) -> (Vec<T>, Vec<T>) {
        let shape = self.shape;
        let AttentionShape { seq, heads, .. } = shape;
        let mut out = vec![T::ZERO; self.q.len()];
        let mut lse = vec![T::ZERO; shape.batch * seq * heads];
        if shape.is_empty() {
            return (out, lse);
        }
        let few = seq < FEW_ROWS && seq < shape.keys;
        let keys = (!few).then(|| transposed(self.k, shape));
        let stride = shape.q_stride();
        let tiles: Vec<_> = out
            .chunks_mut(seq * stride)
            .zip(lse.chunks_mut(seq * heads))
            .enumerate()
            .flat_map(|(batch, (out, lse))| {
                out.chunks_mut(ROWS * stride)
                    .zip(lse.chunks_mut(ROWS * heads))
                    .enumerate()
                    .map(move |(tile, (out, lse))| ((batch, tile * ROWS), out, lse))
            })
            .collect();
        tiles.into_par_iter().for_each_init(
            || vec![T::ZERO; ROWS * COLUMNS],
            |scores, (place, out, lse)| self.forward_rows(place, keys.as_deref(), scores, out, lse),
        );
        (out, lse)
    }

    /// One tile of rows of every head. `out` holds the sums weighted so far, not yet divided by the
    /// sum of the weights. `transposed` are the keys `[batch, kv_heads, head_dim, keys]`, if they were
    /// copied.
    fn forward_rows(
        &self,
        (batch, start): (usize, usize),
        transposed: Option<&[T]>,
        scores: &mut [T],
        out: &mut [T],
        lse: &mut [T],
    ) {
        let shape = self.shape;
        let AttentionShape { heads, kv_heads, head_dim, .. } = shape;
        let (q_stride, kv_stride) = (shape.q_stride(), shape.kv_stride());
        let rows = lse.len() / heads;
        let seen = shape.position(start + rows);
        for head in 0..heads {
            let kv_head = head / (heads / kv_heads);
            let q = &self.q[shape.q_offset(batch, start, head)..];
            let q = Matrix::new(q, [rows, head_dim], [q_stride, 1]);
            let mut running = [(T::NEG_INFINITY, T::ZERO); ROWS];
            for first in (0..seen).step_by(COLUMNS) {
                let columns = COLUMNS.min(seen - first);
                let scores = &mut scores[..rows * columns];
                let keys = match transposed {
                    Some(keys) => {
                        let head = (batch * kv_heads + kv_head) * head_dim * shape.keys;
                        let keys = &keys[head + first..];
                        Matrix::new(keys, [head_dim, columns], [shape.keys, 1])
                    }
                    None => {
                        let keys = &self.k[shape.kv_offset(batch, first, kv_head)..];
                        Matrix::new(keys, [columns, head_dim], [kv_stride, 1]).t()
                    }
                };
                let target = MatrixMut::rows(scores, [rows, columns]);
                gemm(target, Output::Overwrite, self.scale(), q, keys, Threads::One);
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
                let values = &self.v[shape.kv_offset(batch, first, kv_head)..];
                gemm(
                    MatrixMut::new(&mut out[head * head_dim..], [rows, head_dim], q_stride),
                    Output::Add,
                    T::ONE,
                    Matrix::rows(scores, [rows, columns]),
                    Matrix::new(values, [columns, head_dim], [kv_stride, 1]),
                    Threads::One,
                );
            }
            for (row, (max, sum)) in running.into_iter().take(rows).enumerate() {
                lse[row * heads + head] = max + sum.ln();
                let out = &mut out[row * q_stride + head * head_dim..][..head_dim];
                out.iter_mut().for_each(|value| *value = *value / sum);
            }
        }
    }

    /// The gradients of `q`, `k` and `v` that are wanted, where every row has a query.
    ///
    /// Parallel over key heads: one task owns the gradients of its key head and of the query heads
    /// that share it, so that no sum is shared between threads.
    pub fn backward(
        &self,
        out: &[T],
        lse: &[T],
        dout: &[T],
        wanted: [bool; 3],
    ) -> [Option<Vec<T>>; 3] {
        let shape = self.shape;
        let AttentionShape { seq, heads, kv_heads, head_dim, .. } = shape;
        debug_assert!(seq == shape.keys && seq == shape.capacity, "{shape:?}");
        let group = heads / kv_heads;
        let mut dq = zeros::<T>(wanted[0], self.q.len());
        let mut dk = zeros::<T>(wanted[1], self.k.len());
        let mut dv = zeros::<T>(wanted[2], self.v.len());
        if shape.is_empty() {
            return [dq, dk, dv];
        }
        let keys = transposed(self.k, shape);
        let values = transposed(self.v, shape);
        let size = seq * head_dim;
        by_key_head(dq.as_deref_mut(), shape, group)
            .into_par_iter()
            .zip(by_key_head(dk.as_deref_mut(), shape, 1))
            .zip(by_key_head(dv.as_deref_mut(), shape, 1))
            .enumerate()
            .for_each_init(
                || vec![T::ZERO; 2 * ROWS * COLUMNS],
                |tiles, (i, ((dq, dk), dv))| {
                    let mut backward = KeyHead {
                        operands: self,
                        out,
                        lse,
                        dout,
                        keys: &keys[i * size..][..size],
                        values: &values[i * size..][..size],
                        dk,
                        dv,
                        tiles,
                    };
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
    // Of the first tile, old_max is −∞ and the factor 0.
    let factor = (old_max - new_max).exp();
    *running = (new_max, old_sum * factor + sum);
    if factor != T::ONE {
        out.iter_mut().for_each(|value| *value *= factor);
    }
}

/// One key head in the backward pass.
struct KeyHead<'a, 'b, T> {
    operands: &'a Operands<'a, T>,
    out: &'a [T],
    lse: &'a [T],
    dout: &'a [T],
    /// Keys and values of this head, `[head_dim, seq]`.
    keys: &'a [T],
    values: &'a [T],
    /// Their gradients, `[seq, head_dim]`.
    dk: Option<MatrixMut<'b, T>>,
    dv: Option<MatrixMut<'b, T>>,
    /// Room for two tiles: the weights and the gradient of the scores.
    tiles: &'b mut [T],
}

impl<T: Real> KeyHead<'_, '_, T> {
    /// Adds what one query head contributes; `dq` is `[seq, head_dim]`.
    fn query_head(&mut self, [batch, head]: [usize; 2], mut dq: Option<MatrixMut<'_, T>>) {
        let shape = self.operands.shape;
        let AttentionShape { seq, heads, kv_heads, head_dim, .. } = shape;
        let (stride, kv_head) = (shape.q_stride(), head / (heads / kv_heads));
        let scale = self.operands.scale();
        let (p, ds) = self.tiles.split_at_mut(ROWS * COLUMNS);
        for start in (0..seq).step_by(ROWS) {
            let rows = ROWS.min(seq - start);
            let offset = shape.q_offset(batch, start, head);
            let (out, dout) = (&self.out[offset..], &self.dout[offset..]);
            // The logarithm of each row's sum, and D = rowsum(dO ∘ O).
            let mut row_values = [(T::ZERO, T::ZERO); ROWS];
            for (row, value) in row_values[..rows].iter_mut().enumerate() {
                let range = row * stride..row * stride + head_dim;
                let product = simd(
                    #[inline(always)]
                    || dot(&out[range.clone()], &dout[range.clone()]),
                );
                *value = (self.lse[(batch * seq + start + row) * heads + head], product);
            }
            let q = Matrix::new(&self.operands.q[offset..], [rows, head_dim], [stride, 1]);
            let dout = Matrix::new(dout, [rows, head_dim], [stride, 1]);

            for first in (0..start + rows).step_by(COLUMNS) {
                let columns = COLUMNS.min(start + rows - first);
                let (p, ds) = (&mut p[..rows * columns], &mut ds[..rows * columns]);
                let keys = Matrix::new(&self.keys[first..], [head_dim, columns], [seq, 1]);
                let values = Matrix::new(&self.values[first..], [head_dim, columns], [seq, 1]);
                let overwrite = Output::Overwrite;
                gemm(MatrixMut::rows(p, [rows, columns]), overwrite, scale, q, keys, Threads::One);
                gemm(
                    MatrixMut::rows(ds, [rows, columns]),
                    overwrite,
                    T::ONE,
                    dout,
                    values,
                    Threads::One,
                );
                simd(
                    #[inline(always)]
                    || {
                        let tile = p.chunks_exact_mut(columns).zip(ds.chunks_exact_mut(columns));
                        for (row, ((p, ds), &(lse, product))) in tile.zip(&row_values).enumerate() {
                            // As in the forward pass: hidden weights become 0, and ds with them.
                            p[visible(start + row, first, columns)..].fill(T::NEG_INFINITY);
                            for (p, ds) in p.iter_mut().zip(ds) {
                                *p = (*p - lse).exp();
                                *ds = *p * (*ds - product) * scale;
                            }
                        }
                    },
                );
                let (p, ds) = (Matrix::rows(p, [rows, columns]), Matrix::rows(ds, [rows, columns]));
                let seen = first..first + columns;
                if let Some(dv) = &mut self.dv {
                    gemm(dv.part(seen.clone()), Output::Add, T::ONE, p.t(), dout, Threads::One);
                }
                if let Some(dk) = &mut self.dk {
                    gemm(dk.part(seen), Output::Add, T::ONE, ds.t(), q, Threads::One);
                }
                if let Some(dq) = &mut dq {
                    let keys = &self.operands.k[shape.kv_offset(batch, first, kv_head)..];
                    let keys = Matrix::new(keys, [columns, head_dim], [shape.kv_stride(), 1]);
                    let dq = dq.part(start..start + rows);
                    gemm(dq, Output::Add, T::ONE, ds, keys, Threads::One);
                }
            }
        }
    }
}

/// The first `keys` rows of `[batch, capacity, kv_heads, head_dim]` as
/// `[batch, kv_heads, head_dim, keys]`.
fn transposed<T: Real>(x: &[T], shape: AttentionShape) -> Vec<T> {
    let AttentionShape { batch, keys: seq, kv_heads, head_dim, .. } = shape;
    let stride = shape.kv_stride();
    let mut result = Unwritten::new(batch * kv_heads * head_dim * seq);
    super::for_each_block(
        result.slots(),
        head_dim * seq,
        #[inline(always)]
        |start, result| {
            let i = start / (head_dim * seq);
            let x = &x[shape.kv_offset(i / kv_heads, 0, i % kv_heads)..];
            transpose(x, stride, result, seq, [head_dim, seq]);
        },
    );
    // SAFETY: the blocks are all heads, and `transpose` writes all of a head.
    unsafe { result.written() }
}
