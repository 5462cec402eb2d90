use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{causal_attention, causal_attention_reference};

use crate::ops_support::*;

type Attention = fn(Tensor<4>, Tensor<4>, Tensor<4>) -> Tensor<4>;

/// Batch, sequence, heads, key heads, width of a head.
type Sizes = [usize; 5];

fn operation(f: Attention, [batch, seq, heads, kv_heads, dim]: Sizes) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let q = t[0].clone().reshape([batch, seq, heads, dim]);
        let [k, v] = [1, 2].map(|i| t[i].clone().reshape([batch, seq, kv_heads, dim]));
        f(q, k, v).reshape([batch * seq * heads * dim])
    }
}

fn sizes([batch, seq, heads, kv_heads, dim]: Sizes) -> [usize; 3] {
    let kv = batch * seq * kv_heads * dim;
    [batch * seq * heads * dim, kv, kv]
}

#[test]
fn attention_matches_reference() {
    for shape in [
        [1, 1, 1, 1, 2],
        [2, 33, 6, 2, 10],
        [1, 64, 2, 2, 64],
        [2, 129, 4, 1, 64],
        [1, 257, 3, 3, 10],
        [1, 300, 2, 1, 128],
    ] {
        let op = operation(causal_attention, shape);
        let reference = operation(causal_attention_reference, shape);
        assert_matches(op, reference, &sizes(shape), 5e-6);
    }
}

#[test]
fn attention_is_sound() {
    let shape = [2, 5, 4, 2, 2];
    assert_sound(operation(causal_attention, shape), &sizes(shape));
}

#[test]
fn attention_has_the_same_bits_on_any_number_of_threads() {
    let shape = [2, 200, 6, 2, 64];
    assert_same_bits(operation(causal_attention, shape), &sizes(shape));
}

/// Scores of hundreds would overflow without the running maximum.
#[test]
fn attention_with_large_scores() {
    let shape = [1, 150, 2, 1, 10];
    let scaled = |f| {
        let op = operation(f, shape);
        move |t: &[Tensor<1>]| op(&[t[0].clone() * 40.0, t[1].clone() * 10.0, t[2].clone()])
    };
    // The scores themselves are good to 1e-7 of their size, which is an error of 1e-4 in the
    // weights.
    assert_matches(
        scaled(causal_attention),
        scaled(causal_attention_reference),
        &sizes(shape),
        1e-3,
    );
}

/// A row does not depend on the rows after it.
#[test]
fn attention_is_causal() {
    let device = Device::flex();
    let x = |seed, seq: usize| {
        let whole =
            flat(&normal(100 * 2 * 10, seed), FloatDType::F32, &device).reshape([1, 100, 2, 10]);
        whole.narrow(1, 0, seq)
    };
    let whole = causal_attention(x(1, 100), x(2, 100), x(3, 100)).narrow(1, 0, 70);
    let part = causal_attention(x(1, 70), x(2, 70), x(3, 70));
    assert_close(&values(part), &values(whole), 1e-6, "first rows");
}

#[test]
#[should_panic(expected = "3 heads cannot share 2 key heads")]
fn attention_rejects_heads_that_cannot_be_grouped() {
    let device = Device::flex();
    let kv = Tensor::<4>::ones([1, 4, 2, 8], &device);
    causal_attention(Tensor::ones([1, 4, 3, 8], &device), kv.clone(), kv);
}
