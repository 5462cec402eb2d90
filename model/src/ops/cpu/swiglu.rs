//! The kernels of the gate of a SwiGLU layer.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::dispatch::with_scalar;
use super::parallel::{BLOCK, blocks, for_each_item, simd};
use super::scalar::{Real, Scalar};
use super::uninit::{UninitVec, written};
use super::values::{Values, new_tensor};
use crate::ops::swiglu::SwigluKernels;

impl SwigluKernels for Flex {
    fn swiglu_forward(gate: &FlexTensor, up: &FlexTensor) -> FlexTensor {
        let shape = gate.layout().shape().clone();
        assert_eq!(&shape, up.layout().shape(), "swiglu: gate and up differ in shape");
        with_scalar!(gate.dtype(), S => {
            let (gate_values, up) = (Values::<S>::of(gate), Values::<S>::of(up));
            let (gate_values, up): (&[S], &[S]) = (&gate_values, &up);
            // SAFETY: the operands are as long as the result, so the loop writes every element.
            let y = unsafe { written(gate_values.len(), BLOCK, #[inline(always)] |start, block| {
                for ((y, &g), &u) in block.iter_mut().zip(&gate_values[start..]).zip(&up[start..]) {
                    let (g, u) = (g.real(), u.real());
                    y.write(S::nearest(g * sigmoid(g) * u));
                }
            }) };
            new_tensor(y, shape)
        })
    }

    fn swiglu_backward(
        gate: &FlexTensor,
        up: &FlexTensor,
        dy: &FlexTensor,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        with_scalar!(gate.dtype(), S => {
            let gate_values = Values::<S>::of(gate);
            let (up_values, dy_values) = (Values::<S>::of(up), Values::<S>::of(dy));
            let [dgate, dup] = gradient_values::<S>([&gate_values, &up_values, &dy_values], wanted);
            [
                dgate.map(|dgate| new_tensor(dgate, gate.layout().shape().clone())),
                dup.map(|dup| new_tensor(dup, up.layout().shape().clone())),
            ]
        })
    }
}

#[inline(always)]
pub fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

fn gradient_values<S: Scalar>([gate, up, dy]: [&[S]; 3], wanted: [bool; 2]) -> [Option<Vec<S>>; 2] {
    let (len, size) = (gate.len(), BLOCK);
    let count = len.div_ceil(size);
    let mut dgate = wanted[0].then(|| UninitVec::new(len));
    let mut dup = wanted[1].then(|| UninitVec::new(len));
    let of_gate = blocks(dgate.as_mut().map(UninitVec::slots), size, count);
    let of_up = blocks(dup.as_mut().map(UninitVec::slots), size, count);
    for_each_item(of_gate.into_iter().zip(of_up), usize::MAX, |i, (dgate, dup)| {
        let range = i * size..len.min((i + 1) * size);
        let operands = gate[range.clone()].iter().zip(&up[range.clone()]).zip(&dy[range]);
        simd(
            #[inline(always)]
            || match (dgate, dup) {
                (Some(dgate), Some(dup)) => {
                    for ((dgate, dup), ((&g, &u), &dy)) in dgate.iter_mut().zip(dup).zip(operands) {
                        let [for_gate, for_up] = derivatives(g, u, dy);
                        dgate.write(for_gate);
                        dup.write(for_up);
                    }
                }
                (Some(dgate), None) => {
                    for (dgate, ((&g, &u), &dy)) in dgate.iter_mut().zip(operands) {
                        dgate.write(derivatives(g, u, dy)[0]);
                    }
                }
                (None, Some(dup)) => {
                    for (dup, ((&g, &u), &dy)) in dup.iter_mut().zip(operands) {
                        dup.write(derivatives(g, u, dy)[1]);
                    }
                }
                (None, None) => {}
            },
        );
    });
    // SAFETY: each block is as long as its operands, and the loops write every element of a wanted gradient.
    [dgate, dup].map(|gradient| gradient.map(|gradient| unsafe { gradient.assume_init() }))
}

/// The gradients of one gate and one up value.
#[inline(always)]
fn derivatives<S: Scalar>(g: S, u: S, dy: S) -> [S; 2] {
    let (g, u, dy) = (g.real(), u.real(), dy.real());
    let (s, one) = (sigmoid(g), S::Real::ONE);
    [S::nearest(dy * u * s * (one + g * (one - s))), S::nearest(dy * (g * s))]
}
