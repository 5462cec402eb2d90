//! The gates of SwiGLU and GeGLU layers: one unit per vector of elements.

use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{contiguous, cubes_for, elem, empty, len_of, vector_size};
use crate::ops::glu::{Activation, GluKernels};

impl GluKernels for CubeBackend {
    fn glu_forward(gate: &CubeTensor, up: &CubeTensor, activation: Activation) -> CubeTensor {
        let shape = gate.meta.shape().clone();
        assert_eq!(&shape, up.meta.shape(), "gate and up differ in shape");
        let (gate, up) = (contiguous(gate), contiguous(up));
        let y = empty(&gate, shape, gate.dtype);
        let vector = vector_size(&[&gate, &up], len_of(&y));
        // SAFETY: the three have the same length, and no unit goes beyond that of `y`.
        unsafe {
            launch! {
                forward_kernel, cubes_for(&y.client, len_of(&y) / vector), [gate, up], vector;
                gate / vector, up / vector, y / vector; [elem(&gate), elem(&up)], activation
            }
        }
        y
    }

    fn glu_backward(
        gate: &CubeTensor,
        up: &CubeTensor,
        dy: &CubeTensor,
        activation: Activation,
        wanted: [bool; 2],
    ) -> [Option<CubeTensor>; 2] {
        let (gate, up, dy) = (contiguous(gate), contiguous(up), contiguous(dy));
        let shape = gate.meta.shape().clone();
        let dgate = empty(&gate, shape.clone(), gate.dtype);
        let dup = empty(&gate, shape, up.dtype);
        let len = len_of(&gate);
        let vector = vector_size(&[&gate, &up, &dy], len);
        // SAFETY: all have the same length, and no unit goes beyond that of `dgate`.
        unsafe {
            launch! {
                backward_kernel, cubes_for(&gate.client, len / vector), [gate, up, dy], vector;
                gate / vector, up / vector, dy / vector, dgate / vector, dup / vector;
                [elem(&gate), elem(&up), elem(&dy)], activation
            }
        }
        [wanted[0].then_some(dgate), wanted[1].then_some(dup)]
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn forward_kernel<G: Float, U: Float, N: Size>(
    gate: &[Vector<G, N>],
    up: &[Vector<U, N>],
    y: &mut [Vector<G, N>],
    #[define(G, U)] _dtypes: [ElemType; 2],
    #[comptime] activation: Activation,
) {
    if ABSOLUTE_POS >= y.len() {
        terminate!();
    }
    let g = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
    let u = Vector::<f32, N>::cast_from(up[ABSOLUTE_POS]);
    let activated = match activation {
        Activation::Silu => g * sigmoid::<N>(g),
        Activation::Gelu => g * normal_distribution::<N>(g),
    };
    y[ABSOLUTE_POS] = Vector::cast_from(activated * u);
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn backward_kernel<G: Float, U: Float, D: Float, N: Size>(
    gate: &[Vector<G, N>],
    up: &[Vector<U, N>],
    dy: &[Vector<D, N>],
    dgate: &mut [Vector<G, N>],
    dup: &mut [Vector<U, N>],
    #[define(G, U, D)] _dtypes: [ElemType; 3],
    #[comptime] activation: Activation,
) {
    if ABSOLUTE_POS >= dgate.len() {
        terminate!();
    }
    let g = Vector::<f32, N>::cast_from(gate[ABSOLUTE_POS]);
    let u = Vector::<f32, N>::cast_from(up[ABSOLUTE_POS]);
    let d = Vector::<f32, N>::cast_from(dy[ABSOLUTE_POS]);
    let one = Vector::<f32, N>::new(1.0f32);
    match activation {
        Activation::Silu => {
            let s = sigmoid::<N>(g);
            dgate[ABSOLUTE_POS] = Vector::cast_from(d * u * s * (one + g * (one - s)));
            dup[ABSOLUTE_POS] = Vector::cast_from(d * (g * s));
        }
        Activation::Gelu => {
            let share = normal_distribution::<N>(g);
            let scale = Vector::<f32, N>::new(comptime!(1.0 / (2.0 * std::f32::consts::PI).sqrt()));
            let density = scale * (Vector::<f32, N>::new(-0.5f32) * g * g).exp();
            dgate[ABSOLUTE_POS] = Vector::cast_from(d * u * (share + g * density));
            dup[ABSOLUTE_POS] = Vector::cast_from(d * (g * share));
        }
    }
}

#[cube]
fn sigmoid<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let one = Vector::<f32, N>::new(1.0f32);
    one / (one + (-x).exp())
}

#[cube]
fn normal_distribution<N: Size>(x: Vector<f32, N>) -> Vector<f32, N> {
    let half = Vector::<f32, N>::new(0.5f32);
    half + half * (x * Vector::<f32, N>::new(std::f32::consts::FRAC_1_SQRT_2)).erf()
}
