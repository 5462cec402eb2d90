//! Puts custom operations on burn's tape.

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::strategy::CheckpointStrategy,
    ops::{Backward, NodeGuard, OpsKind},
};
use burn::backend::{Backend, tensor::FloatTensor};

/// A tensor of backend `B` that may be on the tape.
pub(super) type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Returns `out`, the result of `operation` on `parents`. If a parent is on the tape, `out` is too, and backward
/// receives `state`.
pub(super) fn on_tape<B: Backend, C: CheckpointStrategy, O: Backward<B, N>, const N: usize>(
    operation: O,
    parents: [NodeGuard; N],
    state: O::State,
    out: FloatTensor<B>,
) -> Tracked<B, C> {
    match operation.prepare::<C>(parents).compute_bound().stateful() {
        OpsKind::Tracked(prepared) => prepared.finish(state, out),
        OpsKind::UnTracked(prepared) => prepared.finish(out),
    }
}
