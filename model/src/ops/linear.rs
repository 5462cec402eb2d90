//! Matrix product with a weight, and an optional bias.

use burn::backend::autodiff::ops::NodeGuard;
use burn::backend::autodiff::{Autodiff, NodeId, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{DType, Shape, Tensor};
use burn_backend::TensorMetadata;
use burn_backend::ops::FloatTensorOps;

use super::plain::{FusedOp, is_plain};
use super::shared::{Prepared, SharedInput};
use super::tape::{Step, Tracked, constant, needs_gradient, record};

/// Computes `y = x · W (+ b)` over the last dimension.
///
/// `x` is `[.., d_in]`, `weight` `[d_in, d_out]` (it may be a transposed view), `bias` `[d_out]`, the result
/// `[.., d_out]`. Backward: `dx = dy · Wᵀ`, `dW = xᵀ · dy`, `db = Σ_rows dy`.
pub fn linear<const D: usize>(x: Tensor<D>, weight: Tensor<2>, bias: Option<Tensor<1>>) -> Tensor<D> {
    linear_of_shared(x, weight, bias, SharedInput::new(1))
}

/// Computes [`linear`] of one `x` with several weights and biases, in order.
///
/// In backward, the maps share their work on `x`: `x` is transposed once for the gradients of all weights, and the
/// maps' contributions to `dx` are accumulated in the memory of the first one.
pub fn linears<const D: usize, const N: usize>(
    x: Tensor<D>,
    maps: [(Tensor<2>, Option<Tensor<1>>); N],
) -> [Tensor<D>; N] {
    let shared = SharedInput::new(N);
    maps.map(|(weight, bias)| linear_of_shared(x.clone(), weight, bias, shared.clone()))
}

fn linear_of_shared<const D: usize>(
    x: Tensor<D>,
    weight: Tensor<2>,
    bias: Option<Tensor<1>>,
    shared: SharedInput,
) -> Tensor<D> {
    if is_plain(FusedOp::Linear) {
        return linear_reference(x, weight, bias);
    }
    let (x, weight) = (x.into_dispatch(), weight.into_dispatch());
    Tensor::from_dispatch(match bias {
        None => Dispatch::fused_linear(x, weight, shared),
        Some(bias) => Dispatch::fused_linear_bias(x, weight, bias.into_dispatch(), shared),
    })
}

/// Computes [`linear`] in plain burn.
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

/// A backend that can compute [`linear`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait LinearOp: Backend {
    /// Computes `x · weight`.
    fn fused_linear(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        shared: SharedInput,
    ) -> FloatTensor<Self>;
    /// Computes `x · weight + bias`.
    fn fused_linear_bias(
        x: FloatTensor<Self>,
        weight: FloatTensor<Self>,
        bias: FloatTensor<Self>,
        shared: SharedInput,
    ) -> FloatTensor<Self>;
}

/// The kernels that a backend implements for [`linear`]. Results have the shape of their first operand except
/// for the last dimension.
pub trait LinearKernels: Backend {
    /// Computes `x · weight (+ bias)`.
    fn linear_forward(
        x: &FloatTensor<Self>,
        weight: &FloatTensor<Self>,
        bias: Option<&FloatTensor<Self>>,
    ) -> FloatTensor<Self>;
    /// Computes `dy · weightᵀ`, plus `sum` if there is one, and rounds once. Nothing else may hold `sum`, so that the
    /// result can use its memory.
    fn linear_x_gradient(
        dy: &FloatTensor<Self>,
        weight: &FloatTensor<Self>,
        sum: Option<FloatTensor<Self>>,
        dtype: DType,
    ) -> FloatTensor<Self>;
    /// Computes `xᵀ · dy`, `[d_in, d_out]`. The first call for an `x` stores the transposed copy of `x` in `prepared`
    /// for later calls.
    fn linear_weight_gradient(
        x: &FloatTensor<Self>,
        dy: &FloatTensor<Self>,
        prepared: &mut Prepared,
        dtype: DType,
    ) -> FloatTensor<Self>;
    /// Computes the sum of the rows of `dy`, `[d_out]`.
    fn linear_bias_gradient(dy: &FloatTensor<Self>, dtype: DType) -> FloatTensor<Self>;
}

impl<B: LinearKernels> LinearOp for B {
    fn fused_linear(x: FloatTensor<B>, weight: FloatTensor<B>, _: SharedInput) -> FloatTensor<B> {
        B::linear_forward(&x, &weight, None)
    }

    fn fused_linear_bias(
        x: FloatTensor<B>,
        weight: FloatTensor<B>,
        bias: FloatTensor<B>,
        _: SharedInput,
    ) -> FloatTensor<B> {
        B::linear_forward(&x, &weight, Some(&bias))
    }
}

impl<B: LinearKernels, C: CheckpointStrategy> LinearOp for Autodiff<B, C> {
    fn fused_linear(x: Tracked<B, C>, weight: Tracked<B, C>, shared: SharedInput) -> Tracked<B, C> {
        map::<B, C, _>(&x, &weight, None, [x.node(), weight.node()], shared)
    }

    fn fused_linear_bias(
        x: Tracked<B, C>,
        weight: Tracked<B, C>,
        bias: Tracked<B, C>,
        shared: SharedInput,
    ) -> Tracked<B, C> {
        map::<B, C, _>(&x, &weight, Some(&bias), [x.node(), weight.node(), bias.node()], shared)
    }
}

/// Computes the differentiable map of `x`, `weight` and, if there is one, `bias`, which are its parents on the tape.
fn map<B: LinearKernels, C: CheckpointStrategy, const N: usize>(
    x: &Tracked<B, C>,
    weight: &Tracked<B, C>,
    bias: Option<&Tracked<B, C>>,
    parents: [NodeGuard; N],
    shared: SharedInput,
) -> Tracked<B, C> {
    let y = B::linear_forward(x.primitive(), weight.primitive(), bias.map(|bias| bias.primitive()));
    let trains = needs_gradient::<B, C>(weight);
    let trains_bias = bias.is_some_and(needs_gradient::<B, C>);
    if !x.is_tracked() && !trains && !trains_bias {
        return constant::<B, C>(y);
    }
    let save = |save: &mut dyn FnMut(&Tracked<B, C>) -> NodeId| Saved {
        weight: x.is_tracked().then(|| save(weight)),
        x: trains.then(|| save(x)),
        x_dtype: x.dtype(),
        weight_dtype: weight.dtype(),
        bias_dtype: bias.filter(|_| trains_bias).map(|bias| bias.dtype()),
        is_leaf: Autodiff::<B, C>::float_is_require_grad(x),
        shared,
    };
    record::<B, C, _, _>(parents, y, save, backward::<B, N>)
}

/// The values saved for backward. An operand is saved only if the gradient of the other operand is requested.
#[derive(Clone, Debug)]
struct Saved {
    weight: Option<NodeId>,
    x: Option<NodeId>,
    x_dtype: DType,
    weight_dtype: DType,
    /// The dtype of the bias, if its gradient is requested.
    bias_dtype: Option<DType>,
    /// True if `x` is a leaf, whose gradient is returned to the caller of backward.
    is_leaf: bool,
    shared: SharedInput,
}

fn backward<B: LinearKernels, const N: usize>(mut step: Step<'_, N>, dy: FloatTensor<B>, saved: Saved) {
    if let Some(dtype) = saved.bias_dtype {
        step.register::<B>(2, B::linear_bias_gradient(&dy, dtype));
    }
    let dw = saved.shared.enter(|shared| {
        if let Some(id) = saved.weight {
            // The weight may be a recomputed gather, so it is dropped before `x` is looked up.
            let weight = step.value::<B>(id);
            // burn itself adds up the gradient of a leaf, because it is returned to the caller.
            let adds = shared.has_gradient && !saved.is_leaf;
            let sum = if adds { step.take_gradient::<B>(0) } else { None };
            let dx = B::linear_x_gradient(&dy, &weight, sum, saved.x_dtype);
            drop(weight);
            step.register::<B>(0, dx);
            shared.has_gradient = true;
        }
        let x = step.value::<B>(saved.x?);
        Some(B::linear_weight_gradient(&x, &dy, &mut shared.prepared, saved.weight_dtype))
    });
    if let Some(dw) = dw {
        step.register::<B>(1, dw);
    }
}

/// Returns `shape`, but with rows of `width` elements.
pub(super) fn with_width(mut shape: Shape, width: usize) -> Shape {
    let last = shape.num_dims() - 1;
    shape[last] = width;
    shape
}

/// Returns the number of rows of a tensor viewed as a matrix, and the elements per row.
pub(super) fn rows_of(tensor: &impl TensorMetadata) -> [usize; 2] {
    let shape = tensor.shape();
    let width = shape.iter().last().copied().unwrap_or(1);
    [shape.iter().rev().skip(1).product(), width]
}
