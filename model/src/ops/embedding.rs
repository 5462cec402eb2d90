//! Lookup of rows of a table.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{
    Backend, Dispatch, Flex, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{DType, Element, Int, Shape, Tensor, TensorData, bf16, f16};
use burn_flex::FlexTensor;

use super::Tracked;
use super::cpu::real::Real;
use super::cpu::{self, Values, with_real};

/// `y[b, t] = weight[ids[b, t]]`.
///
/// `weight` is `[vocab, d_model]`, `ids` `[batch, seq]`, the result `[batch, seq, d_model]`.
/// Backward: `dW[v] = Σ dy[b, t]` over the places where `ids[b, t] = v`, in the order of the
/// places. It needs the ids and the shape of the weight but not its values.
///
/// # Panics
///
/// If an id is not a row of `weight`.
pub fn embedding(weight: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    Tensor::from_dispatch(<Dispatch as EmbeddingOp>::fused_embedding(
        weight.into_dispatch(),
        ids.into_dispatch(),
    ))
}

/// [`embedding`] in plain burn.
pub fn embedding_reference(weight: Tensor<2>, ids: Tensor<2, Int>) -> Tensor<3> {
    let ([_, d_model], [batch, seq]) = (weight.dims(), ids.dims());
    weight.select(0, ids.reshape([batch * seq])).reshape([batch, seq, d_model])
}

/// The backends of [`embedding`].
#[backend_extension(Flex, Autodiff)]
pub trait EmbeddingOp: Backend {
    /// The rows `ids` of `weight`.
    fn fused_embedding(weight: FloatTensor<Self>, ids: IntTensor<Self>) -> FloatTensor<Self>;
}

impl EmbeddingOp for Flex {
    fn fused_embedding(weight: FlexTensor, ids: FlexTensor) -> FlexTensor {
        forward(&weight, &ids)
    }
}

impl<C: CheckpointStrategy> EmbeddingOp for Autodiff<Flex, C> {
    fn fused_embedding(weight: Tracked<C>, ids: FlexTensor) -> Tracked<C> {
        let y = forward(weight.primitive(), &ids);
        match EmbeddingBackward.prepare::<C>([weight.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => {
                let weight = weight.primitive();
                let saved =
                    Saved { ids, shape: weight.layout().shape().clone(), dtype: weight.dtype() };
                prep.finish(saved, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Clone, Debug)]
struct Saved {
    ids: FlexTensor,
    shape: Shape,
    dtype: DType,
}

#[derive(Debug)]
struct EmbeddingBackward;

impl Backward<Flex, 1> for EmbeddingBackward {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 1>, grads: &mut Gradients, _checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let [Some(node)] = ops.parents else { return };
        let Saved { ids, shape, dtype } = ops.state;
        grads.register::<Flex>(node.id, weight_gradient(&ids, &dy, shape, dtype));
    }
}

/// The ids as row numbers of a table of `vocab` rows.
fn row_numbers(ids: &FlexTensor, vocab: usize) -> Vec<usize> {
    let row = |id: i64| {
        let row = usize::try_from(id).ok().filter(|&row| row < vocab);
        row.unwrap_or_else(|| panic!("embedding: id {id} is outside a vocabulary of {vocab}"))
    };
    cpu::int_values(ids).into_iter().map(row).collect()
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
        cpu::for_each_block(&mut y, cpu::rows_per_block(d_model) * d_model, |start, block| {
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
            let size = cpu::rows_per_block(d_model) * d_model;
            cpu::for_each_block(&mut dw, size, #[inline(always)] |start, block| {
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
        cpu::tensor_of(dw, shape, dtype)
    })
}
