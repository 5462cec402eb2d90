use serde::{Deserialize, Serialize};
use std::fmt;

/// Type of the elements of a [`Buffer`](crate::Buffer).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum DType {
    /// 64-bit IEEE 754 float.
    F64,
    /// 32-bit IEEE 754 float.
    F32,
    /// 16-bit IEEE 754 float. Sums run in `f32`.
    F16,
    /// bfloat16: the upper half of an `f32`. Sums run in `f32`.
    BF16,
    /// Raw byte. Can be moved but not summed.
    U8,
}

impl DType {
    /// Size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::F64 => 8,
            DType::F32 => 4,
            DType::F16 | DType::BF16 => 2,
            DType::U8 => 1,
        }
    }

    /// Returns whether reduce-scatter and all-reduce accept this type.
    pub const fn has_sum(self) -> bool {
        !matches!(self, DType::U8)
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(match self {
            DType::F64 => "f64",
            DType::F32 => "f32",
            DType::F16 => "f16",
            DType::BF16 => "bf16",
            DType::U8 => "u8",
        })
    }
}

mod sealed {
    pub trait Sealed {}
}

/// Rust type of an element: `f64`, `f32`, [`half::f16`], [`half::bf16`] or `u8`. Sealed.
pub trait Element: bytemuck::Pod + Send + Sync + 'static + sealed::Sealed {
    /// The matching [`DType`].
    const DTYPE: DType;
}

macro_rules! element {
    ($($element:ty => $dtype:ident),* $(,)?) => {$(
        impl sealed::Sealed for $element {}
        impl Element for $element {
            const DTYPE: DType = DType::$dtype;
        }
    )*};
}

element! { f64 => F64, f32 => F32, half::f16 => F16, half::bf16 => BF16, u8 => U8 }
