//! Recording of operations on burn's autodiff tape.

use std::any::TypeId;
use std::cell::RefCell;
use std::collections::HashSet;
use std::fmt::{self, Debug};
use std::marker::PhantomData;

use burn::backend::autodiff::checkpoint::{
    base::Checkpointer,
    retro_forward::RetroForward,
    state::BackwardStates,
    strategy::{CheckpointStrategy, NoCheckpointing},
};
use burn::backend::autodiff::grads::Gradients;
use burn::backend::autodiff::ops::{Backward, NodeGuard, Ops, OpsKind};
use burn::backend::autodiff::{Autodiff, NodeId};
use burn::backend::{AutodiffBackend, Backend, tensor::FloatTensor};

/// A float tensor of `Autodiff<B, C>`, the differentiable form of backend `B` with checkpoint strategy `C`.
pub type Tracked<B, C> = FloatTensor<Autodiff<B, C>>;

/// Maximum number of weights that are marked at a time. A pass uses a weight right after it has marked it.
const MARKS: usize = 1 << 16;

thread_local! {
    static WITHOUT_GRADIENT: RefCell<HashSet<NodeId>> = RefCell::default();
}

/// Marks a tensor on the tape as a weight that is not trained: it is there only so that backward can compute it again,
/// for example by another gather. Operations of this thread that read it save it as usual, but do not compute its
/// gradient.
pub fn without_gradient(weight: NodeId) {
    WITHOUT_GRADIENT.with_borrow_mut(|marks| {
        // Forgetting a mark too early only costs time.
        if marks.len() == MARKS {
            marks.clear();
        }
        marks.insert(weight);
    });
}

/// Returns whether backward needs the gradient of `x`.
pub fn needs_gradient<B: Backend, C: CheckpointStrategy>(x: &Tracked<B, C>) -> bool {
    x.is_tracked() && WITHOUT_GRADIENT.with_borrow(|marks| marks.is_empty() || !marks.contains(&x.id()))
}

/// Returns `y` as a constant, the result of an operation on operands of which none needs a gradient.
pub fn constant<B: Backend, C: CheckpointStrategy>(y: FloatTensor<B>) -> Tracked<B, C> {
    Autodiff::<B, C>::from_inner(y)
}

/// Puts an operation with result `y` on the tape, with the nodes of its parents.
///
/// If a parent is tracked, `save` returns the state that backward needs; it can save a parent with the function
/// passed to it. `backward` receives the step, the gradient of `y` and the saved state, and registers the gradients
/// of the parents.
pub fn record<B: Backend, C: CheckpointStrategy, S, const N: usize>(
    parents: [NodeGuard; N],
    y: FloatTensor<B>,
    save: impl FnOnce(&mut dyn FnMut(&Tracked<B, C>) -> NodeId) -> S,
    backward: fn(Step<'_, N>, FloatTensor<B>, S),
) -> Tracked<B, C>
where
    S: Clone + Send + Debug + 'static,
{
    let prepared = Recorded::<B, S, N>(backward).prepare::<C>(parents).compute_bound().stateful();
    finish(prepared, y, save)
}

/// Returns true if backward computes the results of [`record_again`] again, instead of saving them.
pub fn recomputes<C: CheckpointStrategy>() -> bool {
    TypeId::of::<C>() != TypeId::of::<NoCheckpointing>()
}

/// Like [`record`], for an operation that is cheap compared with the memory of its result: where the strategy `C`
/// says so, an operation that saves `y` saves the parents of `y` instead, and backward computes `y` from them with
/// `again`, which must return the same bits.
pub fn record_again<B: Backend, C: CheckpointStrategy, S, const N: usize>(
    parents: [&Tracked<B, C>; N],
    y: FloatTensor<B>,
    again: impl Fn([FloatTensor<B>; N]) -> FloatTensor<B> + Send + 'static,
    save: impl FnOnce(&mut dyn FnMut(&Tracked<B, C>) -> NodeId) -> S,
    backward: fn(Step<'_, N>, FloatTensor<B>, S),
) -> Tracked<B, C>
where
    S: Clone + Send + Debug + 'static,
{
    let again = Again::<B, _, N> { parents: parents.map(|parent| parent.id()), again, backend: PhantomData };
    let prepared = Recorded::<B, S, N>(backward)
        .prepare::<C>(parents.map(|parent| parent.node()))
        .memory_bound()
        .retro_forward(again)
        .parents::<B, _>(parents)
        .stateful();
    finish(prepared, y, save)
}

fn finish<B: Backend, C: CheckpointStrategy, S, const N: usize>(
    prepared: OpsKind<Recorded<B, S, N>, B, S, C, N>,
    y: FloatTensor<B>,
    save: impl FnOnce(&mut dyn FnMut(&Tracked<B, C>) -> NodeId) -> S,
) -> Tracked<B, C>
where
    S: Clone + Send + Debug + 'static,
{
    match prepared {
        OpsKind::Tracked(mut prep) => {
            let saved = save(&mut |parent| prep.checkpoint(parent));
            prep.finish(saved, y)
        }
        OpsKind::UnTracked(prep) => prep.finish(y),
    }
}

/// Computes the result of an operation again.
struct Again<B, F, const N: usize> {
    parents: [NodeId; N],
    again: F,
    backend: PhantomData<fn() -> B>,
}

impl<B, F, const N: usize> Debug for Again<B, F, N> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("Again")
    }
}

impl<B: Backend, F, const N: usize> RetroForward for Again<B, F, N>
where
    F: Fn([FloatTensor<B>; N]) -> FloatTensor<B> + Send + 'static,
{
    fn forward(&self, states: &mut BackwardStates, out: NodeId) {
        let parents = self.parents.map(|parent| states.get_state::<FloatTensor<B>>(&parent));
        states.save(out, (self.again)(parents));
    }
}

/// The backward pass of one operation.
pub struct Step<'a, const N: usize> {
    ops: Ops<(), N>,
    grads: &'a mut Gradients,
    checkpointer: &'a mut Checkpointer,
}

impl<const N: usize> Step<'_, N> {
    /// Returns which parents are tracked.
    pub fn wanted(&self) -> [bool; N] {
        self.ops.parents.each_ref().map(Option::is_some)
    }

    /// Returns the value of a saved parent, recomputing the value if it was not stored.
    pub fn value<B: Backend>(&mut self, id: NodeId) -> FloatTensor<B> {
        self.checkpointer.retrieve_node_output(id)
    }

    /// Takes the registered gradient of a parent, so that the calling operation can add its own.
    pub fn take_gradient<B: Backend>(&mut self, parent: usize) -> Option<FloatTensor<B>> {
        self.ops.parents[parent].as_ref().map(|node| self.grads.consume::<B>(node))
    }

    /// Registers the gradient of a parent, if it is tracked.
    pub fn register<B: Backend>(&mut self, parent: usize, gradient: FloatTensor<B>) {
        if let Some(node) = &self.ops.parents[parent] {
            self.grads.register::<B>(node.id, gradient);
        }
    }

    /// Registers the gradients of all tracked parents.
    pub fn register_all<B: Backend>(&mut self, gradients: [Option<FloatTensor<B>>; N]) {
        for (parent, gradient) in gradients.into_iter().enumerate() {
            gradient.into_iter().for_each(|gradient| self.register::<B>(parent, gradient));
        }
    }
}

/// The backward pass of an operation, in the form that burn records.
#[derive(Debug)]
struct Recorded<B: Backend, S, const N: usize>(fn(Step<'_, N>, FloatTensor<B>, S));

impl<B: Backend, S: Clone + Send + Debug + 'static, const N: usize> Backward<B, N> for Recorded<B, S, N> {
    type State = S;

    fn backward(self, ops: Ops<S, N>, grads: &mut Gradients, checkpointer: &mut Checkpointer) {
        let dy = grads.consume::<B>(&ops.node);
        let Ops { parents, node, state } = ops;
        self.0(Step { ops: Ops { parents, node, state: () }, grads, checkpointer }, dy, state);
    }
}
