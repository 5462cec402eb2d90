use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{rotary, rotary_reference};

use crate::ops_support::*;

type Rotary = fn(Tensor<4>, f64, usize) -> Tensor<4>;

fn operation(f: Rotary, shape: [usize; 4], offset: usize) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let y = f(t[0].clone().reshape(shape), 10_000.0, offset);
        y.reshape([shape.iter().product::<usize>()])
    }
}

#[test]
fn rotary_matches_reference() {
    for (shape, offset) in
        [([1, 1, 1, 2], 0), ([2, 33, 6, 10], 0), ([2, 5, 2, 64], 7), ([3, 40, 4, 64], 1000)]
    {
        let (op, reference) =
            (operation(rotary, shape, offset), operation(rotary_reference, shape, offset));
        assert_matches(op, reference, &[shape.iter().product()], 1e-6);
    }
}

#[test]
fn rotary_is_sound() {
    let shape = [2, 3, 2, 4];
    assert_sound(operation(rotary, shape, 2), &[48]);
    let shape = [2, 200, 4, 64];
    assert_same_bits(operation(rotary, shape, 0), &[shape.iter().product()]);
}

/// Rows computed with an offset are the rows of the whole sequence, also when the table has to
/// grow.
#[test]
fn rotary_continues_a_sequence() {
    let (seq, theta) = (100, 777.0);
    let x = flat(&normal(seq * 2 * 8, 1), FloatDType::F32, &Device::flex()).reshape([1, seq, 2, 8]);
    let mut rows = Vec::new();
    for t in 0..seq {
        rows.extend(values(rotary(x.clone().narrow(1, t, 1), theta, t)));
    }
    assert_eq!(rows, values(rotary(x, theta, 0)));
}

/// The product of a rotated query and a rotated key depends on the distance of their positions
/// only.
#[test]
fn rotary_is_relative() {
    let at = |seed, position| {
        let x = flat(&normal(64, seed), FloatDType::F64, &Device::flex()).reshape([1, 1, 1, 64]);
        rotary(x, 10_000.0, position)
    };
    let product = |p, q| values((at(1, p) * at(2, q)).sum())[0];
    assert!((product(5, 2) - product(105, 102)).abs() < 1e-10);
    assert!((product(5, 2) - product(5, 3)).abs() > 1e-3);
}

#[test]
#[should_panic(expected = "heads of 5 values")]
fn rotary_rejects_odd_heads() {
    rotary(Tensor::ones([1, 1, 1, 5], &Device::flex()), 10_000.0, 0);
}
