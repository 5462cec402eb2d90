//! Causal self-attention without the matrix of scores.

use burn::backend::autodiff::{
    Autodiff, NodeId,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::{Bool, Tensor, activation::softmax};
use burn_flex::FlexTensor;

use super::Tracked;
use super::cpu::attention::{Operands, Shape};
use super::cpu::{self, Values, with_real};

/// `softmax(q · kᵀ / sqrt(head_dim)) · v`, where a row sees itself and the rows before it.
///
/// `q` is `[batch, seq, heads, head_dim]`; `k` and `v` are `[batch, seq, kv_heads, head_dim]` with
/// `heads` a multiple of `kv_heads`: heads `g · heads / kv_heads ..` share key head `g`
/// (grouped-query attention, Ainslie et al., 2023). The result has the shape of `q`.
///
/// FlashAttention-2 (Dao, 2023): tiles of rows × columns of the scores with a running maximum and
/// sum; saved are the result and the logarithm of each row's sum. Backward computes the tiles
/// again: with `P = exp(S − lse)` and `D = rowsum(dO ∘ O)`, `dV = Pᵀ · dO`,
/// `dS = P ∘ (dO · Vᵀ − D) / sqrt(head_dim)`, `dQ = dS · K`, `dK = dSᵀ · Q`.
///
/// # Panics
///
/// If the shapes do not fit.
pub fn causal_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    Tensor::from_dispatch(<Dispatch as AttentionOp>::fused_causal_attention(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
    ))
}

/// [`causal_attention`] of the last rows of a sequence whose keys and values have been kept.
///
/// `q` is `[batch, seq, heads, head_dim]`; `k` and `v` are `[batch, capacity, kv_heads, head_dim]`, of
/// which the first `filled` rows count. Row `i` of `q` is row `filled − seq + i` of the sequence and
/// sees that row and those before it. The result has the shape of `q`.
///
/// # Panics
///
/// If the shapes do not fit, or if a gradient is to be tracked: there is no backward pass.
pub fn cached_attention(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>, filled: usize) -> Tensor<4> {
    Tensor::from_dispatch(<Dispatch as AttentionOp>::fused_cached_attention(
        q.into_dispatch(),
        k.into_dispatch(),
        v.into_dispatch(),
        filled,
    ))
}

/// [`causal_attention`] in plain burn, with the whole matrix of scores.
pub fn causal_attention_reference(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    let [_, seq, ..] = k.dims();
    cached_attention_reference(q, k, v, seq)
}

/// [`cached_attention`] in plain burn, with the whole matrix of scores.
pub fn cached_attention_reference(
    q: Tensor<4>,
    k: Tensor<4>,
    v: Tensor<4>,
    filled: usize,
) -> Tensor<4> {
    let [batch, seq, heads, head_dim] = q.dims();
    let group = heads / k.dims()[2];
    let per_head = |x: Tensor<4>| -> Tensor<4> {
        let [_, _, kv_heads, _] = x.dims();
        let x: Tensor<5> = x.narrow(1, 0, filled).swap_dims(1, 2).unsqueeze_dim(2);
        x.expand([batch, kv_heads, group, filled, head_dim])
            .reshape([batch, heads, filled, head_dim])
    };
    let (k, v, q) = (per_head(k), per_head(v), q.swap_dims(1, 2));
    let scores = q.matmul(k.swap_dims(2, 3)) / (head_dim as f64).sqrt();
    let before = (filled - seq) as i64;
    let future = Tensor::<2, Bool>::tril_mask([seq, filled], before, &scores.device());
    let scores = scores.mask_fill(future.unsqueeze(), f64::NEG_INFINITY);
    softmax(scores, 3).matmul(v).swap_dims(1, 2)
}

/// The backends of [`causal_attention`] and [`cached_attention`].
#[backend_extension(Flex, Autodiff)]
pub trait AttentionOp: Backend {
    /// Causal attention with grouped key and value heads.
    fn fused_causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
    /// The same for the last rows of a longer sequence, without a backward pass.
    fn fused_cached_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
        filled: usize,
    ) -> FloatTensor<Self>;
}

impl AttentionOp for Flex {
    fn fused_causal_attention(q: FlexTensor, k: FlexTensor, v: FlexTensor) -> FlexTensor {
        forward(&q, &k, &v, shape_of(&q, &k, &v)).0
    }

    fn fused_cached_attention(
        q: FlexTensor,
        k: FlexTensor,
        v: FlexTensor,
        filled: usize,
    ) -> FlexTensor {
        forward(&q, &k, &v, cached_shape_of(&q, &k, &v, filled)).0
    }
}

impl<C: CheckpointStrategy> AttentionOp for Autodiff<Flex, C> {
    fn fused_causal_attention(q: Tracked<C>, k: Tracked<C>, v: Tracked<C>) -> Tracked<C> {
        let [q_values, k_values, v_values] = [q.primitive(), k.primitive(), v.primitive()];
        let shape = shape_of(q_values, k_values, v_values);
        let (out, lse) = forward(q_values, k_values, v_values, shape);
        let nodes = [q.node(), k.node(), v.node()];
        match AttentionBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let qkv = [&q, &k, &v].map(|parent| prep.checkpoint(parent));
                prep.finish(Saved { qkv, out: out.clone(), lse }, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(out),
        }
    }

    fn fused_cached_attention(
        q: Tracked<C>,
        k: Tracked<C>,
        v: Tracked<C>,
        filled: usize,
    ) -> Tracked<C> {
        let nodes = [q.node(), k.node(), v.node()];
        match AttentionBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(_) => panic!("cached_attention has no backward pass"),
            OpsKind::UnTracked(prep) => {
                let [q, k, v] = [q.primitive(), k.primitive(), v.primitive()];
                prep.finish(forward(q, k, v, cached_shape_of(q, k, v, filled)).0)
            }
        }
    }
}

#[derive(Clone, Debug)]
struct Saved {
    qkv: [NodeId; 3],
    out: FlexTensor,
    lse: FlexTensor,
}

#[derive(Debug)]
struct AttentionBackward;

impl Backward<Flex, 3> for AttentionBackward {
    type State = Saved;

    fn backward(self, ops: Ops<Saved, 3>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dout = grads.consume::<Flex>(&ops.node);
        let Saved { qkv, out, lse } = ops.state;
        let qkv = qkv.map(|id| checkpointer.retrieve_node_output::<FlexTensor>(id));
        let wanted = ops.parents.each_ref().map(Option::is_some);
        let gradients = gradients(&qkv, &out, &lse, &dout, wanted);
        for (node, gradient) in ops.parents.into_iter().zip(gradients) {
            if let (Some(node), Some(gradient)) = (node, gradient) {
                grads.register::<Flex>(node.id, gradient);
            }
        }
    }
}

/// Sizes where every row has a query.
fn shape_of(q: &FlexTensor, k: &FlexTensor, v: &FlexTensor) -> Shape {
    let [_, seq, ..]: [usize; 4] = q.layout().shape().dims();
    let shape = cached_shape_of(q, k, v, seq);
    assert_eq!(shape.capacity, seq, "attention: rows of keys for {seq} rows of queries");
    shape
}

/// Sizes where queries are the last of `filled` rows.
fn cached_shape_of(q: &FlexTensor, k: &FlexTensor, v: &FlexTensor, filled: usize) -> Shape {
    let [batch, seq, heads, head_dim] = q.layout().shape().dims();
    let kv_shape @ [_, capacity, kv_heads, _]: [usize; 4] = k.layout().shape().dims();
    assert!(
        kv_shape == v.layout().shape().dims() && kv_shape == [batch, capacity, kv_heads, head_dim],
        "attention: q {:?}, k {kv_shape:?}, v {:?}",
        q.layout().shape(),
        v.layout().shape()
    );
    assert!(
        kv_heads > 0 && heads % kv_heads == 0,
        "attention: {heads} heads cannot share {kv_heads} key heads"
    );
    assert!(
        seq <= filled && filled <= capacity,
        "attention: {seq} queries, {filled} of {capacity} keys"
    );
    Shape { batch, seq, keys: filled, capacity, heads, kv_heads, head_dim }
}

/// The result and the logarithm of each row's sum, `[batch, seq, heads]`.
fn forward(
    q: &FlexTensor,
    k: &FlexTensor,
    v: &FlexTensor,
    shape: Shape,
) -> (FlexTensor, FlexTensor) {
    with_real!(q.dtype(), T => {
        let (q_values, k, v) = (Values::<T>::of(q), Values::<T>::of(k), Values::<T>::of(v));
        let (out, lse) = Operands { q: &q_values, k: &k, v: &v, shape }.forward();
        let lse_shape = [shape.batch, shape.seq, shape.heads];
        (
            cpu::tensor_of(out, q.layout().shape().clone(), q.dtype()),
            cpu::tensor_of(lse, lse_shape, <T as cpu::real::Real>::DTYPE),
        )
    })
}

fn gradients(
    qkv: &[FlexTensor; 3],
    out: &FlexTensor,
    lse: &FlexTensor,
    dout: &FlexTensor,
    wanted: [bool; 3],
) -> [Option<FlexTensor>; 3] {
    let [q, k, v] = qkv;
    let shape = shape_of(q, k, v);
    with_real!(q.dtype(), T => {
        let q_values = Values::<T>::of(q);
        let (k_values, v_values) = (Values::<T>::of(k), Values::<T>::of(v));
        let (out, lse, dout) = (Values::<T>::of(out), Values::<T>::of(lse), Values::<T>::of(dout));
        let operands = Operands { q: &q_values, k: &k_values, v: &v_values, shape };
        let gradients = operands.backward(&out, &lse, &dout, wanted);
        let mut parents = qkv.iter();
        gradients.map(|gradient| {
            let parent = parents.next()?;
            let shape = parent.layout().shape().clone();
            gradient.map(|values| cpu::tensor_of(values, shape, parent.dtype()))
        })
    })
}
