use burn::tensor::{DType, Device, FloatDType, Int, Tensor, TensorData};
use kiln_model::ops::{
    HeadLayout, LogitOptions, linear_cross_entropy, linear_cross_entropy_reference,
    linear_cross_entropy_with, linear_cross_entropy_with_reference,
};

use crate::ops_support::*;

pub type Loss = fn(Tensor<2>, Tensor<2>, HeadLayout, Tensor<1, Int>, f64) -> Tensor<1>;

const LAYOUTS: [HeadLayout; 2] = [HeadLayout::VocabRows, HeadLayout::VocabColumns];

fn targets(values: Vec<i64>) -> Tensor<1, Int> {
    let len = values.len();
    Tensor::from_data(TensorData::new(values, [len]), &Device::flex())
}

/// Returns the loss as an operation. Every fifth target is ignored, unless there is only one target.
pub fn operation(f: Loss, layout: HeadLayout, [rows, d_model, vocab]: [usize; 3]) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let weight = match layout {
            HeadLayout::VocabRows => t[1].clone().reshape([vocab, d_model]),
            HeadLayout::VocabColumns => t[1].clone().reshape([d_model, vocab]),
        };
        let target = |i: usize| {
            if i % 5 == 3 { -100 } else { (i * 7 % vocab) as i64 }
        };
        let targets = targets((0..rows).map(target).collect());
        f(t[0].clone().reshape([rows, d_model]), weight, layout, targets, 0.37)
    }
}

#[test]
fn cross_entropy_matches_reference() {
    for layout in LAYOUTS {
        for shape @ [rows, d_model, vocab] in [[1, 20, 17], [33, 20, 17], [257, 20, 17], [600, 64, 301]] {
            let op = operation(linear_cross_entropy, layout, shape);
            let reference = operation(linear_cross_entropy_reference, layout, shape);
            assert_matches(op, reference, &[rows * d_model, d_model * vocab], 2e-6);
        }
    }
}

#[test]
fn cross_entropy_is_sound() {
    for layout in LAYOUTS {
        assert_sound(operation(linear_cross_entropy, layout, [6, 4, 7]), &[24, 28]);
        let (op, sizes) = (operation(linear_cross_entropy, layout, [300, 64, 500]), [300 * 64, 64 * 500]);
        assert_same_bits(op, &sizes);
    }
}

/// Wraps a loss with options as a function without options.
macro_rules! with_options {
    ($loss:ident, $options:expr) => {
        |hidden, weight, layout, targets, scale| {
            $loss(hidden, weight, layout, targets, None, scale, $options).total
        }
    };
    ($loss:ident, $options:expr, weighted) => {
        |hidden, weight, layout, targets, scale| {
            // 0.5, 1.5 or 2.5 for each target.
            let weights = targets.clone().remainder_scalar(3).float().add_scalar(0.5);
            $loss(hidden, weight, layout, targets, Some(weights), scale, $options).total
        }
    };
}

const NONE: LogitOptions = LogitOptions { softcap: None, z_loss: None };
const CAP: LogitOptions = LogitOptions { softcap: Some(1.5), z_loss: None };
const Z_LOSS: LogitOptions = LogitOptions { softcap: None, z_loss: Some(0.03) };
const BOTH: LogitOptions = LogitOptions { softcap: Some(1.5), z_loss: Some(0.03) };

/// Each combination of options, fused and in plain burn.
const OPTIONS: [[Loss; 2]; 5] = [
    [with_options!(linear_cross_entropy_with, CAP), with_options!(linear_cross_entropy_with_reference, CAP)],
    [
        with_options!(linear_cross_entropy_with, Z_LOSS),
        with_options!(linear_cross_entropy_with_reference, Z_LOSS),
    ],
    [
        with_options!(linear_cross_entropy_with, BOTH),
        with_options!(linear_cross_entropy_with_reference, BOTH),
    ],
    [
        with_options!(linear_cross_entropy_with, NONE, weighted),
        with_options!(linear_cross_entropy_with_reference, NONE, weighted),
    ],
    [
        with_options!(linear_cross_entropy_with, BOTH, weighted),
        with_options!(linear_cross_entropy_with_reference, BOTH, weighted),
    ],
];

/// Logits are several times larger than the cap.
#[test]
fn options_match_the_reference() {
    for [fused, reference] in OPTIONS {
        for layout in LAYOUTS {
            for shape @ [rows, d_model, vocab] in [[1, 20, 17], [257, 20, 17], [600, 64, 301]] {
                let sizes = [rows * d_model, d_model * vocab];
                assert_matches(
                    operation(fused, layout, shape),
                    operation(reference, layout, shape),
                    &sizes,
                    4e-6,
                );
            }
        }
    }
}

#[test]
fn options_are_sound() {
    for [fused, _] in OPTIONS {
        for layout in LAYOUTS {
            assert_sound(operation(fused, layout, [6, 4, 7]), &[24, 28]);
            let (op, sizes) = (operation(fused, layout, [300, 64, 500]), [300 * 64, 64 * 500]);
            assert_same_bits(op, &sizes);
        }
    }
}

/// Both losses have a closed form, because the sum for equal logits `l` is `n · exp(l)`.
#[test]
fn the_z_loss_is_told_apart() {
    let device = Device::flex();
    let (hidden, weight) = (Tensor::ones([2, 4], &device), Tensor::full([8, 4], 2.0, &device));
    let options = LogitOptions { softcap: Some(10.0), z_loss: Some(0.1) };
    let layout = HeadLayout::VocabRows;
    let loss = linear_cross_entropy_with(hidden, weight, layout, targets(vec![3, -1]), None, 0.5, options);
    let log_sum = 10.0 * 0.8f64.tanh() + 8f64.ln();
    let z_loss = 0.5 * 0.1 * log_sum * log_sum;
    let told = values(loss.z_loss.expect("a z-loss"))[0];
    assert!((told / z_loss - 1.0).abs() < 1e-6, "{told} and not {z_loss}");
    let total = values(loss.total)[0];
    assert!((total / (z_loss + 0.5 * 8f64.ln()) - 1.0).abs() < 1e-6, "{total}");
}

/// The loss is f32 for operands of any dtype, and backward may start from any factor.
#[test]
fn cross_entropy_dtype_and_factor() {
    let shape = [9, 4, 7];
    let op = operation(linear_cross_entropy, HeadLayout::VocabRows, shape);
    let inputs = inputs(&[9 * 4, 4 * 7]);
    for (dtype, loss) in
        [(FloatDType::F32, DType::F32), (FloatDType::F64, DType::F64), (FloatDType::BF16, DType::F32)]
    {
        assert_eq!(run(&op, &inputs, dtype).output_dtype, loss);
    }
    let gradients = |factor: f32| {
        let device = Device::flex().autodiff();
        let leaves: Vec<_> =
            inputs.iter().map(|v| flat(v, FloatDType::F32, &device).require_grad()).collect();
        let loss = op(&leaves);
        let grads = if factor == 1.0 { loss.backward() } else { (loss * factor).backward() };
        leaves.iter().flat_map(|leaf| values(leaf.grad(&grads).expect("a gradient"))).collect::<Vec<_>>()
    };
    let doubled: Vec<_> = gradients(1.0).iter().map(|g| g * 2.0).collect();
    assert_eq!(gradients(2.0), doubled);
}

#[test]
fn cross_entropy_of_ignored_rows_is_zero() {
    let device = Device::flex().autodiff();
    let hidden = flat(&normal(8, 1), FloatDType::F32, &device).require_grad();
    let weight = flat(&normal(12, 2), FloatDType::F32, &device).reshape([3, 4]);
    let hidden_2d = hidden.clone().reshape([2, 4]);
    let loss = linear_cross_entropy(hidden_2d, weight, HeadLayout::VocabRows, targets(vec![-1, -100]), 1.0);
    assert_eq!(values(loss.clone()), [0.0]);
    let grads = loss.backward();
    assert_eq!(values(hidden.grad(&grads).expect("a gradient")), [0.0; 8]);
}

#[test]
#[should_panic(expected = "target 17 is outside a vocabulary of 17")]
fn cross_entropy_rejects_invalid_targets() {
    let device = Device::flex();
    let (hidden, weight) = (Tensor::ones([2, 4], &device), Tensor::ones([17, 4], &device));
    linear_cross_entropy(hidden, weight, HeadLayout::VocabRows, targets(vec![0, 17]), 1.0);
}
