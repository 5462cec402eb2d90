//! Experts of a mixture, and their selection.

use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use kiln_model::ops::{ExpertProjections, Routing, experts, experts_reference, top_k, top_k_reference};

use crate::ops_support::*;

/// Number of tokens, experts per token, number of experts, width, width inside an expert.
#[derive(Clone, Copy)]
pub struct Sizes {
    pub tokens: usize,
    pub per_token: usize,
    pub experts: usize,
    pub d_model: usize,
    pub d_ff: usize,
}

impl Sizes {
    /// Returns the sizes of the flat inputs of [`over`].
    pub fn flat(self) -> [usize; 5] {
        let Sizes { tokens, per_token, experts, d_model, d_ff } = self;
        let projection = experts * d_model * d_ff;
        [tokens * d_model, tokens * per_token, projection, projection, projection]
    }

    /// Returns choices in which expert 1 has no token, and the last one most.
    fn choices(self) -> Vec<i64> {
        let Sizes { tokens, per_token, experts, .. } = self;
        let others: Vec<i64> = (0..experts as i64).rev().filter(|expert| *expert != 1).collect();
        let choice = |i: usize| {
            let (token, j) = (i / per_token, i % per_token);
            if j == 0 && token % 3 > 0 {
                return others[0];
            }
            // Different from the first choice.
            others[1 + (token / 3 + j) % (others.len() - 1)]
        };
        (0..tokens * per_token).map(choice).collect()
    }
}

/// An operation on experts.
pub type Experts = fn(Tensor<2>, Routing, ExpertProjections) -> Tensor<2>;

/// Converts an operation on experts to an operation on flat tensors.
pub fn over(run: Experts, sizes: Sizes) -> impl Operation + Sync {
    over_choices(run, sizes, sizes.choices())
}

/// Converts an operation on experts with the given choices, `[tokens, k]`, to an operation on flat tensors.
pub fn over_choices(run: Experts, sizes: Sizes, choices: Vec<i64>) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let Sizes { tokens, per_token, experts, d_model, d_ff } = sizes;
        let chosen = TensorData::new(choices.clone(), [tokens, per_token]);
        let routing = Routing {
            experts: Tensor::<2, Int>::from_data(chosen, &t[0].device()),
            weights: t[1].clone().reshape([tokens, per_token]),
        };
        let projections = ExpertProjections {
            gate: t[2].clone().reshape([experts, d_model, d_ff]),
            up: t[3].clone().reshape([experts, d_model, d_ff]),
            down: t[4].clone().reshape([experts, d_ff, d_model]),
        };
        let x = t[0].clone().reshape([tokens, d_model]);
        run(x, routing, projections).reshape([tokens * d_model])
    }
}

#[test]
fn experts_match_the_reference() {
    for (tokens, per_token, experts_count, d_model, d_ff) in
        [(1, 1, 3, 1, 1), (7, 2, 4, 5, 3), (300, 2, 4, 32, 48), (1000, 3, 8, 70, 33)]
    {
        let sizes = Sizes { tokens, per_token, experts: experts_count, d_model, d_ff };
        assert_matches(over(experts, sizes), over(experts_reference, sizes), &sizes.flat(), 1e-5);
    }
}

#[test]
fn experts_are_sound() {
    let sizes = Sizes { tokens: 9, per_token: 2, experts: 4, d_model: 5, d_ff: 3 };
    assert_sound(over(experts, sizes), &sizes.flat());
    // Products that are worth several threads, and groups of several blocks.
    let sizes = Sizes { tokens: 700, per_token: 2, experts: 4, d_model: 64, d_ff: 96 };
    assert_same_bits(over(experts, sizes), &sizes.flat());
    assert_same_bits_in(FloatDType::BF16, over(experts, sizes), &sizes.flat());
}

/// An expert without tokens has a gradient, which is zero.
#[test]
fn an_idle_expert_has_zero_gradient() {
    let sizes = Sizes { tokens: 9, per_token: 2, experts: 4, d_model: 5, d_ff: 3 };
    let gradients = run(&over(experts, sizes), &inputs(&sizes.flat()), FloatDType::F32).gradients;
    for gradient in &gradients[2..] {
        for (expert, values) in gradient.as_ref().unwrap().chunks(5 * 3).enumerate() {
            assert_eq!(values.iter().all(|value| *value == 0.0), expert == 1, "expert {expert}");
        }
    }
}

#[test]
#[should_panic(expected = "there is no expert 3 of 3")]
fn other_experts_are_refused() {
    let device = Device::flex();
    let routing = Routing {
        experts: Tensor::from_data([[0, 3]], &device),
        weights: Tensor::from_data([[1.0, 1.0]], &device),
    };
    let stacked = || Tensor::<3>::ones([3, 2, 2], &device);
    let projections = ExpertProjections { gate: stacked(), up: stacked(), down: stacked() };
    experts(Tensor::ones([1, 2], &device), routing, projections);
}

/// Returns the indices, row by row.
pub fn chosen(tensor: Tensor<2, Int>) -> Vec<i64> {
    tensor.into_data().convert_dtype(DType::I64).try_to_vec().expect("just converted")
}

#[test]
fn top_k_matches_the_reference() {
    for (rows, width, k) in [(1, 1, 1), (5, 4, 4), (100, 128, 8), (3000, 7, 3)] {
        let scores = flat(&normal(rows * width, 3), FloatDType::F32, &Device::flex()).reshape([rows, width]);
        let expected = chosen(top_k_reference(scores.clone(), k));
        assert_eq!(chosen(top_k(scores, k)), expected);
    }
}

/// Among equal values, the first is chosen; with NaN, indices are valid and distinct.
#[test]
fn top_k_of_equal_values_and_nan() {
    let device = Device::flex();
    let of = |scores: [f32; 4]| chosen(top_k(Tensor::<2>::from_data([scores], &device), 3));
    assert_eq!(of([1.0, 2.0, 2.0, 1.0]), [1, 2, 0]);
    for scores in [[f32::NAN; 4], [1.0, f32::NAN, 2.0, f32::NAN], [f32::NEG_INFINITY; 4]] {
        let mut found = of(scores);
        found.sort_unstable();
        found.dedup();
        assert!(found.len() == 3 && found.iter().all(|index| (0..4).contains(index)), "{found:?}");
    }
}
