//! The kernels of embeddings: lookup of rows of a table.

use std::mem::MaybeUninit;

use burn::backend::Flex;
use burn::tensor::{DType, Shape};
use burn_flex::FlexTensor;

use super::dispatch::{with_real, with_scalar};
use super::parallel::{for_each_block, rows_per_block};
use super::scalar::{Real, Scalar};
use super::uninit::written;
use super::values::{Values, int_values, new_tensor, tensor_of};
use crate::ops::embedding::EmbeddingKernels;

impl EmbeddingKernels for Flex {
    fn embedding_forward(weight: &FlexTensor, ids: &FlexTensor) -> FlexTensor {
        let [vocab, d_model] = weight.layout().shape().dims();
        let [batch, seq] = ids.layout().shape().dims();
        let rows = row_numbers(ids, vocab);
        let shape = Shape::from([batch, seq, d_model]);
        // Copied in their own dtype, so that only rows with an id are read.
        with_scalar!(weight.dtype(), S => gather::<S>(weight, &rows, shape))
    }

    fn embedding_weight_gradient(
        ids: &FlexTensor,
        dy: &FlexTensor,
        shape: Shape,
        dtype: DType,
    ) -> FlexTensor {
        let [vocab, d_model] = shape.dims();
        let rows = row_numbers(ids, vocab);
        // Positions sorted by table row: those of row `v` are `places[starts[v]..starts[v + 1]]`, in ascending order.
        let mut starts = vec![0usize; vocab + 1];
        for &row in &rows {
            starts[row + 1] += 1;
        }
        for v in 0..vocab {
            starts[v + 1] += starts[v];
        }
        let mut next = starts.clone();
        let mut places = vec![0usize; rows.len()];
        for (place, &row) in rows.iter().enumerate() {
            places[next[row]] = place;
            next[row] += 1;
        }

        with_real!(dtype, T => {
            let dy = Values::<T>::of(dy);
            let (dy, starts, places): (&[T], &[usize], &[usize]) = (&dy, &starts, &places);
            let mut dw = vec![T::ZERO; vocab * d_model];
            if d_model > 0 {
                let size = rows_per_block(d_model) * d_model;
                for_each_block(&mut dw, size, #[inline(always)] |start, block| {
                    for (i, sum) in block.chunks_exact_mut(d_model).enumerate() {
                        let v = start / d_model + i;
                        for &place in &places[starts[v]..starts[v + 1]] {
                            for (sum, &value) in sum.iter_mut().zip(&dy[place * d_model..][..d_model]) {
                                *sum += value;
                            }
                        }
                    }
                });
            }
            tensor_of(dw, shape, dtype)
        })
    }
}

fn row_numbers(ids: &FlexTensor, vocab: usize) -> Vec<usize> {
    let row = |id: i64| {
        let row = usize::try_from(id).ok().filter(|&row| row < vocab);
        row.unwrap_or_else(|| panic!("embedding: id {id} is outside a vocabulary of {vocab}"))
    };
    int_values(ids).into_iter().map(row).collect()
}

fn gather<S: Scalar>(weight: &FlexTensor, rows: &[usize], shape: Shape) -> FlexTensor {
    let weight = Values::<S>::of(weight);
    let weight: &[S] = &weight;
    let [_, _, d_model] = shape.dims();
    let write = |start: usize, block: &mut [MaybeUninit<S>]| {
        let rows = &rows[start / d_model.max(1)..];
        for (out, &row) in block.chunks_exact_mut(d_model.max(1)).zip(rows) {
            out.write_copy_of_slice(&weight[row * d_model..][..d_model]);
        }
    };
    let size = rows_per_block(d_model) * d_model.max(1);
    // SAFETY: blocks are whole rows, and every row is copied.
    new_tensor(unsafe { written(rows.len() * d_model, size, write) }, shape)
}
