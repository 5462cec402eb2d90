use burn::tensor::{Device, FloatDType, Tensor};
use kiln_model::ops::{
    cached_attention, cached_attention_reference, causal_attention, causal_attention_reference,
};

use crate::ops_support::*;

pub type Attention = fn(Tensor<4>, Tensor<4>, Tensor<4>, Option<usize>) -> Tensor<4>;

/// Batch size, sequence length, heads, key heads, width of a head.
pub type Sizes = [usize; 5];

pub fn operation(f: Attention, sizes: Sizes) -> impl Operation + Sync {
    in_window(f, sizes, None)
}

/// Restricts `f` to a window, so that a row attends to at most `window` rows.
pub fn in_window(
    f: Attention,
    [batch, seq, heads, kv_heads, dim]: Sizes,
    window: Option<usize>,
) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let q = t[0].clone().reshape([batch, seq, heads, dim]);
        let [k, v] = [1, 2].map(|i| t[i].clone().reshape([batch, seq, kv_heads, dim]));
        f(q, k, v, window).reshape([batch * seq * heads * dim])
    }
}

pub fn sizes([batch, seq, heads, kv_heads, dim]: Sizes) -> [usize; 3] {
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
fn attention_bits_do_not_depend_on_threads() {
    let shape = [2, 200, 6, 2, 64];
    assert_same_bits(operation(causal_attention, shape), &sizes(shape));
}

/// Scores in the hundreds would overflow without the running maximum.
#[test]
fn attention_with_large_scores() {
    let shape = [1, 150, 2, 1, 10];
    let scaled = |f| {
        let op = operation(f, shape);
        move |t: &[Tensor<1>]| op(&[t[0].clone() * 40.0, t[1].clone() * 10.0, t[2].clone()])
    };
    // The scores themselves are accurate to 1e-7 of their size, which is an error of 1e-4 in the weights.
    assert_matches(scaled(causal_attention), scaled(causal_attention_reference), &sizes(shape), 1e-3);
}

/// A row does not depend on the rows after it.
#[test]
fn attention_is_causal() {
    let device = Device::flex();
    let x = |seed, seq: usize| {
        let whole = flat(&normal(100 * 2 * 10, seed), FloatDType::F32, &device).reshape([1, 100, 2, 10]);
        whole.narrow(1, 0, seq)
    };
    let whole = causal_attention(x(1, 100), x(2, 100), x(3, 100), None).narrow(1, 0, 70);
    let part = causal_attention(x(1, 70), x(2, 70), x(3, 70), None);
    assert_close(&values(part), &values(whole), 1e-6, "first rows");
}

#[test]
#[should_panic(expected = "3 heads cannot share 2 key heads")]
fn attention_rejects_ungroupable_heads() {
    let device = Device::flex();
    let kv = Tensor::<4>::ones([1, 4, 2, 8], &device);
    causal_attention(Tensor::ones([1, 4, 3, 8], &device), kv.clone(), kv, None);
}

type Cached = fn(Tensor<4>, Tensor<4>, Tensor<4>, usize, Option<usize>) -> Tensor<4>;

/// Returns attention for the last `seq` of `filled` rows, in `dtype`. Rows beyond `filled` are NaN.
fn cached(f: Cached, sizes: Sizes, rows: [usize; 2], dtype: FloatDType, window: Option<usize>) -> Vec<f64> {
    let [filled, capacity] = rows;
    let [batch, seq, heads, kv_heads, dim] = sizes;
    let device = Device::flex();
    let q = flat(&normal(batch * seq * heads * dim, 1), dtype, &device);
    let [k, v] = [2, 3].map(|seed| {
        let rows = flat(&normal(batch * filled * kv_heads * dim, seed), dtype, &device);
        let rows = rows.reshape([batch, filled, kv_heads, dim]);
        let beyond = [batch, capacity - filled, kv_heads, dim];
        let beyond = Tensor::full(beyond, f64::NAN, (&device, dtype.into()));
        Tensor::cat(vec![rows, beyond], 1)
    });
    values(f(q.reshape([batch, seq, heads, dim]), k, v, filled, window))
}

#[test]
fn cached_attention_matches_reference() {
    for (sizes, filled, capacity) in [
        ([1, 1, 1, 1, 2], 1, 1),
        ([1, 1, 4, 2, 10], 300, 301),
        ([3, 1, 4, 4, 64], 193, 500),
        ([2, 5, 6, 2, 10], 196, 200),
        ([2, 15, 2, 1, 16], 250, 250),
        ([2, 16, 2, 1, 16], 250, 256),
        ([1, 70, 4, 1, 8], 230, 256),
        // The last rows begin a tile of columns to which the earlier rows do not attend.
        ([2, 60, 2, 2, 8], 200, 220),
        ([2, 129, 4, 1, 64], 129, 140),
    ] {
        let rows = [filled, capacity];
        let full = cached(cached_attention, sizes, rows, FloatDType::F32, None);
        for window in [None, Some(1), Some(3), Some(32), Some(65), Some(193)] {
            let actual = cached(cached_attention, sizes, rows, FloatDType::F32, window);
            let expected = cached(cached_attention_reference, sizes, rows, FloatDType::F64, window);
            let what = format!("{sizes:?} after {filled} in a window of {window:?}");
            assert_close(&actual, &expected, 5e-6, &what);
            assert!(window.is_some_and(|window| window < filled) || actual == full, "{what}");
        }
    }
}

/// The results are the last rows of the whole sequence's results.
#[test]
fn cached_attention_continues_a_sequence() {
    let device = Device::flex();
    let x = |seed, heads: usize| {
        flat(&normal(2 * 230 * heads * 8, seed), FloatDType::F32, &device).reshape([2, 230, heads, 8])
    };
    let (q, k, v) = (x(1, 4), x(2, 2), x(3, 2));
    let whole = causal_attention(q.clone(), k.clone(), v.clone(), None);
    for (first, seq) in [(229, 1), (0, 1), (0, 230), (100, 7), (40, 100), (191, 2)] {
        let rows = |x: &Tensor<4>| x.clone().narrow(1, first, seq);
        let part = cached_attention(rows(&q), k.clone(), v.clone(), first + seq, None);
        assert_close(&values(part), &values(rows(&whole)), 2e-6, &format!("rows from {first}"));
    }
}

#[test]
fn cached_attention_bits_ignore_thread_count() {
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
        pool.install(|| cached(cached_attention, [2, 100, 4, 2, 64], [300, 310], FloatDType::F32, None))
    };
    assert!(on(1) == on(3));
}

#[test]
#[should_panic(expected = "cached_attention has no backward pass")]
fn cached_attention_refuses_to_be_differentiated() {
    let device = Device::flex().autodiff();
    let kv = Tensor::<4>::ones([1, 4, 1, 8], &device);
    cached_attention(Tensor::ones([1, 1, 1, 8], &device).require_grad(), kv.clone(), kv, 3, None);
}

#[test]
#[should_panic(expected = "2 queries, 5 of 4 keys")]
fn cached_attention_rejects_missing_rows() {
    let device = Device::flex();
    let kv = Tensor::<4>::ones([1, 4, 1, 8], &device);
    cached_attention(Tensor::ones([1, 2, 1, 8], &device), kv.clone(), kv, 5, None);
}

#[test]
#[should_panic(expected = "rows of keys for 2 rows of queries")]
fn attention_rejects_fewer_queries_than_keys() {
    let device = Device::flex();
    let kv = Tensor::<4>::ones([1, 4, 1, 8], &device);
    causal_attention(Tensor::ones([1, 2, 1, 8], &device), kv.clone(), kv, None);
}
