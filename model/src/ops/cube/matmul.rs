//! Matrix products.

use burn::tensor::DType;
use burn_cubecl::kernel::cast;
use burn_cubecl::kernel::matmul::{MatmulStrategy, matmul as multiply};
use burn_cubecl::ops::permute;
use burn_cubecl::tensor::CubeTensor;

use super::sums::{add_scaled, scale, zeros};
use super::{empty, len_of};

/// Where a product goes.
pub enum Output {
    /// To a tensor of this dtype.
    New(DType),
    /// Over what a contiguous tensor holds.
    Overwrite(CubeTensor),
    /// Added to what a contiguous tensor holds.
    Add(CubeTensor),
}

/// `alpha · a · b` for `[m, k]` and `[k, n]` of any strides; the output is contiguous `[m, n]`.
///
/// Multiplies in the dtype of `a`, to which `b` is converted, and adds in `f32`.
pub fn matmul(a: CubeTensor, b: CubeTensor, alpha: f32, output: Output) -> CubeTensor {
    let ([m, k], [inner, n]) = (a.meta.shape().dims(), b.meta.shape().dims());
    assert_eq!(k, inner, "matmul: {m} × {k} by {inner} × {n}");
    let b = if b.dtype == a.dtype { b } else { cast(b, a.dtype) };
    let (product, sum) = match output {
        Output::New(dtype) => (empty(&a, [m, n], dtype), None),
        Output::Overwrite(product) => (product, None),
        Output::Add(sum) => (empty(&a, [m, n], DType::F32), Some(sum)),
    };
    if len_of(&product) == 0 {
        return sum.unwrap_or(product);
    }
    if k == 0 {
        return sum.unwrap_or_else(|| zeros(&a, [m, n], product.dtype));
    }
    let dtype = product.dtype;
    multiply(a, b, Some(product.clone()), MatmulStrategy::default(), dtype)
        .expect("two matrices whose sizes fit have a product");
    match sum {
        Some(sum) => {
            add_scaled(&sum, &product, alpha);
            sum
        }
        None => {
            if alpha != 1.0 {
                scale(&product, alpha);
            }
            product
        }
    }
}

/// A view of a matrix with rows and columns exchanged.
pub fn transposed(matrix: &CubeTensor) -> CubeTensor {
    permute(matrix.clone(), &[1, 0])
}
