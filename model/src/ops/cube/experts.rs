//! Experts of a mixture on a GPU: each expert multiplies one row per token, zero for tokens that do not choose it.
//!
//! Only the device knows the number of tokens of an expert. Full products need no wait for it, but take `experts / k`
//! times the operations of grouped tokens. The backward pass recomputes the products before the gate.
//!
//! Rows are zeroed before the first product: later, zero times an overflowed result would be NaN.

use burn::tensor::{DType, Shape};
use burn_backend::ops::{BoolTensorOps, FloatTensorOps, IntTensorOps};
use burn_backend::{Slice, get_or_init_device_settings};
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::matmul::{Output, matmul, transposed};
use super::sums::zeros;
use super::{contiguous, contiguous_in, empty, reshaped};
use crate::ops::experts::{ExpertsKernels, ExpertsShape, Hidden, Operands};
use crate::ops::glu::{Activation, GluKernels};

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
            let chosen = chooses(experts, expert);
            let x = rows_for(&x, &chosen);
            let [g, u] = [gate, up].map(|weight| matmul(x.clone(), weight, 1.0, Output::New(x.dtype)));
            let w = column_of(weights, &chosen, x.dtype);
            let h = CubeBackend::float_mul(CubeBackend::glu_forward(&g, &u, Activation::Silu), w);
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
        let mut projections = [(gate, wanted[2]), (up, wanted[3]), (down, wanted[4])]
            .map(|(like, wanted)| wanted.then(|| empty(like, like.meta.shape().clone(), like.dtype)));
        for expert in 0..shape.experts {
            let [gate, up, down] = [gate, up, down].map(|stacked| matrix_of(stacked, expert));
            let chosen = chooses(experts, expert);
            let [x, dy] = [&x, &dy].map(|rows| rows_for(rows, &chosen));
            let [g, u] =
                [&gate, &up].map(|weight| matmul(x.clone(), weight.clone(), 1.0, Output::New(x.dtype)));
            let h = CubeBackend::glu_forward(&g, &u, Activation::Silu);
            let q = matmul(dy.clone(), transposed(&down), 1.0, Output::New(x.dtype));
            let product =
                CubeBackend::float_mul(contiguous_in(&q, DType::F32), contiguous_in(&h, DType::F32));
            let sums = contiguous_in(&CubeBackend::float_sum_dim(product, 1), weights.dtype);
            let sums = CubeBackend::float_expand(sums, Shape::from([shape.tokens, shape.per_token]));
            dw = CubeBackend::float_mask_where(dw, chosen.clone(), sums);
            let w = column_of(weights, &chosen, x.dtype);
            let dh = CubeBackend::float_mul(q, w.clone());
            let [Some(dg), Some(du)] = CubeBackend::glu_backward(&g, &u, &dh, Activation::Silu, [true, true])
            else {
                unreachable!("invariant: both gradients are wanted");
            };
            if wanted[0] {
                matmul(dg.clone(), transposed(&gate), 1.0, Output::Add(dx.clone()));
                matmul(du.clone(), transposed(&up), 1.0, Output::Add(dx.clone()));
            }
            let h = CubeBackend::float_mul(h, w);
            for ([left, right], stacked) in
                [[&x, &dg], [&x, &du], [&h, &dy]].into_iter().zip(&mut projections)
            {
                // Moved out: with a second handle, each assignment would copy the weights of all experts.
                *stacked = stacked.take().map(|stacked| {
                    let output = Output::New(stacked.dtype);
                    with_matrix(stacked, expert, matmul(transposed(left), right.clone(), 1.0, output))
                });
            }
        }
        let [dgate, dup, ddown] = projections;
        [wanted[0].then_some(dx), wanted[1].then_some(dw), dgate, dup, ddown]
    }
}

/// Returns one expert's matrix: a view, or a copy if the device does not allow a buffer to begin there.
fn matrix_of(stacked: &CubeTensor, expert: usize) -> CubeTensor {
    let [_, rows, columns] = stacked.meta.shape().dims();
    let slices = slices_of(stacked, expert);
    reshaped(contiguous(&CubeBackend::float_slice(stacked.clone(), &slices)), [rows, columns])
}

/// Replaces one expert's matrix, in place if `stacked` has no other handle.
fn with_matrix(stacked: CubeTensor, expert: usize, matrix: CubeTensor) -> CubeTensor {
    let [_, rows, columns] = stacked.meta.shape().dims();
    let slices = slices_of(&stacked, expert);
    CubeBackend::float_slice_assign(stacked, &slices, reshaped(matrix, [1, rows, columns]))
}

fn slices_of(stacked: &CubeTensor, expert: usize) -> [Slice; 3] {
    let [_, rows, columns] = stacked.meta.shape().dims();
    [expert..expert + 1, 0..rows, 0..columns].map(Slice::from)
}

/// Returns `rows`, with zeros for tokens that do not choose the expert.
fn rows_for(rows: &CubeTensor, chosen: &CubeTensor) -> CubeTensor {
    let others = CubeBackend::bool_not(CubeBackend::bool_any_dim(chosen.clone(), 1));
    contiguous(&CubeBackend::float_mask_fill(rows.clone(), others, 0.0.into()))
}

/// Returns a mask of the choices of this expert, `[tokens, k]`.
fn chooses(experts: &CubeTensor, expert: usize) -> CubeTensor {
    let settings = get_or_init_device_settings::<CubeBackend>(&experts.device);
    CubeBackend::int_equal_elem(experts.clone(), (expert as i64).into(), settings.bool_dtype)
}

/// Returns the expert's weight for each token, `[tokens, 1]`: 0 if the token does not choose it.
fn column_of(weights: &CubeTensor, chosen: &CubeTensor, dtype: DType) -> CubeTensor {
    let none = zeros(weights, weights.meta.shape().clone(), weights.dtype);
    let weights = CubeBackend::float_mask_where(none, chosen.clone(), weights.clone());
    contiguous_in(&CubeBackend::float_sum_dim(weights, 1), dtype)
}
