//! Selects kernels by the dtype of a tensor.

/// Runs `$body` with the type alias `$name` bound to the type that matches `$dtype`.
macro_rules! with_type {
    ($dtype:expr, $name:ident => $body:expr, { $($pattern:pat => $type:ty),+ $(,)? }) => {
        match $dtype {
            $($pattern => {
                type $name = $type;
                $body
            })+
            other => panic!("no kernel for tensors of {other:?}"),
        }
    };
}
pub(super) use with_type;

/// Runs `$body` with the type alias `$real` bound to the type in which kernels compute `$dtype`: `f64` for
/// `f64`, and `f32` for everything else.
macro_rules! with_real {
    ($dtype:expr, $real:ident => $body:expr) => {
        $crate::ops::cpu::dispatch::with_type!($dtype, $real => $body, {
            burn::tensor::DType::F64 => f64,
            burn::tensor::DType::F32 | burn::tensor::DType::BF16 | burn::tensor::DType::F16 => f32,
        })
    };
}
pub(super) use with_real;

/// Runs `$body` with `$products` bound to the matrix products of operands of type `$scalar`: those of the option
/// `$bf16` if it is set, or else those of [`with_real`].
macro_rules! with_products {
    ($bf16:expr, $dtype:expr, $products:ident, $scalar:ident => $body:expr) => {
        match $bf16 {
            Some($products) => {
                type $scalar = burn::tensor::bf16;
                $body
            }
            None => $crate::ops::cpu::dispatch::with_real!($dtype, $scalar => {
                let $products = $crate::ops::cpu::gemm::Floats;
                $body
            }),
        }
    };
}
pub(super) use with_products;

/// Runs `$body` with the type alias `$scalar` bound to the element type of tensors of `$dtype`.
macro_rules! with_scalar {
    ($dtype:expr, $scalar:ident => $body:expr) => {
        $crate::ops::cpu::dispatch::with_type!($dtype, $scalar => $body, {
            burn::tensor::DType::F64 => f64,
            burn::tensor::DType::F32 => f32,
            burn::tensor::DType::BF16 => burn::tensor::bf16,
            burn::tensor::DType::F16 => burn::tensor::f16,
        })
    };
}
pub(super) use with_scalar;
