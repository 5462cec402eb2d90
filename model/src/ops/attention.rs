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

/// [`causal_attention`] in plain burn, with the whole matrix of scores.
pub fn causal_attention_reference(q: Tensor<4>, k: Tensor<4>, v: Tensor<4>) -> Tensor<4> {
    let [batch, seq, heads, head_dim] = q.dims();
    let group = heads / k.dims()[2];
    let per_head = |x: Tensor<4>| -> Tensor<4> {
        let [_, _, kv_heads, _] = x.dims();
        let x: Tensor<5> = x.swap_dims(1, 2).unsqueeze_dim(2);
        x.expand([batch, kv_heads, group, seq, head_dim]).reshape([batch, heads, seq, head_dim])
    };
    let (k, v, q) = (per_head(k), per_head(v), q.swap_dims(1, 2));
    let scores = q.matmul(k.swap_dims(2, 3)) / (head_dim as f64).sqrt();
    let future = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &scores.device());
    let scores = scores.mask_fill(future.unsqueeze(), f64::NEG_INFINITY);
    softmax(scores, 3).matmul(v).swap_dims(1, 2)
}

/// The backends of [`causal_attention`].
#[backend_extension(Flex, Autodiff)]
pub trait AttentionOp: Backend {
    /// Causal attention with grouped key and value heads.
    fn fused_causal_attention(
        q: FloatTensor<Self>,
        k: FloatTensor<Self>,
        v: FloatTensor<Self>,
    ) -> FloatTensor<Self>;
}

impl AttentionOp for Flex {
    fn fused_causal_attention(q: FlexTensor, k: FlexTensor, v: FlexTensor) -> FlexTensor {
        forward(&q, &k, &v).0
    }
}

impl<C: CheckpointStrategy> AttentionOp for Autodiff<Flex, C> {
    fn fused_causal_attention(q: Tracked<C>, k: Tracked<C>, v: Tracked<C>) -> Tracked<C> {
        let (out, lse) = forward(q.primitive(), k.primitive(), v.primitive());
        let nodes = [q.node(), k.node(), v.node()];
        match AttentionBackward.prepare::<C>(nodes).compute_bound().stateful() {
            OpsKind::Tracked(mut prep) => {
                let qkv = [&q, &k, &v].map(|parent| prep.checkpoint(parent));
                prep.finish(Saved { qkv, out: out.clone(), lse }, out)
            }
            OpsKind::UnTracked(prep) => prep.finish(out),
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

fn shape_of(q: &FlexTensor, k: &FlexTensor, v: &FlexTensor) -> Shape {
    let [batch, seq, heads, head_dim] = q.layout().shape().dims();
    let kv_shape @ [_, _, kv_heads, _]: [usize; 4] = k.layout().shape().dims();
    assert!(
        kv_shape == v.layout().shape().dims() && kv_shape == [batch, seq, kv_heads, head_dim],
        "attention: q {:?}, k {kv_shape:?}, v {:?}",
        q.layout().shape(),
        v.layout().shape()
    );
    assert!(
        kv_heads > 0 && heads % kv_heads == 0,
        "attention: {heads} heads cannot share {kv_heads} key heads"
    );
    Shape { batch, seq, heads, kv_heads, head_dim }
}

/// The result and the logarithm of each row's sum, `[batch, seq, heads]`.
fn forward(q: &FlexTensor, k: &FlexTensor, v: &FlexTensor) -> (FlexTensor, FlexTensor) {
    let shape = shape_of(q, k, v);
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
