//! Deterministic inputs, and the values of tensors.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};

use crate::random::{GOLDEN, mix};

/// Returns standard normal values that depend only on `seed` and their index.
pub(super) fn normal(len: usize, seed: u64) -> Vec<f64> {
    let uniform = |i: u64| (mix((seed << 40 | i).wrapping_mul(GOLDEN)) >> 11) as f64 / (1u64 << 53) as f64;
    let value = |i: u64| {
        let (a, b) = (uniform(2 * i), uniform(2 * i + 1));
        (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    };
    (0..len as u64).map(value).collect()
}

/// Creates a tensor of `values` in `dtype`.
pub(super) fn flat(values: &[f64], dtype: FloatDType, device: &Device) -> Tensor<1> {
    let dtype = DType::from(dtype);
    let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// Returns the values of a tensor.
///
/// # Panics
///
/// If its device has failed.
pub(super) fn values(tensor: Tensor<1>) -> Vec<f64> {
    tensor.into_data().convert_dtype(DType::F64).iter().collect()
}
