use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{geglu, geglu_reference, swiglu, swiglu_reference};

use crate::ops_support::*;

#[test]
fn swiglu_matches_reference() {
    let op = |t: &[Tensor<1>]| swiglu(t[0].clone(), t[1].clone());
    let reference = |t: &[Tensor<1>]| swiglu_reference(t[0].clone(), t[1].clone());
    for len in [1, 20, 257, 40_000] {
        assert_matches(op, reference, &[len, len], 2e-6);
    }
}

#[test]
fn swiglu_is_sound() {
    let op = |t: &[Tensor<1>]| swiglu(t[0].clone(), t[1].clone());
    assert_sound(op, &[23, 23]);
    assert_same_bits(op, &[100_000, 100_000]);
}

/// With `up = 1` the result is `g · σ(g)`: the vectorised exponential over its whole range.
#[test]
fn swiglu_is_accurate_for_every_gate() {
    let gates: Vec<f64> = (-87_000..87_000).map(|i| f64::from(i as f32 * 1e-3)).collect();
    let gate = flat(&gates, FloatDType::F32, &Device::flex());
    let y = values(swiglu(gate.clone(), gate.ones_like()));
    for (g, y) in gates.iter().zip(y) {
        let exact = g / (1.0 + (-g).exp());
        assert!((y - exact).abs() <= 4e-7 * exact.abs(), "silu({g}) = {y} instead of {exact}");
    }
}

#[test]
fn swiglu_of_extreme_gates() {
    let gates = [f64::NEG_INFINITY, -1e30, -200.0, -100.0, -0.0, 0.0, 100.0, 1e30, f64::INFINITY, f64::NAN];
    let gate = flat(&gates, FloatDType::F32, &Device::flex());
    let y = values(swiglu(gate.clone(), gate.ones_like()));
    assert!(y[0].is_nan(), "−∞ · 0");
    assert_eq!(y[1..3], [0.0, 0.0]);
    assert!(y[3].abs() < 1e-30);
    assert_eq!(y[4..6], [0.0, 0.0]);
    assert_eq!(y[6], 100.0);
    assert_eq!(y[7], f64::from(1e30f32));
    assert_eq!(y[8], f64::INFINITY);
    assert!(y[9].is_nan());
}

#[test]
#[should_panic(expected = "gate and up differ in shape")]
fn swiglu_rejects_different_shapes() {
    swiglu(Tensor::<1>::ones([4], &Device::flex()), Tensor::ones([5], &Device::flex()));
}

#[test]
fn geglu_matches_reference() {
    let op = |t: &[Tensor<1>]| geglu(t[0].clone(), t[1].clone());
    let reference = |t: &[Tensor<1>]| geglu_reference(t[0].clone(), t[1].clone());
    for len in [1, 20, 257, 40_000] {
        assert_matches(op, reference, &[len, len], 2e-6);
    }
}

#[test]
fn geglu_is_sound() {
    let op = |t: &[Tensor<1>]| geglu(t[0].clone(), t[1].clone());
    assert_sound(op, &[23, 23]);
    assert_same_bits(op, &[100_000, 100_000]);
}

/// With `up = 1` the result is `g · Φ(g)`: the vectorised error function over its whole range. For a gate far
/// below zero, `Φ(g)` is a small difference of larger numbers, as in any such implementation, so the error is
/// relative to the gate.
#[test]
fn geglu_is_accurate_for_every_gate() {
    let gates: Vec<f64> = (-7_000..7_000).map(|i| f64::from(i as f32 * 1e-3)).collect();
    let gate = |dtype| flat(&gates, dtype, &Device::flex());
    let exact = values(burn::tensor::activation::gelu(gate(FloatDType::F64)));
    let y = values(geglu(gate(FloatDType::F32), gate(FloatDType::F32).ones_like()));
    for ((g, y), exact) in gates.iter().zip(y).zip(exact) {
        assert!((y - exact).abs() <= 4e-7 * g.abs(), "gelu({g}) = {y} instead of {exact}");
    }
}

#[test]
fn geglu_of_extreme_gates() {
    let gates = [f64::NEG_INFINITY, -1e30, -7.0, -0.0, 0.0, 7.0, 1e30, f64::INFINITY, f64::NAN];
    let gate = flat(&gates, FloatDType::F32, &Device::flex());
    let y = values(geglu(gate.clone(), gate.ones_like()));
    assert!(y[0].is_nan(), "−∞ · 0");
    assert_eq!(y[1..5], [0.0; 4]);
    assert_eq!(y[5], 7.0);
    assert_eq!(y[6], f64::from(1e30f32));
    assert_eq!(y[7], f64::INFINITY);
    assert!(y[8].is_nan());
}
