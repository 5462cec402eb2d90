//! Causal self-attention that never stores the whole matrix of scores.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{Bool, Tensor, activation::softmax};
use burn_backend::TensorMetadata;

use super::plain::{FusedOp, in_f32, is_plain};
use super::tape::{Tracked, record};

/// Computes `softmax(q · kᵀ / sqrt(head_dim)) · v`, where each row attends to itself and to earlier rows: to all of
/// them or, with a `window`, only to the `window − 1` right before it (sliding-window attention, Beltagy et al.,
/// 2020; as in Mistral). A window at least as long as the sequence gives the same bits as full attention.
///
/// `q` is `[batch, seq, heads, head_dim]`; `k` and `v` are `[batch, seq, kv_heads, head_dim]`, where `heads` is a
/// multiple of `kv_heads`. Heads `g · heads / kv_heads ..` share key head `g` (grouped-query attention, Ainslie et
/// al., 2023). The result has the shape of `q`.
///
/// FlashAttention-2 (Dao, 2023): processes tiles of rows × columns of the scores with a running maximum and sum, and
/// saves the result and the logarithm of each row's sum. Backward recomputes the tiles. With `P = exp(S − lse)` and
/// `D = rowsum(dO ∘ O)`, `dV = Pᵀ · dO`, `dS = P ∘ (dO · Vᵀ − D) / sqrt(head_dim)`, `dQ = dS · K`, `dK = dSᵀ · Q`.
/// Tiles to which no row attends are skipped, so the work per row grows with the window and not with the sequence.
///
/// # Panics
///
/// If the shapes do not match, or if the window is 0.
pub fn causal_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, window: Option<usize>) -> Tensor<4> {
    if is_plain(FusedOp::Attention) {
        return in_f32([q, k, v], |[q, k, v]| causal_attention_reference(q, k, v, window));
    }
    let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
    Tensor::from_dispatch(Dispatch::fused_attention(q, k, v, None, window))
}

/// Computes [`causal_attention`] for the last rows of a sequence whose keys and values are in a cache.
///
/// `q` is `[batch, seq, heads, head_dim]`; `k` and `v` are `[batch, capacity, kv_heads, head_dim]`, of which only the
/// first `filled` rows are read. Row `i` of `q` is row `filled − seq + i` of the sequence. Each row attends to itself
/// and to earlier rows or, with a `window`, to at most `window` rows. The result has the shape of `q`.
///
/// # Panics
///
/// If the shapes do not match, if the window is 0, or if a gradient would be tracked: there is no backward pass.
pub fn cached_attention(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    filled: usize,
    window: Option<usize>,
) -> Tensor<4> {
    if is_plain(FusedOp::Attention) {
        return in_f32([q, k, v], |[q, k, v]| cached_attention_reference(q, k, v, filled, window));
    }
    let [q, k, v] = [q, k, v].map(Tensor::into_dispatch);
    Tensor::from_dispatch(Dispatch::fused_attention(q, k, v, Some(filled), window))
}

/// Computes [`causal_attention`] in plain burn, with the whole matrix of scores.
pub fn causal_attention_reference(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    window: Option<usize>,
) -> Tensor<4> {
    let [_, seq, ..] = k.dims();
    cached_attention_reference(q, k, v, seq, window)
}

/// Computes [`cached_attention`] in plain burn, with the whole matrix of scores.
pub fn cached_attention_reference(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    filled: usize,
    window: Option<usize>,
) -> Tensor<4> {
    let [batch, seq, heads, head_dim] = q.dims();
    let group = heads / k.dims()[2];
    let per_head = |x: Tensor<4>| -> Tensor<4> {
        let [_, _, kv_heads, _] = x.dims();
        let x: Tensor<5> = x.narrow(1, 0, filled).swap_dims(1, 2).unsqueeze_dim(2);
        x.expand([batch, kv_heads, group, filled, head_dim]).reshape([batch, heads, filled, head_dim])
    };
    let (k, v, q) = (per_head(k), per_head(v), q.swap_dims(1, 2));
    let scores = q.matmul(k.swap_dims(2, 3)) / (head_dim as f64).sqrt();
    let before = (filled - seq) as i64;
    let mask = |offset: i64| Tensor::<2, Bool>::tril_mask([seq, filled], offset, &scores.device());
    let hidden = match window {
        None => mask(before),
        // `tril_mask` is true above a diagonal: hides later keys, and keys before the window.
        Some(window) => mask(before).bool_or(mask(before - window as i64).bool_not()),
    };
    let scores = scores.mask_fill(hidden.unsqueeze(), f64::NEG_INFINITY);
    softmax(scores, 3).matmul(v).swap_dims(1, 2)
}

/// A backend that can compute [`causal_attention`] and [`cached_attention`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait AttentionOp: Backend {
    /// Computes causal attention with grouped key and value heads. With `filled`, the queries are the last of
    /// `filled` rows, and there is no backward pass. With `window`, a row attends to at most `window` rows.
    fn fused_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        filled: Option<usize>,
        window: Option<usize>,
    ) -> FloatTensor<Self>;
}

/// The result of attention and the logarithm of the sum of each row's exponentials,
/// `[batch, seq, heads]`.
pub type OutputAndSums<B> = (FloatTensor<B>, FloatTensor<B>);

/// The kernels that a backend implements for [`causal_attention`] and [`cached_attention`].
pub trait AttentionKernels: Backend {
    /// Returns the result, and the logarithms that backward needs.
    fn attention_forward(
        q: &FloatTensor<Self>,
        k: &FloatTensor<Self>,
        v: &FloatTensor<Self>,
        shape: AttentionShape,
    ) -> OutputAndSums<Self>;
    /// Returns the requested gradients of `q`, `k` and `v`. Requires a query for every row.
    fn attention_backward(
        qkv: &[FloatTensor<Self>; 3],
        forward: &OutputAndSums<Self>,
        dout: &FloatTensor<Self>,
        shape: AttentionShape,
        wanted: [bool; 3],
    ) -> [Option<FloatTensor<Self>>; 3];
}

impl<B: AttentionKernels> AttentionOp for B {
    fn fused_attention(
        q: FloatTensor<B>,
        k: FloatTensor<B>,
        v: FloatTensor<B>,
        filled: Option<usize>,
        window: Option<usize>,
    ) -> FloatTensor<B> {
        B::attention_forward(&q, &k, &v, AttentionShape::of(&q, &k, &v, filled, window)).0
    }
}

impl<B: AttentionKernels, C: CheckpointStrategy> AttentionOp for Autodiff<B, C> {
    fn fused_attention(
        q: Tracked<B, C>,
        k: Tracked<B, C>,
        v: Tracked<B, C>,
        filled: Option<usize>,
        window: Option<usize>,
    ) -> Tracked<B, C> {
        let qkv = [&q, &k, &v];
        let tracked = qkv.iter().any(|x| x.is_tracked());
        assert!(filled.is_none() || !tracked, "cached_attention has no backward pass");
        let [q, k, v] = qkv.map(|x| x.primitive());
        let (out, lse) = B::attention_forward(q, k, v, AttentionShape::of(q, k, v, filled, window));
        record::<B, C, _, _>(
            qkv.map(|x| x.node()),
            out.clone(),
            |save| (qkv.map(save), (out, lse), window),
            |mut step, dout, (qkv, forward, window)| {
                let qkv = qkv.map(|id| step.value::<B>(id));
                let shape = AttentionShape::of(&qkv[0], &qkv[1], &qkv[2], None, window);
                let gradients = B::attention_backward(&qkv, &forward, &dout, shape, step.wanted());
                step.register_all::<B>(gradients);
            },
        )
    }
}

/// Sizes of an attention operation.
#[derive(Clone, Copy, Debug)]
pub struct AttentionShape {
    /// Number of independent sequences.
    pub batch: usize,
    /// Number of queries per sequence. Queries are the last rows of a sequence.
    pub seq: usize,
    /// Number of keys and values per sequence; at least the number of queries.
    pub keys: usize,
    /// Number of allocated rows of keys and values per sequence.
    pub capacity: usize,
    /// Number of query heads.
    pub heads: usize,
    /// Number of key and value heads, a divisor of `heads`.
    pub kv_heads: usize,
    /// Width of a head.
    pub head_dim: usize,
    /// Maximum number of keys that a query attends to, fewer than `keys`: its own key and those right before it.
    /// `None` if every query attends to all keys up to its own; this includes windows at least as long as the
    /// sequence.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// Returns the shape of an operation on `q` and `k`. With `filled`, the queries are the last of `filled` rows;
    /// otherwise, every row has a query. With `window`, a query attends to at most `window` keys.
    pub(super) fn of<T: TensorMetadata>(
        q: &T,
        k: &T,
        v: &T,
        filled: Option<usize>,
        window: Option<usize>,
    ) -> Self {
        let [batch, seq, heads, head_dim] = q.shape().dims();
        let kv_shape @ [_, capacity, kv_heads, _]: [usize; 4] = k.shape().dims();
        assert!(
            kv_shape == v.shape().dims() && kv_shape == [batch, capacity, kv_heads, head_dim],
            "attention: q {:?}, k {kv_shape:?}, v {:?}",
            q.shape(),
            v.shape()
        );
        assert!(
            kv_heads > 0 && heads % kv_heads == 0,
            "attention: {heads} heads cannot share {kv_heads} key heads"
        );
        let keys = filled.unwrap_or(seq);
        assert!(seq <= keys && keys <= capacity, "attention: {seq} queries, {keys} of {capacity} keys");
        let whole = filled.is_none();
        assert!(!whole || capacity == seq, "attention: rows of keys for {seq} rows of queries");
        assert!(window != Some(0), "attention: a window of 0 rows, in which a row does not see itself");
        let window = window.filter(|window| *window < keys);
        AttentionShape { batch, seq, keys, capacity, heads, kv_heads, head_dim, window }
    }

    /// Returns the index of the first key that the query at `position` of the sequence attends to.
    pub fn first_seen(self, position: usize) -> usize {
        self.window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// Returns whether there is nothing to compute.
    pub fn is_empty(self) -> bool {
        [self.batch, self.seq, self.heads, self.head_dim].contains(&0)
    }
}
