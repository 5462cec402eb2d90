//! Lookup of rows of a table.

use burn::backend::Flex;
use burn::tensor::{DType, Element, Shape, TensorData, bf16, f16};
use burn_flex::FlexTensor;

use super::real::Real;
use super::{Values, for_each_block, int_values, rows_per_block, tensor_of, with_real};
use crate::ops::embedding::EmbeddingKernels;

impl EmbeddingKernels for Flex {
    fn embedding_forward(weight: &FlexTensor, ids: &FlexTensor) -> FlexTensor {
        forward(weight, ids)
    }

    fn embedding_weight_gradient(
        ids: &FlexTensor,
        dy: &FlexTensor,
        shape: Shape,
        dtype: DType,
    ) -> FlexTensor {
        weight_gradient(ids, dy, shape, dtype)
    }
}

/// The ids as row numbers of a table of `vocab` rows.
fn row_numbers(ids: &FlexTensor, vocab: usize) -> Vec<usize> {
    let row = |id: i64| {
        let row = usize::try_from(id).ok().filter(|&row| row < vocab);
        row.unwrap_or_else(|| panic!("embedding: id {id} is outside a vocabulary of {vocab}"))
    };
    int_values(ids).into_iter().map(row).collect()
}

fn forward(weight: &FlexTensor, ids: &FlexTensor) -> FlexTensor {
    let [vocab, d_model] = weight.layout().shape().dims();
    let [batch, seq] = ids.layout().shape().dims();
    let rows = row_numbers(ids, vocab);
    let shape = Shape::from([batch, seq, d_model]);
    let weight = match weight.is_contiguous() {
        true => weight.clone(),
        false => weight.to_contiguous(),
    };
    // Only the rows that are asked for are touched, so each dtype is copied as it is.
    match weight.dtype() {
        DType::F32 => gather::<f32>(&weight, &rows, shape),
        DType::F64 => gather::<f64>(&weight, &rows, shape),
        DType::BF16 => gather::<bf16>(&weight, &rows, shape),
        DType::F16 => gather::<f16>(&weight, &rows, shape),
        other => panic!("no kernel for tensors of {other:?}"),
    }
}

/// Numbers that tensors are made of and that [`FlexTensor::as_slice`] takes.
trait Stored: Element + Default + Send + Sync {
    fn values(tensor: &FlexTensor) -> Option<&[Self]>;
}

macro_rules! stored {
    ($($type:ident),*) => {
        $(impl Stored for $type {
            fn values(tensor: &FlexTensor) -> Option<&[Self]> {
                tensor.as_slice()
            }
        })*
    };
}
stored!(f32, f64, bf16, f16);

fn gather<E: Stored>(weight: &FlexTensor, rows: &[usize], shape: Shape) -> FlexTensor {
    let weight = E::values(weight).expect("the caller passes a contiguous tensor of this dtype");
    let [_, _, d_model] = shape.dims();
    let mut y = vec![E::default(); rows.len() * d_model];
    if d_model > 0 {
        for_each_block(&mut y, rows_per_block(d_model) * d_model, |start, block| {
            let rows = &rows[start / d_model..];
            for (out, &row) in block.chunks_exact_mut(d_model).zip(rows) {
                out.copy_from_slice(&weight[row * d_model..][..d_model]);
            }
        });
    }
    FlexTensor::from_data(TensorData::new(y, shape))
}

fn weight_gradient(ids: &FlexTensor, dy: &FlexTensor, shape: Shape, dtype: DType) -> FlexTensor {
    let [vocab, d_model] = shape.dims();
    let rows = row_numbers(ids, vocab);
    // Places by row: those of row v are `places[starts[v]..starts[v + 1]]`, in ascending order.
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
