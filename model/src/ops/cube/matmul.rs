//! Matrix products: with cuBLASLt on NVIDIA GPUs, and with burn's kernels elsewhere.

use burn::backend::DispatchDevice;
use burn::tensor::{DType, Device};
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::cast;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul as multiply_by_kernel};
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;

use super::sums::{add_row, add_scaled, clear, scale};
use super::{contiguous, empty, len_of};
#[cfg(feature = "cuda")]
use super::{reshaped, rows_at};

#[cfg(feature = "cuda")]
pub use super::cublaslt::{
    ProductAlgorithms, allow_tf32, measure_algorithms, measured_algorithms, use_algorithms, used_algorithms,
};

/// The destination of a product.
pub enum Output {
    /// A new tensor of this dtype.
    New(DType),
    /// A contiguous tensor to overwrite.
    Overwrite(CubeTensor),
    /// A contiguous tensor to add the product to.
    Add(CubeTensor),
}

/// Computes `alpha · a · b` for `[m, k]` and `[k, n]` of any strides into a contiguous `[m, n]`.
///
/// Converts `b` to the dtype of `a`, and adds in `f32`.
///
/// # Panics
///
/// If sizes do not match, or if cuBLASLt has no algorithm for `f32` operands and TF32 is not allowed.
pub fn matmul(a: CubeTensor, b: CubeTensor, alpha: f32, output: Output) -> CubeTensor {
    product(a, b, None, alpha, output)
}

/// Computes [`matmul`] and adds a contiguous `bias`, `[n]`, to each row. `alpha` does not multiply the bias.
pub(super) fn product(
    a: CubeTensor,
    b: CubeTensor,
    bias: Option<&CubeTensor>,
    alpha: f32,
    output: Output,
) -> CubeTensor {
    let ([m, k], [inner, n]) = (a.meta.shape().dims(), b.meta.shape().dims());
    assert_eq!(k, inner, "matmul: {m} × {k} by {inner} × {n}");
    let b = if b.dtype == a.dtype { b } else { cast(b, a.dtype) };
    let (output, add) = match output {
        Output::New(dtype) => (empty(&a, [m, n], dtype), false),
        Output::Overwrite(output) => (output, false),
        Output::Add(output) => (output, true),
    };
    assert_eq!(len_of(&output), m * n, "matmul: the size of the output");
    debug_assert!(output.is_contiguous(), "products go to contiguous tensors");
    if len_of(&output) == 0 {
        return output;
    }
    #[cfg(feature = "cuda")]
    if super::cublaslt::multiply(&a, &b, bias, &output, [alpha, f32::from(u8::from(add))]) {
        return output;
    }
    match (k, add) {
        (0, true) => {}
        (0, false) => clear(&output),
        (_, true) => {
            let product = empty(&a, [m, n], DType::F32);
            by_kernel(a, b, &product);
            add_scaled(&output, &product, alpha);
        }
        (_, false) => {
            by_kernel(a, b, &output);
            if alpha != 1.0 {
                scale(&output, alpha);
            }
        }
    }
    if let Some(bias) = bias {
        add_row(&output, bias);
    }
    output
}

/// Multiplies two stacks, `[batch, heads, m, k]` and `[batch, heads, k, n]` of any strides, into a contiguous
/// `[batch, heads, m, n]`. `is_transposed` marks stacks whose matrices are passed transposed.
///
/// On NVIDIA GPUs, cuBLASLt multiplies one matrix at a time: burn's kernels always round `f32` to TF32.
pub(super) fn batched(stacks: [CubeTensor; 2], is_transposed: [bool; 2]) -> CubeTensor {
    #[cfg(feature = "cuda")]
    if super::cublaslt::serves(&stacks[0]) {
        return one_by_one(&stacks.map(|stack| contiguous(&stack)), is_transposed);
    }
    let [a, b] = stacks;
    let meant = |stack, is_transposed| match is_transposed {
        true => permute(stack, &[0, 1, 3, 2]),
        false => stack,
    };
    contiguous(&CubeBackend::float_matmul(meant(a, is_transposed[0]), meant(b, is_transposed[1])))
}

#[cfg(feature = "cuda")]
fn one_by_one(stacks: &[CubeTensor; 2], is_transposed: [bool; 2]) -> CubeTensor {
    let size = |at: usize| {
        let [batch, heads, rows, columns] = stacks[at].meta.shape().dims();
        (batch * heads, if is_transposed[at] { [columns, rows] } else { [rows, columns] })
    };
    let ((count, [m, _]), (_, [_, n])) = (size(0), size(1));
    let [batch, heads, ..]: [usize; 4] = stacks[0].meta.shape().dims();
    let output = empty(&stacks[0], [batch, heads, m, n], stacks[0].dtype);
    let matrix = |stack: &CubeTensor, at: usize| {
        let [.., rows, columns]: [usize; 4] = stack.meta.shape().dims();
        rows_at(&reshaped(stack.clone(), [count * rows, columns]), at * rows, rows)
    };
    for at in 0..count {
        let [a, b] = [0, 1].map(|of| match is_transposed[of] {
            true => transposed(&matrix(&stacks[of], at)),
            false => matrix(&stacks[of], at),
        });
        matmul(a, b, 1.0, Output::Overwrite(matrix(&output, at)));
    }
    output
}

/// Returns whether `device` may round `f32` operands to TF32, with a relative error of up to 2⁻¹¹.
pub fn rounds_to_tf32(device: &Device) -> bool {
    match device.clone().without_autodiff().as_dispatch() {
        #[cfg(feature = "cuda")]
        DispatchDevice::Cube(device) => super::cublaslt::rounds_to_tf32(&device.client()),
        _ => false,
    }
}

fn by_kernel(a: CubeTensor, b: CubeTensor, output: &CubeTensor) {
    let (strategy, dtype) = (MatmulStrategy::default(), output.dtype);
    multiply_by_kernel(a, b, Some(output.clone()), strategy, dtype)
        .expect("two matrices whose sizes fit have a product");
}

/// Returns a transposed view of a matrix.
pub fn transposed(matrix: &CubeTensor) -> CubeTensor {
    permute(matrix.clone(), &[1, 0])
}
