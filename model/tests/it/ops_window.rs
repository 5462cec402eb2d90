//! Attention in a sliding window, compared with the whole matrix of scores in which the scores outside of the window
//! are masked.

use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{causal_attention, causal_attention_reference};

use crate::ops_attention::{Sizes, in_window, operation, sizes};
use crate::ops_support::*;

/// Windows around the sizes of tiles: rows of 48, columns of 192 that begin at multiples of 32.
const WINDOWS: [usize; 16] = [1, 2, 3, 7, 31, 32, 33, 47, 48, 49, 63, 65, 191, 192, 193, 255];

#[test]
fn attention_in_a_window_matches_reference() {
    for shape in
        [[1, 1, 1, 1, 2], [2, 33, 6, 2, 10], [2, 129, 4, 1, 64], [1, 257, 3, 3, 10], [1, 520, 2, 1, 32]]
    {
        for window in WINDOWS.map(Some) {
            let op = in_window(causal_attention, shape, window);
            let reference = in_window(causal_attention_reference, shape, window);
            // A window of one row has one score, without a slope: its gradients are 0, and have no scale.
            if window == Some(1) || shape[1] == 1 {
                assert_copies_values(op, shape);
            } else {
                assert_matches(op, reference, &sizes(shape), 5e-6);
            }
        }
    }
}

/// Asserts that each row's result is the row's own value, regardless of the scores, because nothing else is in the
/// window.
#[track_caller]
fn assert_copies_values(op: impl Operation, shape: Sizes) {
    let [batch, seq, heads, kv_heads, dim] = shape;
    let inputs = inputs(&sizes(shape));
    let actual = run(&op, &inputs, FloatDType::F32);
    let copies = |t: &[Tensor<1>]| {
        let v: Tensor<5> = t[2].clone().reshape([batch * seq, kv_heads, 1, 1, dim]);
        let v = v.expand([batch * seq, kv_heads, heads / kv_heads, 1, dim]);
        v.reshape([batch * seq * heads * dim])
    };
    let expected =
        run_tracked(&copies, &inputs, FloatDType::F64, &Device::flex().autodiff(), &[false, false, true]);
    assert_close(&actual.output, &expected.output, 1e-6, "output");
    let gradient = |run: &Run, i: usize| run.gradients[i].clone().expect("a gradient");
    assert_close(&gradient(&actual, 2), &gradient(&expected, 2), 1e-6, "gradient of values");
    for i in [0, 1] {
        assert!(gradient(&actual, i).iter().all(|slope| slope.abs() < 1e-5), "gradient {i}");
    }
}

#[test]
fn attention_in_a_window_is_sound() {
    let shape = [2, 6, 4, 2, 2];
    for window in [2, 3, 5].map(Some) {
        assert_sound(in_window(causal_attention, shape, window), &sizes(shape));
    }
}

/// The shortest window that masks nothing is as long as the sequence.
#[test]
fn attention_in_a_full_window_keeps_bits() {
    for shape @ [_, seq, ..] in [[1, 1, 1, 1, 2], [2, 129, 4, 1, 64], [1, 257, 3, 3, 10]] {
        for dtype in [FloatDType::F32, FloatDType::F64, FloatDType::BF16] {
            let inputs = inputs(&sizes(shape));
            let full = run(&operation(causal_attention, shape), &inputs, dtype);
            for window in [seq, seq + 1, 100 * seq] {
                let windowed = run(&in_window(causal_attention, shape, Some(window)), &inputs, dtype);
                assert!(windowed.output == full.output, "{shape:?} in {dtype:?}, window {window}");
                assert!(windowed.gradients == full.gradients, "{shape:?} in {dtype:?}, window {window}");
            }
        }
    }
}

#[test]
fn windowed_attention_bits_ignore_thread_count() {
    let shape = [2, 300, 6, 2, 64];
    assert_same_bits(in_window(causal_attention, shape, Some(70)), &sizes(shape));
}

/// Rows that have left the window have no effect, however large they are.
#[test]
fn what_a_window_has_left_behind_does_not_count() {
    let (seq, first, window) = (300, 200, 40);
    let device = Device::flex();
    let x = |seed: u64, hidden: f64| {
        let mut values = normal(seq * 2 * 8, seed);
        values[..(first - window + 1) * 2 * 8].fill(hidden);
        flat(&values, FloatDType::F32, &device).reshape([1, seq, 2, 8])
    };
    let rows = |hidden: f64| {
        let out = causal_attention(x(1, 0.0), x(2, hidden), x(3, hidden), Some(window));
        values(out.narrow(1, first, seq - first))
    };
    let expected = rows(0.0);
    assert!(expected.iter().all(|value| value.is_finite()));
    assert!(rows(1e30) == expected);
}

#[test]
#[should_panic(expected = "a window of 0 rows")]
fn attention_rejects_a_window_without_a_row() {
    let x = Tensor::<4>::ones([1, 4, 1, 8], &Device::flex());
    causal_attention(x.clone(), x.clone(), x, Some(0));
}
