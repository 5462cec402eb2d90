//! Matrix products: by cuBLASLt on NVIDIA GPUs, and by burn's kernels elsewhere.

use burn::tensor::DType;
use burn_cubecl::kernel::cast;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul as multiply_by_kernel};
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;

use super::sums::{add_row, add_scaled, clear, scale};
use super::{empty, len_of};

#[cfg(feature = "cuda")]
pub use super::cublaslt::allow_tf32;

/// The output of a product.
pub enum Output {
    /// A new tensor of this dtype.
    New(DType),
    /// The contents of a contiguous tensor are replaced.
    Overwrite(CubeTensor),
    /// The product is added to the contents of a contiguous tensor.
    Add(CubeTensor),
}

/// `alpha · a · b` for `[m, k]` and `[k, n]` of any strides; the output is contiguous `[m, n]`.
///
/// Multiplies in the dtype of `a`, to which `b` is converted, and adds in `f32`.
pub fn matmul(a: CubeTensor, b: CubeTensor, alpha: f32, output: Output) -> CubeTensor {
    product(a, b, None, alpha, output)
}

/// [`matmul`], with a contiguous `bias`, `[n]`, added to each row. It is not added to what is in the output,
/// and not multiplied by `alpha`.
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

/// Writes `a · b` over the contents of `output`.
fn by_kernel(a: CubeTensor, b: CubeTensor, output: &CubeTensor) {
    let (strategy, dtype) = (MatmulStrategy::default(), output.dtype);
    multiply_by_kernel(a, b, Some(output.clone()), strategy, dtype)
        .expect("two matrices whose sizes fit have a product");
}

/// A view of a matrix with rows and columns exchanged.
pub fn transposed(matrix: &CubeTensor) -> CubeTensor {
    permute(matrix.clone(), &[1, 0])
}
