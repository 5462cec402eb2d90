//! Basic devices and tensors.

use burn::tensor::{Device, Int, Tensor, TensorData};

/// Returns the device of plain computation on the CPU; `.autodiff()` makes it one for training.
pub fn plain() -> Device {
    Device::flex()
}

/// Returns token ids `[rows, seq_len]` as a tensor.
pub fn tokens(ids: Vec<i32>, rows: usize, seq_len: usize, device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new(ids, [rows, seq_len]), device)
}
