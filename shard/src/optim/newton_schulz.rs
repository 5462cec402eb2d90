//! The nearest orthogonal matrix, nearly: Newton–Schulz iterations.

use burn::tensor::Tensor;

/// The least norm that a matrix is divided by.
const EPSILON: f32 = 1e-7;

/// Brings all singular values of `matrices` `[matrices, rows, columns]` near 1, by `steps` iterations of the
/// quintic polynomial with these `coefficients` (Jordan et al., 2024). Singular values end between some 0.7
/// and 1.2 after five steps with Muon's coefficients, which is as good for training as 1. Computes in the
/// dtype of `matrices`.
pub(super) fn orthogonalized(matrices: Tensor<3>, steps: usize, coefficients: [f64; 3]) -> Tensor<3> {
    let [_, rows, columns] = matrices.dims();
    let [a, b, c] = coefficients;
    // The product with its own transpose is as small as it can be.
    let is_tall = rows > columns;
    let x = if is_tall { matrices.swap_dims(1, 2) } else { matrices };
    // Dimension by dimension: the order of a sum over all elements may go by the number of threads.
    let squares = (x.clone() * x.clone()).sum_dim(2).sum_dim(1);
    let mut x = x / squares.sqrt().clamp_min(EPSILON);
    for _ in 0..steps {
        let gram = x.clone().matmul(x.clone().swap_dims(1, 2));
        let polynomial = gram.clone().mul_scalar(b) + gram.clone().matmul(gram).mul_scalar(c);
        x = x.clone().mul_scalar(a) + polynomial.matmul(x);
    }
    if is_tall { x.swap_dims(1, 2) } else { x }
}
