//! Entry points of attention on a GPU: the fused kernels, or the matrix of scores.

use burn::tensor::DType;
use burn_cubecl::CubeBackend;
use burn_cubecl::tensor::CubeTensor;

use super::super::{allocate, contiguous, contiguous_in};
use super::launch::{backward_into, dims, fits, forward_into};
use super::unfused;
use crate::ops::attention::{AttentionKernels, AttentionShape};

impl AttentionKernels for CubeBackend {
    fn attention_forward(
        q: &CubeTensor,
        k: &CubeTensor,
        v: &CubeTensor,
        shape: AttentionShape,
    ) -> (CubeTensor, CubeTensor) {
        match fits([q, k, v]) {
            true => forward_of(&contiguous(q), &contiguous(k), &contiguous(v), shape.keys, shape.window),
            false => unfused::forward(q, k, v, shape),
        }
    }

    fn attention_backward(
        qkv: &[CubeTensor; 3],
        forward: &(CubeTensor, CubeTensor),
        dout: &CubeTensor,
        shape: AttentionShape,
        wanted: [bool; 3],
    ) -> [Option<CubeTensor>; 3] {
        if !fits(qkv.each_ref()) {
            return unfused::backward(qkv, forward, dout, shape, wanted);
        }
        let (out, lse) = forward;
        let dout = contiguous_in(dout, out.dtype);
        backward(qkv.each_ref(), shape.window, out, lse, &dout, wanted)
    }
}

/// Computes `softmax(q · kᵀ / sqrt(head_dim)) · v`, where each row attends to itself and to earlier rows or, with a
/// `window`, to at most `window` rows. Also returns the logarithm of each row's sum of exponentials.
///
/// `q` and the result are `[batch, seq, heads, head_dim]`, `k` and `v` are `[batch, seq, kv_heads, head_dim]`, and
/// the logarithms are `[batch, seq, heads]` in `f32`.
///
/// # Panics
///
/// If shapes do not match, the window is 0, `head_dim` is not a multiple of 8 up to 256, or the device does not
/// support the dtype.
pub fn forward(
    q: &CubeTensor,
    k: &CubeTensor,
    v: &CubeTensor,
    window: Option<usize>,
) -> (CubeTensor, CubeTensor) {
    let [_, rows, ..] = dims(k);
    assert_eq!(rows, dims(q)[1], "attention: rows of keys for rows of queries");
    forward_of(q, k, v, rows, window)
}

/// Computes [`forward`] for queries that are the last of `filled` rows. `k` and `v` are `[batch, capacity, kv_heads,
/// head_dim]`; rows from `filled` on are ignored.
///
/// # Panics
///
/// As [`forward`].
pub fn cached_forward(
    q: &CubeTensor,
    k: &CubeTensor,
    v: &CubeTensor,
    filled: usize,
    window: Option<usize>,
) -> CubeTensor {
    forward_of(q, k, v, filled, window).0
}

fn forward_of(
    q: &CubeTensor,
    k: &CubeTensor,
    v: &CubeTensor,
    filled: usize,
    window: Option<usize>,
) -> (CubeTensor, CubeTensor) {
    let [batch, seq, heads, head_dim] = dims(q);
    let out = allocate(q, [batch, seq, heads, head_dim], q.dtype);
    let lse = allocate(q, [batch, seq, heads], DType::F32);
    forward_into(q, k, v, filled, window, &out, &lse);
    (out, lse)
}

/// Returns the `wanted` gradients of `q`, `k` and `v` of [`forward`], whose results are `out` and `lse`.
///
/// # Panics
///
/// As [`forward`].
pub fn backward(
    [q, k, v]: [&CubeTensor; 3],
    window: Option<usize>,
    out: &CubeTensor,
    lse: &CubeTensor,
    dout: &CubeTensor,
    wanted: [bool; 3],
) -> [Option<CubeTensor>; 3] {
    let keys = wanted[1] || wanted[2];
    let empty = |x: &CubeTensor, needed: bool| needed.then(|| allocate(x, dims(x), x.dtype));
    if wanted == [false; 3] {
        return [None, None, None];
    }
    let (dq, dk, dv) = (allocate(q, dims(q), q.dtype), empty(k, keys), empty(v, keys));
    backward_into([q, k, v], window, out, lse, dout, &dq, dk.as_ref().zip(dv.as_ref()));
    [Some(dq).filter(|_| wanted[0]), dk.filter(|_| wanted[1]), dv.filter(|_| wanted[2])]
}
