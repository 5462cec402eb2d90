//! Tensors with reproducible contents, for all benches.

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_model::Key;

/// Returns a tensor of reproducible normal values.
pub fn normal<const D: usize>(name: &str, shape: [usize; D], device: &Device) -> Tensor<D> {
    let values = Key::new(0).fork(name).normal_vec(shape.iter().product(), 1.0);
    Tensor::from_data(TensorData::new(values, shape), device)
}

/// Returns reproducible token ids `[rows, seq_len]` below `vocab_size`.
pub fn tokens(name: &str, rows: usize, seq_len: usize, vocab_size: usize, device: &Device) -> Tensor<2, Int> {
    let key = Key::new(0).fork(name);
    let ids = (0..(rows * seq_len) as u64).map(|i| (key.at(i) % vocab_size as u64) as i32);
    Tensor::from_data(TensorData::new(ids.collect::<Vec<_>>(), [rows, seq_len]), device)
}
