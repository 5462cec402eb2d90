//! The gate of a SwiGLU feed-forward layer (Shazeer, 2020, "GLU Variants Improve Transformer").

use burn::backend::autodiff::{
    Autodiff, NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::Tensor;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use super::Tracked;
use super::cpu::real::Real;
use super::cpu::{self, Values, with_real};

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
#[backend_extension(Flex, Autodiff)]
pub trait SwigluOp: Backend {
    /// `silu(gate) · up`.
    fn fused_swiglu(gate: FloatTensor<Self>, up: FloatTensor<Self>) -> FloatTensor<Self>;
}

impl SwigluOp for Flex {
    fn fused_swiglu(gate: FlexTensor, up: FlexTensor) -> FlexTensor {
        forward(&gate, &up)
    }
}

impl<C: CheckpointStrategy> SwigluOp for Autodiff<Flex, C> {
    fn fused_swiglu(gate: Tracked<C>, up: Tracked<C>) -> Tracked<C> {
        let y = forward(gate.primitive(), up.primitive());
        match SwigluBackward.prepare::<C>([gate.node(), up.node()]).compute_bound().stateful() {
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

impl Backward<Flex, 2> for SwigluBackward {
    type State = [NodeId; 2];

    fn backward(
        self,
        ops: Ops<[NodeId; 2], 2>,
        grads: &mut Gradients,
        checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<Flex>(&ops.node);
        let [gate, up] = ops.state.map(|id| checkpointer.retrieve_node_output::<FlexTensor>(id));
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let gradients = gradients(&gate, &up, &dy, wanted);
        for (node, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<Flex>(node.id, gradient);
            }
        }
    }
}

#[inline(always)]
fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

fn forward(gate: &FlexTensor, up: &FlexTensor) -> FlexTensor {
    let shape = gate.layout().shape().clone();
    assert_eq!(&shape, up.layout().shape(), "swiglu: gate and up differ in shape");
    with_real!(gate.dtype(), T => {
        let (gate_values, up) = (Values::<T>::of(gate), Values::<T>::of(up));
        let (gate_values, up): (&[T], &[T]) = (&gate_values, &up);
        let mut y = vec![T::ZERO; gate_values.len()];
        cpu::for_each_block(&mut y, cpu::BLOCK, #[inline(always)] |start, block| {
            for ((y, &g), &u) in block.iter_mut().zip(&gate_values[start..]).zip(&up[start..]) {
                *y = g * sigmoid(g) * u;
            }
        });
        cpu::tensor_of(y, shape, gate.dtype())
    })
}

fn gradients(
    gate: &FlexTensor,
    up: &FlexTensor,
    dy: &FlexTensor,
    wanted: [bool; 2],
) -> [Option<FlexTensor>; 2] {
    with_real!(gate.dtype(), T => {
        let gate_values = Values::<T>::of(gate);
        let (up_values, dy_values) = (Values::<T>::of(up), Values::<T>::of(dy));
        let [dgate, dup] = gradient_values::<T>([&gate_values, &up_values, &dy_values], wanted);
        [
            dgate.map(|dgate| cpu::tensor_of(dgate, gate.layout().shape().clone(), gate.dtype())),
            dup.map(|dup| cpu::tensor_of(dup, up.layout().shape().clone(), up.dtype())),
        ]
    })
}

fn gradient_values<T: Real>([gate, up, dy]: [&[T]; 3], wanted: [bool; 2]) -> [Option<Vec<T>>; 2] {
    let (len, size) = (gate.len(), cpu::BLOCK);
    let count = len.div_ceil(size);
    let mut dgate = cpu::room::<T>(wanted[0], len);
    let mut dup = cpu::room::<T>(wanted[1], len);
    cpu::blocks(&mut dgate, size, count)
        .into_par_iter()
        .zip(cpu::blocks(&mut dup, size, count))
        .enumerate()
        .for_each(|(i, (dgate, dup))| {
            let range = i * size..len.min((i + 1) * size);
            let operands = gate[range.clone()].iter().zip(&up[range.clone()]).zip(&dy[range]);
            cpu::simd(
                #[inline(always)]
                || match (dgate, dup) {
                    (Some(dgate), Some(dup)) => {
                        for ((dgate, dup), ((&g, &u), &dy)) in
                            dgate.iter_mut().zip(dup).zip(operands)
                        {
                            [*dgate, *dup] = derivatives(g, u, dy);
                        }
                    }
                    (Some(dgate), None) => {
                        for (dgate, ((&g, &u), &dy)) in dgate.iter_mut().zip(operands) {
                            [*dgate, _] = derivatives(g, u, dy);
                        }
                    }
                    (None, Some(dup)) => {
                        for (dup, ((&g, &u), &dy)) in dup.iter_mut().zip(operands) {
                            [_, *dup] = derivatives(g, u, dy);
                        }
                    }
                    (None, None) => {}
                },
            );
        });
    [dgate, dup]
}

/// The gradients of one gate and one up value.
#[inline(always)]
fn derivatives<T: Real>(g: T, u: T, dy: T) -> [T; 2] {
    let s = sigmoid(g);
    [dy * u * s * (T::ONE + g * (T::ONE - s)), dy * (g * s)]
}
