//! The operations of a router of experts, from its logits to the experts' weights.

use burn::tensor::{Device, FloatDType, Int, Tensor, TensorData, activation::softmax};
use kiln_model::ops::{
    RouterSums, fork, router_balance, router_load, router_means, router_softmax, router_weights,
};

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

/// Returns the weights of chosen experts and the mean probabilities, computed by the operations or in plain burn.
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

/// Returns the balance loss of three layers of four experts, given their mean probabilities, one tensor per layer:
/// the sum of what each layer adds or, if `is_plain`, the product at once.
fn balanced(is_plain: bool) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let loads = [[3.0, 1.0, 0.0, 2.0], [0.0, 0.0, 6.0, 0.0], [1.0, 2.0, 2.0, 1.0]];
        let load = |layer: usize| {
            let load: Tensor<1> = Tensor::from_data(loads[layer], &t[0].device().inner());
            load.cast(t[0].dtype())
        };
        if is_plain {
            let sum =
                |tensors: [Tensor<1>; 3]| tensors.into_iter().reduce(|a, b| a + b).expect("three layers");
            let means = sum([t[0].clone(), t[1].clone(), t[2].clone()]);
            let loads = sum([0, 1, 2].map(load));
            let loads = if means.device().is_autodiff() { Tensor::from_inner(loads) } else { loads };
            return (means * loads).sum();
        }
        let sums = RouterSums::default();
        let added = (0..3).map(|layer| router_balance(t[layer].clone(), load(layer), &sums, layer));
        added.reduce(|a, b| a + b).expect("three layers")
    }
}

#[test]
fn the_balance_of_all_layers_is_one_product() {
    let sizes = [4; 3];
    assert_matches(balanced(false), balanced(true), &sizes, 5e-6);
    assert_finite_differences(balanced(false), &sizes);
    assert_untracked(balanced(false), &sizes);
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

/// Probabilities are in f32, as in transformers.
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

/// If one reader of a fork ignores the tensor, the gradient is that of the other reader.
#[test]
fn a_reader_of_a_fork_may_do_nothing() {
    let op = |t: &[Tensor<1>]| {
        let [a, _] = fork(t[0].clone() * 2.0);
        a.sin()
    };
    assert_sound(op, &[23]);
}
