//! The experts of a mixture: each is a SwiGLU layer, and each token goes through some of them.

use burn::backend::autodiff::{Autodiff, NodeId, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{
    Backend, Dispatch, backend_extension,
    tensor::{FloatTensor, IntTensor},
};
use burn::tensor::{Int, Tensor, activation::silu};
use burn_backend::TensorMetadata;

use super::plain::{FusedOp, is_plain};
use super::tape::{Tracked, needs_gradient, record};

/// The experts of each token.
#[derive(Clone, Debug)]
pub struct Routing {
    /// `[tokens, k]`: indices of experts, distinct for each token.
    pub experts: Tensor<2, Int>,
    /// `[tokens, k]`: factors for the experts' results.
    pub weights: Tensor<2>,
}

/// The projections of all experts.
#[derive(Clone, Debug)]
pub struct ExpertProjections {
    /// `[experts, d_model, d_ff]`.
    pub gate: Tensor<3>,
    /// `[experts, d_model, d_ff]`.
    pub up: Tensor<3>,
    /// `[experts, d_ff, d_model]`.
    pub down: Tensor<3>,
}

/// Computes `y[t] = Σ_j w[t, j] · (silu(x[t] · gate_e) · (x[t] · up_e)) · down_e` with `e = experts[t, j]`, for `x`
/// and the result `[tokens, d_model]`.
///
/// Tokens are grouped by expert, and each group is multiplied with the weights of its expert (MegaBlocks, Gale et
/// al., 2022): no token is dropped, nothing is padded on the CPU, and an expert without tokens costs nothing. The two
/// products `g` and `u` before the gate, `[tokens · k, d_ff]` each, are saved for backward.
///
/// Backward, for the rows of one expert, with `q = dy · downᵀ`, `s = σ(g)` and `h = g · s · u`: `dw = q · h`, `du = w
/// q · g · s`, `dg = w q · u · s · (1 + g · (1 − s))`; `dx = dg · gateᵀ + du · upᵀ`, summed over the experts of a
/// token; `dgate = xᵀ · dg`, `dup = xᵀ · du`, `ddown = (w h)ᵀ · dy`. The gradients of an expert without tokens are
/// zero.
///
/// # Panics
///
/// If an index is not that of an expert. On a GPU, where the check would have to wait for the device, the choice is
/// omitted from the sum instead.
pub fn experts(x: Tensor<2>, routing: Routing, projections: ExpertProjections) -> Tensor<2> {
    if is_plain(FusedOp::Experts) {
        return experts_reference(x, routing, projections);
    }
    let ExpertProjections { gate, up, down } = projections;
    Tensor::from_dispatch(Dispatch::fused_experts(
        x.into_dispatch(),
        routing.weights.into_dispatch(),
        gate.into_dispatch(),
        up.into_dispatch(),
        down.into_dispatch(),
        routing.experts.into_dispatch(),
    ))
}

/// Computes [`experts`] in plain burn, with every token passing through every expert.
pub fn experts_reference(x: Tensor<2>, routing: Routing, projections: ExpertProjections) -> Tensor<2> {
    let [count, d_model, d_ff] = projections.gate.dims();
    let of = |stacked: &Tensor<3>, expert: usize, shape: [usize; 2]| -> Tensor<2> {
        stacked.clone().narrow(0, expert, 1).reshape(shape)
    };
    let run = |expert: usize| {
        let chosen = routing.experts.clone().equal_elem(expert as i64);
        let weight = routing.weights.clone().mask_fill(chosen.bool_not(), 0.0).sum_dim(1);
        let gate = x.clone().matmul(of(&projections.gate, expert, [d_model, d_ff]));
        let up = x.clone().matmul(of(&projections.up, expert, [d_model, d_ff]));
        (silu(gate) * up).matmul(of(&projections.down, expert, [d_ff, d_model])) * weight
    };
    (0..count).map(run).fold(x.zeros_like(), |sum, result| sum + result)
}

/// A backend that can compute [`experts`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait ExpertsOp: Backend {
    /// Returns the weighted sum of the results of each token's experts.
    fn fused_experts(
        x: FloatTensor<Self>,
        weights: FloatTensor<Self>,
        gate: FloatTensor<Self>,
        up: FloatTensor<Self>,
        down: FloatTensor<Self>,
        experts: IntTensor<Self>,
    ) -> FloatTensor<Self>;
}

/// The operands that have gradients: `x`, the weights of the choices, and the projections gate, up and down.
pub type Operands<T> = [T; 5];

/// The products of the rows with `gate` and `up`, with rows grouped by expert.
pub type Hidden<B> = [FloatTensor<B>; 2];

/// The kernels that a backend implements for [`experts`].
pub trait ExpertsKernels: Backend {
    /// Returns the result, and the products that backward needs.
    fn experts_forward(
        operands: Operands<&FloatTensor<Self>>,
        experts: &IntTensor<Self>,
        shape: ExpertsShape,
    ) -> (FloatTensor<Self>, Hidden<Self>);
    /// Returns the requested gradients of the operands.
    fn experts_backward(
        operands: Operands<&FloatTensor<Self>>,
        experts: &IntTensor<Self>,
        hidden: &Hidden<Self>,
        dy: &FloatTensor<Self>,
        shape: ExpertsShape,
        wanted: Operands<bool>,
    ) -> Operands<Option<FloatTensor<Self>>>;
}

impl<B: ExpertsKernels> ExpertsOp for B {
    fn fused_experts(
        x: FloatTensor<B>,
        weights: FloatTensor<B>,
        gate: FloatTensor<B>,
        up: FloatTensor<B>,
        down: FloatTensor<B>,
        experts: IntTensor<B>,
    ) -> FloatTensor<B> {
        let operands = [&x, &weights, &gate, &up, &down];
        B::experts_forward(operands, &experts, ExpertsShape::of(operands, &experts)).0
    }
}

impl<B: ExpertsKernels, C: CheckpointStrategy> ExpertsOp for Autodiff<B, C> {
    fn fused_experts(
        x: Tracked<B, C>,
        weights: Tracked<B, C>,
        gate: Tracked<B, C>,
        up: Tracked<B, C>,
        down: Tracked<B, C>,
        experts: IntTensor<B>,
    ) -> Tracked<B, C> {
        let operands = [&x, &weights, &gate, &up, &down];
        let primitives = operands.map(|operand| operand.primitive());
        let shape = ExpertsShape::of(primitives, &experts);
        let wanted = operands.map(needs_gradient::<B, C>);
        let (y, hidden) = B::experts_forward(primitives, &experts, shape);
        record::<B, C, _, _>(
            operands.map(|operand| operand.node()),
            y,
            |save| Saved { operands: operands.map(save), wanted, experts, hidden, shape },
            |mut step, dy, saved: Saved<B>| {
                let operands = saved.operands.map(|id| step.value::<B>(id));
                let gradients = B::experts_backward(
                    operands.each_ref(),
                    &saved.experts,
                    &saved.hidden,
                    &dy,
                    saved.shape,
                    saved.wanted,
                );
                step.register_all::<B>(gradients);
            },
        )
    }
}

/// The values saved for backward.
#[derive(Clone, Debug)]
struct Saved<B: Backend> {
    operands: Operands<NodeId>,
    /// The operands whose gradients are requested.
    wanted: Operands<bool>,
    experts: IntTensor<B>,
    hidden: Hidden<B>,
    shape: ExpertsShape,
}

/// Sizes of an operation on experts (MoE).
#[derive(Clone, Copy, Debug)]
pub struct ExpertsShape {
    /// Rows of `x`.
    pub tokens: usize,
    /// Experts per token.
    pub per_token: usize,
    /// Number of experts.
    pub experts: usize,
    /// Width of `x`.
    pub d_model: usize,
    /// Width inside an expert.
    pub d_ff: usize,
}

impl ExpertsShape {
    fn of<T: TensorMetadata>(
        [x, weights, gate, up, down]: Operands<&T>,
        chosen: &impl TensorMetadata,
    ) -> Self {
        let [tokens, d_model] = x.shape().dims();
        let [experts, _, d_ff] = gate.shape().dims();
        let choices @ [_, per_token] = weights.shape().dims();
        assert!(
            gate.shape().dims() == [experts, d_model, d_ff]
                && up.shape().dims() == [experts, d_model, d_ff]
                && down.shape().dims() == [experts, d_ff, d_model],
            "experts: rows of {d_model} values, gate {:?}, up {:?}, down {:?}",
            gate.shape(),
            up.shape(),
            down.shape()
        );
        assert!(
            choices == [tokens, per_token] && chosen.shape().dims() == choices,
            "experts: {tokens} tokens, weights {choices:?}, choices {:?}",
            chosen.shape()
        );
        ExpertsShape { tokens, per_token, experts, d_model, d_ff }
    }

    /// Returns the number of rows that experts multiply: one for each choice of a token.
    pub fn rows(self) -> usize {
        self.tokens * self.per_token
    }
}
