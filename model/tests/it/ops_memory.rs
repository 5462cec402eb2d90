//! Operations must not hold on to the memory of a weight between forward and backward.

use std::sync::Arc;

use burn::backend::Flex;
use burn::tensor::{Device, FloatDType, Int, Tensor};
use kiln_model::ops::{HeadLayout, embedding, linear, linear_cross_entropy, rms_norm};

use crate::ops_support::*;

/// Returns how many handles to its weight's buffer `op` leaves behind while its result is alive. The weight is the
/// output of a memory-bound node, like a sharded gather.
fn handles_left<const D: usize>(len: usize, op: impl Fn(Tensor<1>) -> Tensor<D>) -> usize {
    let device = Device::flex().autodiff().gradient_checkpointing();
    let shard = flat(&normal(len, 1), FloatDType::F32, &device).require_grad();
    let weight = shard.clone().mul_scalar(2.0);
    let primitive = weight.clone().inner().try_into_primitive::<Flex>().expect("a tensor of flex");
    let buffer = primitive.data_arc();
    drop(primitive);
    let y = op(weight);
    let handles = Arc::strong_count(&buffer) - 1;
    let grads = y.sum().backward();
    assert!(shard.grad(&grads).is_some());
    handles
}

#[test]
fn weights_are_not_kept_for_backward() {
    let device = Device::flex().autodiff().gradient_checkpointing();
    // A fresh graph for every operation, because backward consumes it.
    let row = || flat(&normal(60, 2), FloatDType::F32, &device).require_grad().reshape([3, 20]);
    assert_eq!(handles_left(20, |w| rms_norm(row(), w, 1e-5)), 0, "rms_norm");
    // The bias is a weight of one dimension, so there is no reshape between it and the operation.
    let matrix = Tensor::<2>::ones([20, 7], &device);
    assert_eq!(handles_left(7, |b| linear(row(), matrix.clone(), Some(b))), 0, "bias");
    let ids = || Tensor::<2, Int>::zeros([1, 3], &Device::flex());
    let targets = || Tensor::<1, Int>::zeros([3], &Device::flex());
    assert_eq!(handles_left(20 * 7, |w| linear(row(), w.reshape([20, 7]), None)), 0, "linear");
    assert_eq!(handles_left(20 * 7, |w| embedding(w.reshape([7, 20]), ids())), 0, "embedding");
    let loss =
        |w: Tensor<1>| linear_cross_entropy(row(), w.reshape([7, 20]), HeadLayout::VocabRows, targets(), 1.0);
    assert_eq!(handles_left(20 * 7, loss), 0, "linear_cross_entropy");
}
