use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{rms_norm, rms_norm_reference};

use crate::ops_support::*;

type RmsNorm = fn(Tensor<4>, Tensor<1>, f64) -> Tensor<4>;

fn operation(f: RmsNorm, shape: [usize; 4]) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let y = f(t[0].clone().reshape(shape), t[1].clone(), 1e-5);
        y.reshape([shape.iter().product::<usize>()])
    }
}

fn sizes(shape: [usize; 4]) -> [usize; 2] {
    [shape.iter().product(), shape[3]]
}

#[test]
fn rms_norm_matches_reference() {
    for shape in [[1, 1, 1, 20], [2, 33, 6, 10], [1, 257, 1, 20], [2, 3, 2, 64], [1, 1, 70, 700]] {
        let (op, reference) = (operation(rms_norm, shape), operation(rms_norm_reference, shape));
        assert_matches(op, reference, &sizes(shape), 2e-6);
    }
}

#[test]
fn rms_norm_is_sound() {
    let shape = [2, 2, 1, 5];
    assert_sound(operation(rms_norm, shape), &sizes(shape));
}

#[test]
fn rms_norm_bits_do_not_depend_on_threads() {
    let shape = [4, 200, 1, 300];
    assert_same_bits(operation(rms_norm, shape), &sizes(shape));
}

#[test]
fn rms_norm_of_zeros_is_zero() {
    let zeros = vec![vec![0.0; 40], vec![1.0; 20]];
    let run = run(&operation(rms_norm, [1, 2, 1, 20]), &zeros, FloatDType::F32);
    assert!(run.output.iter().all(|&y| y == 0.0));
    assert!(run.gradients.iter().flatten().flatten().all(|g| g.is_finite()));
}

#[test]
#[should_panic(expected = "rows of 4 values and a weight for 5")]
fn rms_norm_rejects_a_weight_of_another_width() {
    let device = Device::flex();
    rms_norm(Tensor::<2>::ones([2, 4], &device), Tensor::ones([5], &device), 1e-5);
}
