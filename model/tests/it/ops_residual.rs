use burn::tensor::{FloatDType, Tensor};
use kiln_model::ops::{Residual, rms_norm_reference};

use crate::ops_support::*;

/// Computes `x + rms_norm(x) · z`, for a stream `[rows, width]` that is computed from the input.
pub fn around(t: &[Tensor<1>], [rows, width]: [usize; 2]) -> Tensor<1> {
    let (x, z) = (t[0].clone().reshape([rows, width]), t[2].clone().reshape([rows, width]));
    let stream = Residual::new(x);
    let normed = stream.rms_norm(t[1].clone(), 1e-5);
    stream.add_result(normed * z).flatten(0, 1)
}

pub fn around_reference(t: &[Tensor<1>], [rows, width]: [usize; 2]) -> Tensor<1> {
    let (x, z) = (t[0].clone().reshape([rows, width]), t[2].clone().reshape([rows, width]));
    (x.clone() + rms_norm_reference(x, t[1].clone(), 1e-5) * z).flatten(0, 1)
}

/// Adds `y` as one layer's result, followed by `rms_norm(x + y) · z` as the next layer, which reads the stream after
/// `y`.
pub fn two_layers(t: &[Tensor<1>], [rows, width]: [usize; 2]) -> Tensor<1> {
    let [x, y, z] = [0, 3, 2].map(|i| t[i].clone().reshape([rows, width]));
    let (stream, normed) = Residual::new(x).add_result_and_norm(y * 1.0, t[1].clone(), 1e-5);
    stream.add_result(normed * z).flatten(0, 1)
}

/// Computes [`two_layers`] with separate operations for the sum and the norm.
pub fn two_layers_apart(t: &[Tensor<1>], [rows, width]: [usize; 2]) -> Tensor<1> {
    let [x, y, z] = [0, 3, 2].map(|i| t[i].clone().reshape([rows, width]));
    let stream = Residual::new(Residual::new(x).add_result(y * 1.0));
    let normed = stream.rms_norm(t[1].clone(), 1e-5);
    stream.add_result(normed * z).flatten(0, 1)
}

pub fn two_layers_reference(t: &[Tensor<1>], [rows, width]: [usize; 2]) -> Tensor<1> {
    let [x, y, z] = [0, 3, 2].map(|i| t[i].clone().reshape([rows, width]));
    let x = x + y;
    (x.clone() + rms_norm_reference(x, t[1].clone(), 1e-5) * z).flatten(0, 1)
}

pub fn sizes_of_two_layers([rows, width]: [usize; 2]) -> [usize; 4] {
    [rows * width, width, rows * width, rows * width]
}

/// Asserts that two runs have the same bits.
pub fn assert_equal(a: &Run, b: &Run, what: &str) {
    assert!(a.output == b.output, "{what}: outputs");
    assert!(a.gradients == b.gradients, "{what}: gradients");
}

pub fn sizes([rows, width]: [usize; 2]) -> [usize; 3] {
    [rows * width, width, rows * width]
}

#[test]
fn residual_matches_reference() {
    for shape in [[1, 3], [33, 10], [257, 64], [3, 700], [40, 1_031]] {
        let op = |t: &[Tensor<1>]| around(t, shape);
        assert_matches(op, |t: &[Tensor<1>]| around_reference(t, shape), &sizes(shape), 2e-6);
    }
}

#[test]
fn residual_is_sound() {
    assert_sound(|t: &[Tensor<1>]| around(t, [6, 5]), &sizes([6, 5]));
    assert_same_bits(|t: &[Tensor<1>]| around(t, [300, 130]), &sizes([300, 130]));
}

#[test]
fn residual_between_two_layers() {
    for shape in [[1, 3], [33, 10], [257, 64], [40, 1_031]] {
        let (op, sizes) = (|t: &[Tensor<1>]| two_layers(t, shape), sizes_of_two_layers(shape));
        assert_matches(op, |t: &[Tensor<1>]| two_layers_reference(t, shape), &sizes, 2e-6);
        for dtype in [FloatDType::F32, FloatDType::BF16] {
            let apart = run(&|t: &[Tensor<1>]| two_layers_apart(t, shape), &inputs(&sizes), dtype);
            assert_equal(&run(&op, &inputs(&sizes), dtype), &apart, "one operation and two");
        }
    }
    assert_sound(|t: &[Tensor<1>]| two_layers(t, [6, 5]), &sizes_of_two_layers([6, 5]));
}

#[test]
fn residual_of_which_one_part_is_used() {
    let shape @ [rows, width] = [33, 10];
    let part = |t: &[Tensor<1>], sum: bool| {
        let (x, z) = (t[0].clone().reshape([rows, width]), t[2].clone().reshape([rows, width]));
        let stream = Residual::new(x);
        let normed = stream.rms_norm(t[1].clone(), 1e-5);
        // Tensors that are not part of the output have no backward.
        let added = stream.add_result(z.clone());
        let normed = normed * z;
        if sum { (added * 2.0).flatten(0, 1) } else { normed.flatten(0, 1) }
    };
    let reference = |t: &[Tensor<1>]| {
        let (x, z) = (t[0].clone().reshape([rows, width]), t[2].clone().reshape([rows, width]));
        (rms_norm_reference(x, t[1].clone(), 1e-5) * z).flatten::<1>(0, 1)
    };
    assert_matches(|t: &[Tensor<1>]| part(t, false), reference, &sizes(shape), 2e-6);
    let only_sum = run(&|t: &[Tensor<1>]| part(t, true), &inputs(&sizes(shape)), FloatDType::F32);
    let expected: Vec<f64> = normal(rows * width, 99).iter().map(|dy| 2.0 * dy).collect();
    for i in [0, 2] {
        let gradient = only_sum.gradients[i].as_ref().expect("a gradient");
        assert_close(gradient, &expected, 2e-6, &format!("gradient {i}"));
    }
    assert!(only_sum.gradients[1].is_none());
}

#[test]
fn residual_leaves_leaf_gradients_to_the_caller() {
    let op = |t: &[Tensor<1>]| {
        let stream = Residual::new(t[0].clone());
        let normed = stream.rms_norm(t[1].clone(), 1e-5);
        stream.add_result(normed * t[2].clone())
    };
    let reference =
        |t: &[Tensor<1>]| t[0].clone() + rms_norm_reference(t[0].clone(), t[1].clone(), 1e-5) * t[2].clone();
    assert_matches(op, reference, &[20, 20, 20], 2e-6);
}

#[test]
#[should_panic(expected = "residual: shapes")]
fn residual_rejects_a_result_of_another_shape() {
    let device = burn::tensor::Device::flex();
    Residual::new(Tensor::<2>::ones([2, 4], &device)).add_result(Tensor::ones([1, 4], &device));
}
