//! Matrix product with a weight, and its bias.

use burn::backend::autodiff::{
    Autodiff, NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Tensor};
use burn_flex::FlexTensor;

use super::Tracked;
use super::cpu::gemm::{Matrix, MatrixMut, Output, Threads, gemm};
use super::cpu::real::Real;
use super::cpu::{self, MatrixValues, Values, with_real};

/// `y = x · W (+ b)` over the last dimension.
///
/// `x` is `[.., d_in]`, `weight` `[d_in, d_out]` (it may be a transposed view), `bias` `[d_out]`,
/// the result `[.., d_out]`. Backward: `dx = dy · Wᵀ`, `dW = xᵀ · dy`, `db = Σ_rows dy`.
pub fn linear<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(match bias {
        None => <Dispatch as LinearOp>::fused_linear(x, weight),
        Some(bias) => <Dispatch as LinearOp>::fused_linear_bias(x, weight, bias.into_dispatch()),
    })
}

/// [`linear`] in plain burn.
pub fn linear_reference<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
) -> Tensor<D> {
    let mut shape = x.dims();
    let [d_in, d_out] = weight.dims();
    let rows = shape[..D - 1].iter().product();
    shape[D - 1] = d_out;
    let y: Tensor<2> = x.reshape([rows, d_in]).matmul(weight);
    let y = match bias {
        Some(bias) => y + bias.unsqueeze(),
        None => y,
    };
    y.reshape(shape)
}

/// The backends of [`linear`].
#[backend_extension(Flex, Autodiff)]
pub trait LinearOp: Backend {
    /// `x · weight`.
    fn fused_linear(x: FloatTensor<Self>, weight: FloatTensor<Self>) -> FloatTensor<Self>;
    /// `x · weight + bias`.
    fn fused_linear_bias(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl LinearOp for Flex {
    fn fused_linear(x: FlexTensor, weight: FlexTensor) -> FlexTensor {
        forward(&x, &weight, None)
    }

    fn fused_linear_bias(x: FlexTensor, weight: FlexTensor, bias: FlexTensor) -> FlexTensor {
        forward(&x, &weight, Some(&bias))
    }
}

impl<C: CheckpointStrategy> LinearOp for Autodiff<Flex, C> {
    fn fused_linear(x: Tracked<C>, weight: Tracked<C>) -> Tracked<C> {
        let y = forward(x.primitive(), weight.primitive(), None);
        match LinearBackward.prepare::<C>([x.node(), weight.node()]).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let saved = Saved {
                    weight: x.is_tracked().then(|| prep.checkpoint(&weight)),
                    x: weight.is_tracked().then(|| prep.checkpoint(&x)),
                    x_dtype: x.primitive().dtype(),
                    weight_dtype: weight.primitive().dtype(),
                };
                prep.finish(saved, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }

    fn fused_linear_bias(x: Tracked<C>, weight: Tracked<C>, bias: Tracked<C>) -> Tracked<C> {
        let y = forward(x.primitive(), weight.primitive(), Some(bias.primitive()));
        let nodes = [x.node(), weight.node(), bias.node()];
        match LinearBiasBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let saved = Saved {
                    weight: x.is_tracked().then(|| prep.checkpoint(&weight)),
                    x: weight.is_tracked().then(|| prep.checkpoint(&x)),
                    x_dtype: x.primitive().dtype(),
                    weight_dtype: weight.primitive().dtype(),
                };
                prep.finish((saved, bias.primitive().dtype()), y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

/// Each operand is asked for only where the gradient of the other one is wanted.
#[derive(Clone, Debug)]
struct Saved {
    weight: Option<NodeId>,
    x: Option<NodeId>,
    x_dtype: DType,
    weight_dtype: DType,
}

impl Saved {
    fn register(
        self,
        [x_node, weight_node]: [Option<NodeId>; 2],
        dy: &FlexTensor,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        if let Some(id) = self.weight {
            // The weight may be a recomputed gather: it is dropped before `x` is looked up.
            let weight = checkpointer.retrieve_node_output::<FlexTensor>(id);
            let dx = x_gradient(dy, &weight, self.x_dtype);
            drop(weight);
            if let Some(node) = x_node {
                grads.register::<Flex>(node, dx);
            }
        }
        if let Some(id) = self.x {
            let x = checkpointer.retrieve_node_output::<FlexTensor>(id);
            let dw = weight_gradient(&x, dy, self.weight_dtype);
            drop(x);
            if let Some(node) = weight_node {
                grads.register::<Flex>(node, dw);
            }
        }
    }
}

#[derive(Debug)]
struct LinearBackward;

impl Backward<Flex, 2> for LinearBackward {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<Flex>(&ops.node);
        let parents = ops.parents.map(|parent| parent.map(|node| node.id));
        ops.state.register(parents, &dy, grads, checkpointer);
    }
}

#[derive(Debug)]
struct LinearBiasBackward;

impl Backward<Flex, 3> for LinearBiasBackward {
    type State = (Saved, DType);

    fn backward(
        self,
        ops: Ops<(Saved, DType), 3>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let [x_node, weight_node, bias_node] = ops.parents.map(|parent| parent.map(|node| node.id));
        let (saved, bias_dtype) = ops.state;
        let dy = grads.consume::<Flex>(&ops.node);
        if let Some(node) = bias_node {
            grads.register::<Flex>(node, bias_gradient(&dy, bias_dtype));
        }
        saved.register([x_node, weight_node], &dy, grads, checkpointer);
    }
}

/// Elements per row and number of rows of a tensor seen as a matrix.
fn rows_of(tensor: &FlexTensor) -> [usize; 2] {
    let shape = tensor.layout().shape();
    let width = shape.iter().last().copied().unwrap_or(1);
    [shape.iter().rev().skip(1).product(), width]
}

fn forward(x: &FlexTensor, weight: &FlexTensor, bias: Option<&FlexTensor>) -> FlexTensor {
    let [rows, d_in] = rows_of(x);
    let [weight_in, d_out] = rows_of(weight);
    assert_eq!(d_in, weight_in, "linear: rows of {d_in} values and a weight for {weight_in}");
    let mut shape = x.layout().shape().clone();
    let last = shape.num_dims() - 1;
    shape[last] = d_out;
    with_real!(x.dtype(), T => {
        let (x_values, weight_values) = (Values::<T>::of(x), MatrixValues::<T>::of(weight));
        let mut y = vec![T::ZERO; rows * d_out];
        let mut output = Output::Overwrite;
        if let Some(bias) = bias {
            let bias = Values::<T>::of(bias);
            let bias: &[T] = &bias;
            assert_eq!(bias.len(), d_out, "linear: the length of the bias");
            cpu::for_each_block(&mut y, cpu::rows_per_block(d_out) * d_out, |_, block| {
                block.chunks_exact_mut(d_out.max(1)).for_each(|row| row.copy_from_slice(bias));
            });
            output = Output::Add;
        }
        gemm(
            MatrixMut::rows(&mut y, [rows, d_out]),
            output,
            T::ONE,
            Matrix::rows(&x_values, [rows, d_in]),
            weight_values.view(),
            Threads::Pool,
        );
        cpu::tensor_of(y, shape, x.dtype())
    })
}

fn x_gradient(dy: &FlexTensor, weight: &FlexTensor, dtype: DType) -> FlexTensor {
    let [rows, d_out] = rows_of(dy);
    let [d_in, _] = rows_of(weight);
    let mut shape = dy.layout().shape().clone();
    let last = shape.num_dims() - 1;
    shape[last] = d_in;
    with_real!(dtype, T => {
        let (dy, weight) = (Values::<T>::of(dy), MatrixValues::<T>::of(weight));
        let mut dx = vec![T::ZERO; rows * d_in];
        gemm(
            MatrixMut::rows(&mut dx, [rows, d_in]),
            Output::Overwrite,
            T::ONE,
            Matrix::rows(&dy, [rows, d_out]),
            weight.view().t(),
            Threads::Pool,
        );
        cpu::tensor_of(dx, shape, dtype)
    })
}

fn weight_gradient(x: &FlexTensor, dy: &FlexTensor, dtype: DType) -> FlexTensor {
    let [rows, d_out] = rows_of(dy);
    let [_, d_in] = rows_of(x);
    with_real!(dtype, T => {
        let (x, dy) = (Values::<T>::of(x), Values::<T>::of(dy));
        let mut dw = vec![T::ZERO; d_in * d_out];
        gemm(
            MatrixMut::rows(&mut dw, [d_in, d_out]),
            Output::Overwrite,
            T::ONE,
            Matrix::rows(&x, [rows, d_in]).t(),
            Matrix::rows(&dy, [rows, d_out]),
            Threads::Pool,
        );
        cpu::tensor_of(dw, [d_in, d_out], dtype)
    })
}

fn bias_gradient(dy: &FlexTensor, dtype: DType) -> FlexTensor {
    let [_, d_out] = rows_of(dy);
    with_real!(dtype, T => {
        let dy = Values::<T>::of(dy);
        let dy: &[T] = &dy;
        let mut db = vec![T::ZERO; d_out];
        // Blocks of columns, so that each sum runs over the rows in order on one thread.
        cpu::for_each_block(&mut db, 256, #[inline(always)] |first, block| {
            for row in dy.chunks_exact(d_out.max(1)) {
                for (sum, &value) in block.iter_mut().zip(&row[first..]) {
                    *sum += value;
                }
            }
        });
        cpu::tensor_of(db, [d_out], dtype)
    })
}
