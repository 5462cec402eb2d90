use burn::tensor::{Device, Tensor};
use kiln_model::ops::{linear, linear_reference};

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
    for shape in
        [[1, 1, 20, 17], [2, 33, 20, 64], [1, 257, 64, 20], [3, 5, 1, 1], [1, 301, 530, 417]]
    {
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
fn linear_has_the_same_bits_on_any_number_of_threads() {
    // Cut into pieces by rows, by columns and by both, in one and in several blocks of the sum.
    for shape in [[2, 300, 130, 210], [1, 301, 1_100, 417], [1, 3, 700, 1_030]] {
        assert_same_bits(operation(linear, shape), &sizes(shape));
    }
}

#[test]
fn linear_takes_views() {
    let [rows, d_in, d_out] = [9, 20, 17];
    // A transposed weight, as a head tied to an embedding has, and a slice of a larger input.
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
