//! The experts of a mixture on a GPU: every token goes through every expert, and counts with weight 0 where
//! it does not choose the expert.
//!
//! How many tokens an expert has is known on the device alone. Groups of tokens would need kernels that read
//! where their rows begin, or a wait for the device; these products need neither, and take `experts / k`
//! times the operations of groups. Nothing is kept for backward, which computes the products before the gate
//! again, one expert after the other.

use burn::tensor::{DType, Shape};
use burn_backend::ops::{FloatTensorOps, IntTensorOps};
use burn_backend::{Slice, get_or_init_device_settings};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::matmul::{Output, matmul, transposed};
use super::sums::zeros;
use super::{contiguous, contiguous_in, empty, reshaped};
use crate::ops::experts::{ExpertsKernels, ExpertsShape, Hidden, Operands};
use crate::ops::swiglu::SwigluKernels;

impl ExpertsKernels for CubeBackend {
    fn experts_forward(
        [x, weights, gate, up, down]: Operands<&CubeTensor>,
        experts: &CubeTensor,
        shape: ExpertsShape,
    ) -> (CubeTensor, Hidden<CubeBackend>) {
        let x = contiguous(x);
        let y = zeros(&x, [shape.tokens, shape.d_model], x.dtype);
        for expert in 0..shape.experts {
            let [gate, up, down] = [gate, up, down].map(|stacked| matrix_of(stacked, expert));
            let [g, u] = [gate, up].map(|weight| matmul(x.clone(), weight, 1.0, Output::New(x.dtype)));
            let w = column_of(weights, &chooses(experts, expert), x.dtype);
            let h = CubeBackend::float_mul(CubeBackend::swiglu_forward(&g, &u), w);
            matmul(h, down, 1.0, Output::Add(y.clone()));
        }
        (y, [(); 2].map(|()| empty(&x, [0], x.dtype)))
    }

    fn experts_backward(
        [x, weights, gate, up, down]: Operands<&CubeTensor>,
        experts: &CubeTensor,
        _hidden: &Hidden<CubeBackend>,
        dy: &CubeTensor,
        shape: ExpertsShape,
        wanted: Operands<bool>,
    ) -> Operands<Option<CubeTensor>> {
        let (x, dy) = (contiguous(x), contiguous_in(dy, x.dtype));
        let dx = zeros(&x, [shape.tokens, shape.d_model], x.dtype);
        let mut dw = zeros(&x, [shape.tokens, shape.per_token], weights.dtype);
        let mut projections = [const { Vec::<CubeTensor>::new() }; 3];
        for expert in 0..shape.experts {
            let [gate, up, down] = [gate, up, down].map(|stacked| matrix_of(stacked, expert));
            let [g, u] =
                [&gate, &up].map(|weight| matmul(x.clone(), weight.clone(), 1.0, Output::New(x.dtype)));
            let h = CubeBackend::swiglu_forward(&g, &u);
            let q = matmul(dy.clone(), transposed(&down), 1.0, Output::New(x.dtype));
            let chosen = chooses(experts, expert);
            let product =
                CubeBackend::float_mul(contiguous_in(&q, DType::F32), contiguous_in(&h, DType::F32));
            let sums = contiguous_in(&CubeBackend::float_sum_dim(product, 1), weights.dtype);
            let sums = CubeBackend::float_expand(sums, Shape::from([shape.tokens, shape.per_token]));
            dw = CubeBackend::float_mask_where(dw, chosen.clone(), sums);
            let w = column_of(weights, &chosen, x.dtype);
            let dh = CubeBackend::float_mul(q, w.clone());
            let [Some(dg), Some(du)] = CubeBackend::swiglu_backward(&g, &u, &dh, [true, true]) else {
                unreachable!("invariant: both gradients are wanted");
            };
            if wanted[0] {
                matmul(dg.clone(), transposed(&gate), 1.0, Output::Add(dx.clone()));
                matmul(du.clone(), transposed(&up), 1.0, Output::Add(dx.clone()));
            }
            let h = CubeBackend::float_mul(h, w);
            let sides = [(&x, dg, gate.dtype), (&x, du, up.dtype), (&h, dy.clone(), down.dtype)];
            for (index, (left, right, dtype)) in sides.into_iter().enumerate() {
                if wanted[index + 2] {
                    let [m, n] = [left, &right].map(|side| side.meta.shape()[1]);
                    let gradient = matmul(transposed(left), right, 1.0, Output::New(dtype));
                    projections[index].push(reshaped(gradient, [1, m, n]));
                }
            }
        }
        let [dgate, dup, ddown] =
            projections.map(|parts| (!parts.is_empty()).then(|| CubeBackend::float_cat(parts, 0)));
        [wanted[0].then_some(dx), wanted[1].then_some(dw), dgate, dup, ddown]
    }
}

/// The matrix of one expert of those of all.
fn matrix_of(stacked: &CubeTensor, expert: usize) -> CubeTensor {
    let [_, rows, columns] = stacked.meta.shape().dims();
    let slices = [expert..expert + 1, 0..rows, 0..columns].map(Slice::from);
    reshaped(contiguous(&CubeBackend::float_slice(stacked.clone(), &slices)), [rows, columns])
}

/// Which choices are of this expert, `[tokens, k]`.
fn chooses(experts: &CubeTensor, expert: usize) -> CubeTensor {
    let settings = get_or_init_device_settings::<CubeBackend>(&experts.device);
    CubeBackend::int_equal_elem(experts.clone(), (expert as i64).into(), settings.bool_dtype)
}

/// The weight of one expert for each token, `[tokens, 1]`: 0 where the token does not choose it.
fn column_of(weights: &CubeTensor, chosen: &CubeTensor, dtype: DType) -> CubeTensor {
    let none = zeros(weights, weights.meta.shape().clone(), weights.dtype);
    let weights = CubeBackend::float_mask_where(none, chosen.clone(), weights.clone());
    contiguous_in(&CubeBackend::float_sum_dim(weights, 1), dtype)
}
