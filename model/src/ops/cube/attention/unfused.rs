//! Causal attention by batched products, with the whole matrix of scores in `f32`, for heads that the fused kernels
//! do not support. A window masks scores, but saves no work.

use burn::tensor::{DType, Shape};
use burn_backend::Slice;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;
use cubecl::prelude::*;

use super::super::matmul::batched;
use super::super::sums::{Reduction, cube_reduce, units_for, zeros};
use super::super::{contiguous_in, cubes, cubes_for, empty, len_of};
use crate::ops::attention::AttentionShape;

/// Returns the result, and the logarithm of each row's sum of exponentials.
pub(super) fn forward(
    q: &CubeTensor,
    k: &CubeTensor,
    v: &CubeTensor,
    shape: AttentionShape,
) -> (CubeTensor, CubeTensor) {
    let AttentionShape { batch, seq, heads, .. } = shape;
    let lse = empty(q, [batch, seq, heads], DType::F32);
    if shape.is_empty() {
        return (empty(q, q.meta.shape().clone(), q.dtype), lse);
    }
    let (q_heads, k, v) = (by_head(q), shared(k, shape), shared(v, shape));
    let weights = scores(q_heads, k);
    softmax(&weights, &lse, shape);
    (by_row(batched([weights, v], [false, false]), q.dtype), lse)
}

pub(super) fn backward(
    [q, k, v]: &[CubeTensor; 3],
    (out, lse): &(CubeTensor, CubeTensor),
    dout: &CubeTensor,
    shape: AttentionShape,
    wanted: [bool; 3],
) -> [Option<CubeTensor>; 3] {
    if shape.is_empty() {
        let zero = |x: &CubeTensor| zeros(x, x.meta.shape().clone(), x.dtype);
        return [wanted[0].then(|| zero(q)), wanted[1].then(|| zero(k)), wanted[2].then(|| zero(v))];
    }
    let (q_heads, dout_heads) = (by_head(q), by_head(dout));
    let (k_heads, v_heads) = (shared(k, shape), shared(v, shape));
    // The gradients of the weights become the gradients of the scores, in place.
    let weights = scores(q_heads.clone(), k_heads.clone());
    let dscores = scores(dout_heads.clone(), v_heads);
    derive(&weights, &dscores, [out, dout], lse, shape);

    let dq = || by_row(batched([dscores.clone(), k_heads], [false, false]), q.dtype);
    let summed = |columns: CubeTensor, rows: CubeTensor, dtype| {
        by_row(over_group(batched([columns, rows], [true, false]), shape), dtype)
    };
    [
        wanted[0].then(dq),
        wanted[1].then(|| summed(dscores.clone(), q_heads, k.dtype)),
        wanted[2].then(|| summed(weights, dout_heads, v.dtype)),
    ]
}

/// Converts `[batch, rows, heads, head_dim]` to `[batch, heads, rows, head_dim]` in `f32`.
fn by_head(x: &CubeTensor) -> CubeTensor {
    CubeBackend::float_swap_dims(contiguous_in(x, DType::F32), 1, 2)
}

fn by_row(x: CubeTensor, dtype: DType) -> CubeTensor {
    contiguous_in(&CubeBackend::float_swap_dims(x, 1, 2), dtype)
}

/// Returns the filled rows of keys or values, repeated per query head: `[batch, heads, keys, head_dim]`.
fn shared(x: &CubeTensor, shape: AttentionShape) -> CubeTensor {
    let AttentionShape { batch, keys, heads, kv_heads, head_dim, .. } = shape;
    let whole = Slice::full();
    let filled = CubeBackend::float_slice(x.clone(), &[whole, Slice::from(0..keys), whole, whole]);
    let grouped = Shape::from([batch, kv_heads, 1, keys, head_dim]);
    let repeated = Shape::from([batch, kv_heads, heads / kv_heads, keys, head_dim]);
    let x = CubeBackend::float_reshape(by_head(&filled), grouped);
    let x = CubeBackend::float_expand(x, repeated);
    CubeBackend::float_reshape(x, Shape::from([batch, heads, keys, head_dim]))
}

/// Sums `[batch, heads, keys, head_dim]` over the query heads that share a key head.
fn over_group(x: CubeTensor, shape: AttentionShape) -> CubeTensor {
    let AttentionShape { batch, keys, heads, kv_heads, head_dim, .. } = shape;
    let grouped = Shape::from([batch, kv_heads, heads / kv_heads, keys, head_dim]);
    let sum = CubeBackend::float_sum_dim(CubeBackend::float_reshape(x, grouped), 2);
    CubeBackend::float_reshape(sum, Shape::from([batch, kv_heads, keys, head_dim]))
}

fn scores(a: CubeTensor, b: CubeTensor) -> CubeTensor {
    batched([a, b], [false, true])
}

fn scale_of(shape: AttentionShape) -> f32 {
    (1.0 / (shape.head_dim as f64).sqrt()) as f32
}

/// Replaces products of queries and keys by softmax weights, and writes the logarithms of the sums.
fn softmax(scores: &CubeTensor, lse: &CubeTensor, shape: AttentionShape) {
    let AttentionShape { seq, keys, heads, window, .. } = shape;
    let units = units_for(keys);
    // SAFETY: cubes beyond the last row do nothing, and units stay within a row of scores.
    unsafe {
        launch! {
            softmax_kernel, cubes(&scores.client, len_of(lse), units), [scores];
            scores / 1, lse / 1; seq, keys, heads, scale_of(shape), f32::MIN, units, window
        }
    }
}

/// Returns the number of keys before the window of a query, whose own key is the last of `visible` keys.
#[cube]
fn hidden_keys(visible: usize, #[comptime] window: Option<usize>) -> usize {
    if comptime!(window.is_some()) {
        visible - min(visible, comptime!(window.unwrap_or_default()))
    } else {
        0usize.runtime()
    }
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn softmax_kernel(
    scores: &mut [f32],
    lse: &mut [f32],
    seq: usize,
    keys: usize,
    heads: usize,
    scale: f32,
    smallest: f32,
    #[comptime] units: usize,
    #[comptime] window: Option<usize>,
) {
    let row = CUBE_POS;
    if row >= lse.len() {
        terminate!();
    }
    let start = row * keys;
    let query = row % seq;
    let visible = keys - seq + query + 1;
    let unit = UNIT_POS as usize;
    let hidden = hidden_keys(visible, window);
    let mut largest = smallest;
    let mut i = hidden + unit;
    while i < visible {
        let score = scores[start + i] * scale;
        if score > largest {
            largest = score;
        }
        i += units;
    }
    let shift = cube_reduce(largest, Reduction::Max, units);
    let mut sum = 0.0f32;
    let mut i = hidden + unit;
    while i < visible {
        sum += (scores[start + i] * scale - shift).exp();
        i += units;
    }
    let sum = cube_reduce(sum, Reduction::Sum, units);
    let mut i = unit;
    while i < keys {
        let mut weight = 0.0f32;
        if i >= hidden && i < visible {
            weight = (scores[start + i] * scale - shift).exp() / sum;
        }
        scores[start + i] = weight;
        i += units;
    }
    if unit == 0 {
        let head = row / seq % heads;
        let batch = row / seq / heads;
        lse[(batch * seq + query) * heads + head] = shift + sum.ln();
    }
}

/// Replaces products of queries and keys by weights, and gradients of weights by gradients of products.
fn derive(
    weights: &CubeTensor,
    dscores: &CubeTensor,
    [out, dout]: [&CubeTensor; 2],
    lse: &CubeTensor,
    shape: AttentionShape,
) {
    let AttentionShape { seq, heads, head_dim, window, .. } = shape;
    let (out, dout) = (contiguous_in(out, DType::F32), contiguous_in(dout, DType::F32));
    let products = empty(lse, lse.meta.shape().clone(), DType::F32);
    let client = &weights.client;
    // SAFETY: no unit goes beyond the end of `products`, which has one value per row of the others.
    unsafe {
        launch! {
            products_kernel, cubes_for(client, len_of(lse)), [out];
            out / 1, dout / 1, products / 1; head_dim
        }
    }
    // SAFETY: both matrices of scores have the same length, and no unit goes beyond it.
    unsafe {
        launch! {
            derive_kernel, cubes_for(client, len_of(weights)), [weights];
            weights / 1, dscores / 1, lse / 1, products / 1; seq, heads, scale_of(shape), window
        }
    }
}

/// Computes `rowsum(dO ∘ O)`.
#[cube(launch_unchecked, address_type = "dynamic")]
fn products_kernel(out: &[f32], dout: &[f32], products: &mut [f32], head_dim: usize) {
    if ABSOLUTE_POS >= products.len() {
        terminate!();
    }
    let start = ABSOLUTE_POS * head_dim;
    let mut sum = 0.0f32;
    for i in 0..head_dim {
        sum += out[start + i] * dout[start + i];
    }
    products[ABSOLUTE_POS] = sum;
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn derive_kernel(
    weights: &mut [f32],
    dscores: &mut [f32],
    lse: &[f32],
    products: &[f32],
    seq: usize,
    heads: usize,
    scale: f32,
    #[comptime] window: Option<usize>,
) {
    if ABSOLUTE_POS >= weights.len() {
        terminate!();
    }
    let key = ABSOLUTE_POS % seq;
    let row = ABSOLUTE_POS / seq;
    let query = row % seq;
    let head = row / seq % heads;
    let place = (row / seq / heads * seq + query) * heads + head;
    let mut weight = 0.0f32;
    if key <= query && key >= hidden_keys(query + 1, window) {
        weight = (weights[ABSOLUTE_POS] * scale - lse[place]).exp();
    }
    let dscore = weight * (dscores[ABSOLUTE_POS] - products[place]) * scale;
    weights[ABSOLUTE_POS] = weight;
    dscores[ABSOLUTE_POS] = dscore;
}
