//! Products of bf16, with each kind of instructions that the processor has.

use std::process::Command;

use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{
    HeadLayout, bf16_instructions, causal_attention, causal_attention_reference, linear,
    linear_cross_entropy, linear_cross_entropy_reference, linear_reference, linears,
};

use crate::ops_attention::{in_window, operation as attention, sizes as sizes_of_attention};
use crate::ops_cross_entropy::operation as loss;
use crate::ops_linear::{one_by_one, sizes_of_three, three};
use crate::ops_support::*;

/// Error bound of results: half a unit in the last place of bf16, relative to the largest value, plus a margin for
/// sums in `f32`.
const ROUNDING: f64 = 1.0 / 256.0;
/// Error bound of gradients, which also includes the rounding of the incoming gradients.
const GRADIENTS: f64 = 1.0 / 128.0;

/// Rows, inner and outer width: sizes around the 32 by 32 by 32 that kernels multiply at a time.
const SHAPES: [[usize; 3]; 9] = [
    [1, 1, 1],
    [1, 64, 96],
    [31, 33, 17],
    [32, 32, 32],
    [33, 31, 100],
    [64, 65, 63],
    [70, 128, 200],
    [257, 96, 130],
    [100, 530, 417],
];

type Linear = fn(Tensor<2>, Tensor<2>, Option<Tensor<1>>) -> Tensor<2>;

/// Returns a linear map; its weight is stored transposed if `is_transposed`.
fn operation(f: Linear, [rows, d_in, d_out]: [usize; 3], is_transposed: bool) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let x = t[0].clone().reshape([rows, d_in]);
        let weight = match is_transposed {
            false => t[1].clone().reshape([d_in, d_out]),
            true => t[1].clone().reshape([d_out, d_in]).transpose(),
        };
        f(x, weight, t.get(2).cloned()).reshape([rows * d_out])
    }
}

/// Compares `op` in bf16 with `reference` in `f64` on the same rounded values.
#[track_caller]
fn assert_rounded(op: impl Operation, reference: impl Operation, sizes: &[usize], output: f64) {
    let flex = Device::flex();
    let rounded: Vec<_> = inputs(sizes).iter().map(|v| values(flat(v, FloatDType::BF16, &flex))).collect();
    let actual = run(&op, &rounded, FloatDType::BF16);
    let expected = run(&reference, &rounded, FloatDType::F64);
    assert_runs_close(&actual, &expected, [output, GRADIENTS]);
}

#[test]
fn products_are_rounded_once() {
    for shape @ [rows, d_in, d_out] in SHAPES {
        for is_transposed in [false, true] {
            let op = operation(linear, shape, is_transposed);
            let reference = operation(linear_reference, shape, is_transposed);
            let sizes = [rows * d_in, d_in * d_out, d_out];
            assert_rounded(&op, &reference, &sizes, ROUNDING);
            assert_rounded(&op, &reference, &sizes[..2], ROUNDING);
        }
    }
}

#[test]
fn products_of_one_input_share_it() {
    for shape in [[9, 20, 17], [300, 120, 140]] {
        let all = [true; 3];
        let (op, reference) = (three(linears, shape, all), three(one_by_one, shape, all));
        assert_rounded(op, reference, &sizes_of_three(shape), ROUNDING);
    }
}

#[test]
fn the_loss_is_that_of_f64() {
    for layout in [HeadLayout::VocabRows, HeadLayout::VocabColumns] {
        // One block of rows, and three.
        for shape @ [rows, d_model, vocab] in [[70, 33, 97], [530, 64, 256]] {
            let op = loss(linear_cross_entropy, layout, shape);
            let reference = loss(linear_cross_entropy_reference, layout, shape);
            assert_rounded(op, reference, &[rows * d_model, d_model * vocab], 1e-5);
        }
    }
}

/// Weights and gradients of scores are rounded as well, and so are the results that backward starts from.
#[test]
fn attention_is_that_of_f64() {
    for shape in [
        [1, 1, 1, 1, 2],
        [2, 33, 6, 2, 10],
        [1, 64, 2, 2, 64],
        [2, 129, 4, 1, 64],
        [1, 257, 3, 3, 10],
        [1, 300, 2, 1, 128],
        [1, 520, 2, 2, 32],
    ] {
        let op = attention(causal_attention, shape);
        let reference = attention(causal_attention_reference, shape);
        assert_rounded(op, reference, &sizes_of_attention(shape), GRADIENTS);
        for window in [2, 7, 33, 192, 600].map(Some) {
            let op = in_window(causal_attention, shape, window);
            let reference = in_window(causal_attention_reference, shape, window);
            assert_rounded(op, reference, &sizes_of_attention(shape), GRADIENTS);
        }
    }
}

#[test]
fn product_bits_do_not_depend_on_threads() {
    let shape @ [rows, d_in, d_out] = [300, 130, 210];
    let op = operation(linear, shape, false);
    assert_same_bits_in(FloatDType::BF16, op, &[rows * d_in, d_in * d_out, d_out]);
    let shape @ [rows, d_model, vocab] = [300, 64, 500];
    let op = loss(linear_cross_entropy, HeadLayout::VocabRows, shape);
    assert_same_bits_in(FloatDType::BF16, op, &[rows * d_model, d_model * vocab]);
    let shape = [2, 200, 6, 2, 64];
    let op = attention(causal_attention, shape);
    assert_same_bits_in(FloatDType::BF16, op, &sizes_of_attention(shape));
}

/// NaN stays NaN, and infinity does not become NaN.
#[test]
fn what_is_not_a_number_stays_so() {
    let device = Device::flex();
    let mut x = vec![1.0; 64 * 64];
    (x[5], x[64 + 7]) = (f64::NAN, f64::INFINITY);
    let x = flat(&x, FloatDType::BF16, &device).reshape([64, 64]);
    let weight = flat(&vec![1.0; 64 * 64], FloatDType::BF16, &device).reshape([64, 64]);
    let y = values(linear(x, weight, None));
    assert!(y[..64].iter().all(|y| y.is_nan()));
    assert!(y[64..128].iter().all(|&y| y == f64::INFINITY));
    assert!(y[128..].iter().all(|&y| y == 64.0));
}

/// Repeats the tests above in separate processes, in which `KILN_BF16` selects the instructions.
#[test]
fn all_instructions_compute_the_same() {
    for (choice, name) in [("amx", "AMX"), ("avx512", "AVX512-BF16"), ("none", "")] {
        let mut command = Command::new(std::env::current_exe().expect("the path of this test"));
        command.args(["ops_bf16::", "--skip", "all_instructions"]).env("KILN_BF16", choice);
        let done = command.env("KILN_TEST_BF16", name).output().expect("this test runs");
        let said = String::from_utf8_lossy(&done.stdout);
        assert!(done.status.success(), "KILN_BF16={choice}: {said}");
    }
}

/// The requested instructions are used, or none.
#[test]
fn instructions_are_those_that_were_asked_for() {
    if let Ok(name) = std::env::var("KILN_TEST_BF16") {
        assert!(bf16_instructions().is_none_or(|used| used == name));
    }
}
