//! The place of an operation on burn's autodiff tape.

use burn::backend::autodiff::{Autodiff, NodeId, grads::Gradients, ops::Ops};
use burn::backend::{Backend, tensor::FloatTensor};

/// A float tensor of the differentiable form of backend `B` with checkpoint strategy `C`.
pub type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// The ids of the parents that are tracked.
pub fn parent_ids<S, const N: usize>(ops: &Ops<S, N>) -> [Option<NodeId>; N] {
    ops.parents.each_ref().map(|parent| parent.as_ref().map(|node| node.id))
}

/// Registers the gradients of the parents that are tracked.
pub fn register<B: Backend, const N: usize>(
    grads: &mut Gradients,
    parents: [Option<NodeId>; N],
    gradients: [Option<FloatTensor<B>>; N],
) {
    for (parent, gradient) in parents.into_iter().zip(gradients) {
        if let (Some(id), Some(gradient)) = (parent, gradient) {
            grads.register::<B>(id, gradient);
        }
    }
}
