//! The operations of a router of experts, from its logits to the experts' weights.

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData, activation::softmax};
use kiln_model::ops::{fork, router_load, router_means, router_softmax, router_weights};

use crate::ops_support::*;

/// Number of tokens, experts, and experts per token.
pub type Sizes = [usize; 3];

/// An odd number of tokens, and more than one block of them.
pub const SIZES: [Sizes; 4] = [[1, 1, 1], [7, 4, 2], [23, 5, 3], [5000, 16, 4]];

/// Returns the experts of each token, distinct for each token.
pub fn chosen([tokens, experts, k]: Sizes, device: &Device) -> Tensor<2, Int> {
    let choices = (0..tokens * k).map(|i| ((i / k * 3 + i % k) % experts) as i64).collect::<Vec<_>>();
    Tensor::from_data(TensorData::new(choices, [tokens, k]), device)
}

/// Returns probabilities, their choice and their means, computed by the operations or in plain burn.
pub fn routed(sizes: Sizes, is_plain: bool, normalized: bool) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let [tokens, experts, _] = sizes;
        let logits: Tensor<2> = t[0].clone().reshape([tokens, experts]);
        let chosen = chosen(sizes, &t[0].device().inner());
        let (weights, means) = if is_plain {
            let probabilities = softmax(logits, 1);
            let weights = probabilities.clone().gather(1, chosen);
            let sum = weights.clone().sum_dim(1);
            let weights = if normalized { weights / sum } else { weights };
            (weights, probabilities.mean_dim(0).reshape([experts]))
        } else {
            let [probabilities, for_means] = fork(router_softmax(logits));
            (router_weights(probabilities, chosen, normalized), router_means(for_means))
        };
        Tensor::cat(vec![weights.flatten(0, 1), means], 0)
    }
}

#[test]
fn routing_matches_plain_burn() {
    for sizes @ [tokens, experts, _] in SIZES {
        for normalized in [true, false] {
            let plain = routed(sizes, true, normalized);
            assert_matches(routed(sizes, false, normalized), plain, &[tokens * experts], 5e-6);
        }
    }
}

#[test]
fn routing_is_sound() {
    for normalized in [true, false] {
        let op = routed([7, 4, 2], false, normalized);
        assert_finite_differences(&op, &[28]);
        assert_untracked(&op, &[28]);
        assert_recomputed(&op, &[28]);
        assert_same_bits(routed(SIZES[3], false, normalized), &[5000 * 16]);
    }
}

/// The same dtype as in transformers.
#[test]
fn probabilities_of_half_precision_are_in_f32() {
    for dtype in [FloatDType::BF16, FloatDType::F16] {
        let logits = flat(&normal(20, 1), dtype, &Device::flex().autodiff()).require_grad();
        let probabilities = router_softmax(logits.clone().reshape([5, 4]));
        let wide = router_softmax(logits.clone().cast(FloatDType::F32).reshape([5, 4]));
        assert_eq!(probabilities.dtype(), wide.dtype());
        assert_eq!(values(probabilities.clone()), values(wide));
        let gradient = logits.grad(&probabilities.powi_scalar(2).sum().backward()).expect("a gradient");
        assert_eq!(gradient.dtype(), logits.dtype());
    }
}

#[test]
fn load_counts_the_choices_of_each_expert() {
    for device in [Device::flex(), Device::flex().autodiff()] {
        let chosen = TensorData::new(vec![0_i64, 2, 2, 3, 0, 2], [3, 2]);
        let chosen = Tensor::from_data(chosen, &device.clone().inner());
        let load = router_load(Tensor::ones([3, 4], &device), chosen);
        assert_eq!(values(load), [2.0, 0.0, 3.0, 1.0]);
    }
}

#[test]
fn both_readers_of_a_fork_count() {
    let op = |is_forked: bool| {
        move |t: &[Tensor<1>]| {
            let x = t[0].clone() * t[1].clone();
            let [a, b] = if is_forked { fork(x) } else { [x.clone(), x] };
            a.sin() + b.clone() * b
        }
    };
    assert_matches(op(true), op(false), &[257, 257], 2e-6);
    assert_sound(op(true), &[23, 23]);
    // A leaf, whose gradients burn adds up.
    let leaf = |t: &[Tensor<1>]| {
        let [a, b] = fork(t[0].clone());
        a.sin() + b.clone() * b
    };
    assert_sound(leaf, &[23]);
}

/// The gradient is that of the other reader.
#[test]
fn a_reader_of_a_fork_may_do_nothing() {
    let op = |t: &[Tensor<1>]| {
        let [a, _] = fork(t[0].clone() * 2.0);
        a.sin()
    };
    assert_sound(op, &[23]);
}
