use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{linear, linear_reference, linears};

use crate::ops_support::*;

type Linear = fn(Tensor<3>, Tensor<2>, Option<Tensor<1>>) -> Tensor<3>;

fn operation(f: Linear, [a, b, d_in, d_out]: [usize; 4]) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let (x, w) = (t[0].clone().reshape([a, b, d_in]), t[1].clone().reshape([d_in, d_out]));
        f(x, w, t.get(2).cloned()).reshape([a * b * d_out])
    }
}

fn sizes([a, b, d_in, d_out]: [usize; 4]) -> [usize; 3] {
    [a * b * d_in, d_in * d_out, d_out]
}

#[test]
fn linear_matches_reference() {
    for shape in [[1, 1, 20, 17], [2, 33, 20, 64], [1, 257, 64, 20], [3, 5, 1, 1], [1, 301, 530, 417]] {
        let (op, reference) = (operation(linear, shape), operation(linear_reference, shape));
        assert_matches(&op, &reference, &sizes(shape), 2e-6);
        assert_matches(&op, &reference, &sizes(shape)[..2], 2e-6);
    }
}

#[test]
fn linear_is_sound() {
    let shape = [2, 3, 5, 7];
    assert_sound(operation(linear, shape), &sizes(shape));
    assert_sound(operation(linear, shape), &sizes(shape)[..2]);
}

#[test]
fn linear_bits_do_not_depend_on_threads() {
    // Cut into chunks by rows, by columns and by both, in one and in several blocks of the sum.
    for shape in [[2, 300, 130, 210], [1, 301, 1_100, 417], [1, 3, 700, 1_030]] {
        assert_same_bits(operation(linear, shape), &sizes(shape));
    }
}

/// Three maps of one input, of which the second has a bias, and the input itself, as in a residual stream.
/// Only the results that are `used` are part of the output.
pub fn three(
    f: fn(Tensor<2>, [Map; 3]) -> [Tensor<2>; 3],
    [rows, d_in, d_out]: [usize; 3],
    used: [bool; 3],
) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let x = t[0].clone().reshape([rows, d_in]);
        let weight = |i: usize, d_out| t[i].clone().reshape([d_in, d_out]);
        let bias = Some(t[4].clone());
        let maps = [(weight(1, d_out), None), (weight(2, d_out), bias), (weight(3, 2 * d_out), None)];
        let results = f(x.clone(), maps).into_iter().zip(used).filter(|(_, used)| *used);
        let flat = results.map(|(y, _)| y.flatten(0, 1)).chain([x.flatten(0, 1)]);
        Tensor::cat(flat.collect(), 0)
    }
}

pub type Map = (Tensor<2>, Option<Tensor<1>>);

pub fn sizes_of_three([rows, d_in, d_out]: [usize; 3]) -> [usize; 5] {
    [rows * d_in, d_in * d_out, d_in * d_out, 2 * d_in * d_out, d_out]
}

pub fn one_by_one(x: Tensor<2>, maps: [Map; 3]) -> [Tensor<2>; 3] {
    maps.map(|(weight, bias)| linear_reference(x.clone(), weight, bias))
}

#[test]
fn linears_are_linear_maps_of_one_input() {
    // The last shapes are large enough for the input to be transposed.
    for shape in [[1, 1, 1], [9, 20, 17], [300, 120, 140], [257, 130, 128]] {
        let all = [true; 3];
        let (op, reference) = (three(linears, shape, all), three(one_by_one, shape, all));
        assert_matches(&op, &reference, &sizes_of_three(shape), 2e-6);
    }
    assert_sound(three(linears, [6, 5, 4], [true; 3]), &sizes_of_three([6, 5, 4]));
    assert_same_bits(three(linears, [300, 120, 140], [true; 3]), &sizes_of_three([300, 120, 140]));
}

#[test]
fn linears_need_not_all_be_used() {
    let shape = [300, 120, 140];
    for used in [[true, false, false], [false, true, true], [true, false, true]] {
        let (op, reference) = (three(linears, shape, used), three(one_by_one, shape, used));
        let inputs = inputs(&sizes_of_three(shape));
        let actual = run(&op, &inputs, FloatDType::F32);
        let expected = run(&reference, &inputs, FloatDType::F64);
        for (i, (a, e)) in actual.gradients.iter().zip(&expected.gradients).enumerate() {
            assert_eq!(a.is_some(), e.is_some(), "{used:?}: gradient {i}");
            if let (Some(a), Some(e)) = (a, e) {
                assert_close(a, e, 2e-6, &format!("{used:?}: gradient {i}"));
            }
        }
    }
}

#[test]
fn linears_leave_leaf_gradients_to_the_caller() {
    // The input is the tracked leaf itself: burn keeps its gradient, which must not be added twice.
    let [d_in, d_out] = [20, 17];
    let op = |f: fn(Tensor<1>, [Map; 2]) -> [Tensor<1>; 2]| {
        move |t: &[Tensor<1>]| {
            let weight = |i: usize| t[i].clone().reshape([d_in, d_out]);
            let results = f(t[0].clone(), [(weight(1), None), (weight(2), None)]);
            Tensor::cat(results.to_vec(), 0)
        }
    };
    let reference: fn(Tensor<1>, [Map; 2]) -> [Tensor<1>; 2] =
        |x, maps| maps.map(|(weight, _)| linear_reference(x.clone(), weight, None));
    assert_matches(op(linears), op(reference), &[d_in, d_in * d_out, d_in * d_out], 2e-6);
}

#[test]
fn linear_takes_views() {
    let [rows, d_in, d_out] = [9, 20, 17];
    // A transposed weight, as in a head tied to an embedding, and a slice of a larger input.
    let view = |f: fn(Tensor<2>, Tensor<2>, Option<Tensor<1>>) -> Tensor<2>| {
        move |t: &[Tensor<1>]| {
            let x = t[0].clone().reshape([rows + 2, d_in + 3]).slice([1..rows + 1, 2..d_in + 2]);
            let w = t[1].clone().reshape([d_out, d_in]).transpose();
            f(x, w, None).reshape([rows * d_out])
        }
    };
    let sizes = [(rows + 2) * (d_in + 3), d_in * d_out];
    assert_matches(view(linear), view(linear_reference), &sizes, 2e-6);
}

#[test]
#[should_panic(expected = "rows of 4 values and a weight for 5")]
fn linear_rejects_a_weight_of_another_width() {
    let device = Device::flex();
    linear(Tensor::<2>::ones([2, 4], &device), Tensor::ones([5, 3], &device), None);
}
