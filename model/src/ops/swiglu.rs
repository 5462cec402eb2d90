//! The gate of a SwiGLU feed-forward layer (Shazeer, 2020, "GLU Variants Improve Transformer").

use burn::backend::autodiff::{
    Autodiff, NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;

use super::tape::{Tracked, parent_ids, register};

/// `silu(gate) · up` for tensors of one shape, with `silu(g) = g · σ(g)`.
///
/// Backward, with `s = σ(gate)`: `dup = dy · gate · s`,
/// `dgate = dy · up · s · (1 + gate · (1 − s))`.
pub fn swiglu<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    let (gate, up) = (gate.into_dispatch(), up.into_dispatch());
    Tensor::from_dispatch(<Dispatch as SwigluOp>::fused_swiglu(gate, up))
}

/// [`swiglu`] in plain burn.
pub fn swiglu_reference<const D: usize>(gate: Tensor<D>, up: Tensor<D>) -> Tensor<D> {
    burn::tensor::activation::silu(gate) * up
}

/// The backends of [`swiglu`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait SwigluOp: Backend {
    /// `silu(gate) · up`.
    fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

/// The kernels that a backend implements for [`swiglu`].
pub trait SwigluKernels: Backend {
    /// The result.
    fn swiglu_forward(gate: &FloatTensor<Self>, up: &FloatTensor<Self>) -> FloatTensor<Self>;
    /// The gradients of `gate` and `up` that are wanted.
    fn swiglu_backward(
        gate: &FloatTensor<Self>,
        up: &FloatTensor<Self>,
        dy: &FloatTensor<Self>,
        wanted: [bool; 2],
    ) -> [Option<FloatTensor<Self>>; 2];
}

impl<B: SwigluKernels> SwigluOp for B {
    fn fused_swiglu(gate: FloatTensor<B>, up: FloatTensor<B>) -> FloatTensor<B> {
        B::swiglu_forward(&gate, &up)
    }
}

impl<B: SwigluKernels, C: CheckpointStrategy> SwigluOp for Autodiff<B, C> {
    fn fused_swiglu(gate: Tracked<B, C>, up: Tracked<B, C>) -> Tracked<B, C> {
        let y = B::swiglu_forward(gate.primitive(), up.primitive());
        let prep = Backward::<B, 2>::prepare::<C>(SwigluBackward, [gate.node(), up.node()]);
        match prep.compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let saved = [prep.checkpoint(&gate), prep.checkpoint(&up)];
                prep.finish(saved, y)
            }
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Debug)]
struct SwigluBackward;

impl<B: SwigluKernels> Backward<B, 2> for SwigluBackward {
    type State = [NodeId; 2];

    fn backward(self, ops: Ops<[NodeId; 2], 2>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let parents = parent_ids(&ops);
        let [gate, up] = ops.state.map(|id| checkpointer.retrieve_node_output::<FloatTensor<B>>(id));
        let wanted = parents.map(|parent| parent.is_some());
        let gradients = B::swiglu_backward(&gate, &up, &dy, wanted);
        register::<B, _>(grads, parents, gradients);
    }
}
