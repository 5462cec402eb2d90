//! Kernels for SwiGLU and GeGLU gates.

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::dispatch::with_scalar;
use super::parallel::{BLOCK, blocks, for_each_item, simd};
use super::scalar::{Real, Scalar};
use super::uninit::{UninitVec, written};
use super::values::{Values, new_tensor};
use crate::ops::glu::{Activation, GluKernels};

macro_rules! with_gate {
    ($activation:expr, $gate:ident => $body:expr) => {
        match $activation {
            Activation::Silu => {
                type $gate = Silu;
                $body
            }
            Activation::Gelu => {
                type $gate = Gelu;
                $body
            }
        }
    };
}

impl GluKernels for Flex {
    fn glu_forward(gate: &FlexTensor, up: &FlexTensor, activation: Activation) -> FlexTensor {
        let shape = gate.layout().shape().clone();
        assert_eq!(&shape, up.layout().shape(), "gate and up differ in shape");
        with_gate!(activation, G => with_scalar!(gate.dtype(), S => {
            let (gate, up) = (Values::<S>::of(gate), Values::<S>::of(up));
            let (gate, up): (&[S], &[S]) = (&gate, &up);
            // SAFETY: the operands are as long as the result, so the loop writes every element.
            let y = unsafe { written(gate.len(), BLOCK, #[inline(always)] |start, block| {
                for ((y, &g), &u) in block.iter_mut().zip(&gate[start..]).zip(&up[start..]) {
                    y.write(S::nearest(G::of(g.real()) * u.real()));
                }
            }) };
            new_tensor(y, shape)
        }))
    }

    fn glu_backward(
        gate: &FlexTensor,
        up: &FlexTensor,
        dy: &FlexTensor,
        activation: Activation,
        wanted: [bool; 2],
    ) -> [Option<FlexTensor>; 2] {
        with_gate!(activation, G => with_scalar!(gate.dtype(), S => {
            let gate_values = Values::<S>::of(gate);
            let (up_values, dy_values) = (Values::<S>::of(up), Values::<S>::of(dy));
            let [dgate, dup] = gradient_values::<G, S>([&gate_values, &up_values, &dy_values], wanted);
            [
                dgate.map(|dgate| new_tensor(dgate, gate.layout().shape().clone())),
                dup.map(|dup| new_tensor(dup, up.layout().shape().clone())),
            ]
        }))
    }
}

trait Gate {
    fn of<T: Real>(g: T) -> T;
    /// Returns `factor` times the derivative at `g`.
    fn times_slope<T: Real>(factor: T, g: T) -> T;
}

struct Silu;

impl Gate for Silu {
    #[inline(always)]
    fn of<T: Real>(g: T) -> T {
        g * sigmoid(g)
    }

    #[inline(always)]
    fn times_slope<T: Real>(factor: T, g: T) -> T {
        let s = sigmoid(g);
        factor * s * (T::ONE + g * (T::ONE - s))
    }
}

struct Gelu;

impl Gate for Gelu {
    #[inline(always)]
    fn of<T: Real>(g: T) -> T {
        g * normal_distribution(g)
    }

    #[inline(always)]
    fn times_slope<T: Real>(factor: T, g: T) -> T {
        let root_of_two_pi = T::from_f64((2.0 * std::f64::consts::PI).sqrt());
        let density = (T::from_f64(-0.5) * g * g).exp() / root_of_two_pi;
        factor * (normal_distribution(g) + g * density)
    }
}

#[inline(always)]
fn normal_distribution<T: Real>(x: T) -> T {
    let half = T::from_f64(0.5);
    half + half * (x * T::from_f64(std::f64::consts::FRAC_1_SQRT_2)).erf()
}

#[inline(always)]
pub fn sigmoid<T: Real>(x: T) -> T {
    T::ONE / (T::ONE + (-x).exp())
}

fn gradient_values<G: Gate, S: Scalar>([gate, up, dy]: [&[S]; 3], wanted: [bool; 2]) -> [Option<Vec<S>>; 2] {
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
                        let [for_gate, for_up] = derivatives::<G, S>(g, u, dy);
                        dgate.write(for_gate);
                        dup.write(for_up);
                    }
                }
                (Some(dgate), None) => {
                    for (dgate, ((&g, &u), &dy)) in dgate.iter_mut().zip(operands) {
                        dgate.write(derivatives::<G, S>(g, u, dy)[0]);
                    }
                }
                (None, Some(dup)) => {
                    for (dup, ((&g, &u), &dy)) in dup.iter_mut().zip(operands) {
                        dup.write(derivatives::<G, S>(g, u, dy)[1]);
                    }
                }
                (None, None) => {}
            },
        );
    });
    // SAFETY: blocks are as long as their operands, and the loops write every element of a requested gradient.
    [dgate, dup].map(|gradient| gradient.map(|gradient| unsafe { gradient.assume_init() }))
}

/// Returns the gradients of one gate value, and of the up value that it multiplies.
#[inline(always)]
fn derivatives<G: Gate, S: Scalar>(g: S, u: S, dy: S) -> [S; 2] {
    let (g, u, dy) = (g.real(), u.real(), dy.real());
    [S::nearest(G::times_slope(dy * u, g)), S::nearest(dy * G::of(g))]
}
