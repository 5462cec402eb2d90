//! Newton–Schulz iterations, which approximate the nearest orthogonal matrix.

use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
#[cfg(feature = "cube")]
use burn::tensor::Scalar;
use burn::tensor::Tensor;
#[cfg(feature = "cube")]
use burn_backend::ops::FloatTensorOps;
#[cfg(feature = "cube")]
use burn_cubecl::CubeBackend;
use burn_flex::FlexTensor;
use rayon::prelude::*;

use crate::buffers::host::{TASK, sum_of_squares};

/// Minimum norm by which a matrix is divided.
const EPSILON: f32 = 1e-7;

/// Brings all singular values of `matrices` `[matrices, rows, columns]` (f32) near 1, with `steps` iterations
/// of the quintic polynomial with these `coefficients` (Jordan et al., 2024). Singular values end between
/// about 0.7 and 1.2 after five steps with Muon's coefficients, which is as good for training as 1.
pub(super) fn orthogonalized(matrices: Tensor<3>, steps: usize, coefficients: [f64; 3]) -> Tensor<3> {
    let [_, rows, columns] = matrices.dims();
    let [a, b, c] = coefficients.map(|coefficient| coefficient as f32);
    // Makes the product with its own transpose as small as possible.
    let is_tall = rows > columns;
    let gram_of = |x: Tensor<3>| match (x.clone().swap_dims(1, 2), is_tall) {
        (transposed, true) => transposed.matmul(x),
        (transposed, false) => x.matmul(transposed),
    };
    let mut x = Tensor::from_dispatch(Dispatch::normalized(matrices.into_dispatch()));
    for _ in 0..steps {
        let gram = gram_of(x.clone());
        let polynomial = scaled_sum(gram.clone(), b, gram.clone().matmul(gram), c);
        let product = if is_tall { x.clone().matmul(polynomial) } else { polynomial.matmul(x.clone()) };
        x = scaled_sum(x, a, product, 1.0);
    }
    x
}

fn scaled_sum(x: Tensor<3>, a: f32, y: Tensor<3>, b: f32) -> Tensor<3> {
    Tensor::from_dispatch(Dispatch::scaled_sum(x.into_dispatch(), a, y.into_dispatch(), b))
}

/// The operations of an iteration other than matrix products. Tensors are f32 and have three dimensions.
#[backend_extension(Flex, Cube: cfg(feature = "cube"))]
pub(crate) trait IterationOps: Backend {
    /// Divides each of `matrices` by its Frobenius norm, or by [`EPSILON`] if that is greater.
    fn normalized(matrices: FloatTensor<Self>) -> FloatTensor<Self>;
    /// Returns `a · x + b · y`.
    fn scaled_sum(x: FloatTensor<Self>, a: f32, y: FloatTensor<Self>, b: f32) -> FloatTensor<Self>;
}

impl IterationOps for Flex {
    fn normalized(matrices: FlexTensor) -> FlexTensor {
        let shape = matrices.layout().shape().clone();
        // A view of its whole buffer. `matrices` is dropped, so that the tensor is not copied again if it is
        // contiguous already.
        let mut normalized = matrices.to_contiguous();
        drop(matrices);
        let size = shape[1] * shape[2];
        for matrix in normalized.storage_mut::<f32>().chunks_exact_mut(size.max(1)) {
            let norm = (sum_of_squares(matrix).sqrt() as f32).max(EPSILON);
            matrix.par_chunks_mut(TASK).for_each(|task| task.iter_mut().for_each(|value| *value /= norm));
        }
        normalized
    }

    fn scaled_sum(x: FlexTensor, a: f32, y: FlexTensor, b: f32) -> FlexTensor {
        let (x, mut sum) = (x.to_contiguous(), y.to_contiguous());
        // Dropped so that the sum can use its memory.
        drop(y);
        let tasks = sum.storage_mut::<f32>().par_chunks_mut(TASK).zip(x.storage::<f32>().par_chunks(TASK));
        tasks.for_each(|(sum, x)| {
            for (y, x) in sum.iter_mut().zip(x) {
                *y = a * x + b * *y;
            }
        });
        sum
    }
}

#[cfg(feature = "cube")]
impl IterationOps for CubeBackend {
    fn normalized(matrices: FloatTensor<Self>) -> FloatTensor<Self> {
        let squares = Self::float_mul(matrices.clone(), matrices.clone());
        // Sums one dimension at a time: a sum over all elements may use any order.
        let squares = Self::float_sum_dim(Self::float_sum_dim(squares, 2), 1);
        let norms = Self::float_clamp_min(Self::float_sqrt(squares), Scalar::from(EPSILON));
        Self::float_div(matrices, norms)
    }

    fn scaled_sum(x: FloatTensor<Self>, a: f32, y: FloatTensor<Self>, b: f32) -> FloatTensor<Self> {
        let scaled = |tensor, factor: f32| Self::float_mul_scalar(tensor, Scalar::from(factor));
        let y = if b == 1.0 { y } else { scaled(y, b) };
        Self::float_add(scaled(x, a), y)
    }
}
