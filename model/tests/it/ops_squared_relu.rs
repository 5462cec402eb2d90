use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{squared_relu, squared_relu_reference};

use crate::ops_support::*;

fn op(t: &[Tensor<1>]) -> Tensor<1> {
    squared_relu(t[0].clone())
}

#[test]
fn squared_relu_matches_reference() {
    for len in [1, 20, 257, 40_000] {
        assert_matches(op, |t: &[Tensor<1>]| squared_relu_reference(t[0].clone()), &[len], 2e-6);
    }
}

#[test]
fn squared_relu_is_sound() {
    assert_sound(op, &[23]);
    assert_same_bits(op, &[100_000]);
}

#[test]
fn squared_relu_of_extreme_values() {
    let x = [f64::NEG_INFINITY, -1.0, -0.0, 0.0, 3.0, 1e30, f64::NAN];
    let y = values(squared_relu(flat(&x, FloatDType::F32, &Device::flex())));
    assert_eq!(y[..6], [0.0, 0.0, 0.0, 0.0, 9.0, f64::INFINITY]);
    assert!(y[6].is_nan());
}
