use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{dropout, dropout_reference};

use crate::ops_support::*;

#[test]
fn dropout_matches_reference() {
    for len in [1, 20, 257, 40_000] {
        let op = |t: &[Tensor<1>]| dropout(t[0].clone(), 0.3, 5, 11);
        let reference = |t: &[Tensor<1>]| dropout_reference(t[0].clone(), 0.3, 5, 11);
        assert_matches(op, reference, &[len], 1e-6);
    }
}

#[test]
fn dropout_is_sound() {
    assert_sound(|t: &[Tensor<1>]| dropout(t[0].clone(), 0.5, 5, 0), &[23]);
    assert_same_bits(|t: &[Tensor<1>]| dropout(t[0].clone(), 0.1, 5, 0), &[100_000]);
}

fn mask(len: usize, p: f64, key: u64, offset: u64) -> Vec<f64> {
    values(dropout(Tensor::<1>::ones([len], &Device::flex()), p, key, offset))
}

#[test]
fn dropout_keeps_the_expected_share() {
    for p in [0.01, 0.1, 0.5, 0.9] {
        let n = 200_000;
        let mask = mask(n, p, 42, 0);
        let kept = mask.iter().filter(|&&v| v != 0.0).count() as f64;
        let deviation = (n as f64 * p * (1.0 - p)).sqrt();
        assert!((kept - n as f64 * (1.0 - p)).abs() < 4.0 * deviation, "{kept} of {n} kept at p = {p}");
        assert!(mask.iter().all(|&v| v == 0.0 || (v - 1.0 / (1.0 - p)).abs() < 1e-6));
    }
}

#[test]
fn dropout_depends_only_on_key_and_counter() {
    let (n, golden) = (10_000, 0x9E37_79B9_7F4A_7C15u64);
    assert_eq!(mask(n, 0.5, 1, 0), mask(n, 0.5, 1, 0));
    // Different keys, even those one counter step apart, agree on half of the elements.
    for (key, offset) in [(2, 0), (1 + golden, 0), (1, 1), (0, 0)] {
        let same = mask(n, 0.5, 1, 0).iter().zip(mask(n, 0.5, key, offset)).filter(|(a, b)| *a == b).count();
        assert!((4_700..5_300).contains(&same), "{same} elements agree with key {key}");
    }
    // Nor is one mask a shifted copy of the other.
    assert_ne!(mask(n, 0.5, 1, 0)[1..], mask(n, 0.5, 1 + golden, 0)[..n - 1]);
}

/// Ranks and micro-batches that hold part of a batch drop the same elements as the whole batch would.
#[test]
fn dropout_of_a_split_batch() {
    let (batch, sample) = (6, 35);
    let whole = mask(batch * sample, 0.4, 9, 1000);
    for split in 0..=batch {
        let mut parts = mask(split * sample, 0.4, 9, 1000);
        parts.extend(mask((batch - split) * sample, 0.4, 9, 1000 + (split * sample) as u64));
        assert_eq!(parts, whole);
    }
}

#[test]
fn dropout_gradient_is_the_mask() {
    let x = flat(&normal(1000, 1), FloatDType::F32, &Device::flex().autodiff()).require_grad();
    let grads = dropout(x.clone(), 0.25, 3, 8).sum().backward();
    assert_eq!(values(x.grad(&grads).expect("a gradient")), mask(1000, 0.25, 3, 8));
}

#[test]
fn dropout_of_nothing_is_the_input() {
    let x = normal(100, 1);
    let tensor = flat(&x, FloatDType::F64, &Device::flex());
    assert_eq!(values(dropout(tensor, 0.0, 1, 0)), x);
}

#[test]
#[should_panic(expected = "not in [0, 1)")]
fn dropout_of_everything_is_rejected() {
    dropout(Tensor::<1>::ones([4], &Device::flex()), 1.0, 1, 0);
}
