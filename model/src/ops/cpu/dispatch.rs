//! Selects kernels by the dtype of a tensor.

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

/// Runs `$body` with `$real` bound to the type that computes `$dtype`: `f64` for `f64`, otherwise `f32`.
macro_rules! with_real {
    ($dtype:expr, $real:ident => $body:expr) => {
        $crate::ops::cpu::dispatch::with_type!($dtype, $real => $body, {
            burn::tensor::DType::F64 => f64,
            burn::tensor::DType::F32 | burn::tensor::DType::BF16 | burn::tensor::DType::F16 => f32,
        })
    };
}
pub(super) use with_real;

/// Runs `$body` with `$products` bound to the products of `$scalar`: `$bf16` if set, else [`with_real`]'s.
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
