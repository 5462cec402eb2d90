//! A module whose weights come and go.

use std::ops::Deref;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use kiln_collectives::Phase;

use crate::boundary::{boundary_at_input, boundary_at_output};
use crate::error::ShardError;
use crate::gather::{WeightRef, gather, order_token};
use crate::policy::Recompute;
use crate::recompute::{BlockOutput, Body, Run, recompute};
use crate::runtime::Runtime;
use crate::unit::{Unit, Units, Use};

/// How a part is used.
#[derive(Clone, Copy, Debug)]
pub struct PartOptions {
    /// Whether the weights stay gathered from forward to backward by default: for the last part,
    /// which backward needs at once, and for one that forward uses twice.
    pub keep: bool,
    /// Whether backward reads the weights' values (an embedding's does not).
    pub weights_in_backward: bool,
}

impl Default for PartOptions {
    fn default() -> Self {
        PartOptions { keep: false, weights_in_backward: true }
    }
}

/// A module of type `M` whose parameters are sharded over the ranks. Cheap to clone.
pub struct Part<M> {
    inner: Arc<Inner<M>>,
}

impl<M> Clone for Part<M> {
    fn clone(&self) -> Self {
        Part { inner: self.inner.clone() }
    }
}

struct Inner<M> {
    /// The module with empty tensors in place of its parameters.
    template: M,
    /// Where each float parameter lies, in the order in which a [`ModuleMapper`] meets them:
    /// index into `units`, then slot.
    slots: Vec<(usize, usize)>,
    /// One unit for the trainable and one for the frozen parameters, where there are any.
    units: Units,
    runtime: Arc<Runtime>,
}

/// Ties the reading of weights to a place on burn's tape.
pub struct Token {
    trainable: Tensor<1>,
    /// Frozen weights hang off a constant, so that no gradient of theirs is computed.
    frozen: Tensor<1>,
    phase: Phase,
    /// The first unit of the part whose input this token is a child of, if backward leaves that part
    /// there; see [`Part::enter`].
    entered: Option<usize>,
}

impl Token {
    /// A token for a part that has no differentiable input, such as an embedding.
    pub(crate) fn root(device: &Device) -> Self {
        let frozen = Tensor::zeros([1], device);
        let trainable = if device.is_autodiff() {
            Tensor::zeros([1], device).require_grad()
        } else {
            frozen.clone()
        };
        Token { trainable, frozen, phase: Phase::Forward, entered: None }
    }

    /// A token for a part that reads `x`.
    pub fn from_input<const D: usize>(x: &Tensor<D>) -> Self {
        let device = x.device();
        if !x.is_tracked() {
            return Token::root(&device);
        }
        Token {
            trainable: order_token(x, Units::new()),
            frozen: Tensor::zeros([1], &device),
            phase: Phase::Forward,
            entered: None,
        }
    }

    /// A token below this one, where backward is done with `units`.
    fn leaving(&self, units: &[Arc<Unit>]) -> Self {
        Token {
            trainable: order_token(&self.trainable, units.to_vec()),
            frozen: self.frozen.clone(),
            phase: self.phase,
            entered: None,
        }
    }

    fn in_backward(self) -> Self {
        Token { phase: Phase::Backward, ..self }
    }

    fn is_tracked(&self) -> bool {
        self.trainable.is_tracked()
    }
}

/// A module with its weights in memory; derefs to it. Dropping it frees the weights, unless the
/// policy keeps them for backward.
pub struct Unsharded<M> {
    module: Option<M>,
    units: Units,
    after: After,
}

/// What becomes of weights when the module that reads them is dropped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum After {
    /// The policy decides, in forward.
    Forward {
        /// Whether burn's tape may hold them until backward.
        tape: bool,
    },
    /// Backward frees them when it leaves the part.
    Backward,
}

impl<M> Deref for Unsharded<M> {
    type Target = M;

    fn deref(&self) -> &M {
        match &self.module {
            Some(module) => module,
            None => unreachable!("invariant: the module is taken in drop only"),
        }
    }
}

impl<M> Drop for Unsharded<M> {
    fn drop(&mut self) {
        // The module's tensors are views: they must go before the weights can.
        self.module = None;
        if let After::Forward { tape } = self.after {
            self.units.iter().for_each(|unit| unit.reshard_after_forward(tape));
        }
    }
}

impl<M: Module + Sync + 'static> Part<M> {
    pub(crate) fn new(
        template: M,
        slots: Vec<(usize, usize)>,
        units: Units,
        runtime: Arc<Runtime>,
    ) -> Self {
        Part { inner: Arc::new(Inner { template, slots, units, runtime }) }
    }

    /// `x`, and the token for this part to read it with: backward is done with the part when it comes
    /// to `x`, on every rank at the same place among its collectives, whatever the batch has reached
    /// of the part.
    pub fn enter<const D: usize>(&self, x: Tensor<D>) -> (Tensor<D>, Token) {
        let units = self.inner.units.clone();
        let entered = units.first().map(|unit| unit.position);
        if !x.is_tracked() {
            // Nothing before this part is trained, so backward ends at the token.
            let token = Token::root(&x.device()).leaving(&units);
            return (x, Token { entered, ..token });
        }
        let x = boundary_at_input(x, units);
        let token = Token { entered, ..Token::from_input(&x) };
        (x, token)
    }

    /// The module with its weights in memory. If `token` is on the tape, so are the weights. Unless
    /// the token is that of [`Part::enter`], backward is done with the part when it has the
    /// gradients of the weights that the batch has reached; on a rank where it has reached none, at
    /// its end.
    pub fn unshard(&self, token: &Token) -> Unsharded<M> {
        let after = After::Forward { tape: token.is_tracked() };
        if !token.is_tracked() {
            return self.materialize(token, after);
        }
        self.open_use();
        let first = self.inner.units.first().map(|unit| unit.position);
        if token.entered.is_some() && token.entered == first {
            self.materialize(token, after)
        } else {
            self.materialize(&token.leaving(&self.inner.units), after)
        }
    }

    /// `run(module, x)` with the weights in memory, run again in backward if the policy recomputes
    /// blocks: `x` `[batch, seq, d_model]` to the same shape, and a loss `[1]` that the module adds.
    /// `run` must depend on nothing but its arguments and what it captured. Tensors that leave it in
    /// another way are not differentiated where blocks are recomputed.
    ///
    /// Where they are, captured tensors must need no gradient: backward would not reach them.
    /// Otherwise [`Engine::check`](crate::Engine::check) returns [`ShardError::Captured`].
    pub fn run(
        &self,
        x: Tensor<3>,
        run: impl Fn(&M, Tensor<3>) -> BlockOutput + Send + Sync + 'static,
    ) -> BlockOutput {
        // A frozen part before all trained ones has no backward.
        let goes_on = x.is_tracked();
        let is_trained = x.device().is_autodiff() && self.has_trainable();
        if !goes_on && !is_trained {
            let after = After::Forward { tape: false };
            return run(&self.materialize(&Token::from_input(&x), after), x);
        }
        let (x, token) = self.enter(x);
        let (y, loss) = if self.inner.runtime.policy.recompute == Recompute::None {
            run(&self.unshard(&token), x)
        } else {
            self.run_twice(x, &token, run)
        };
        let units = self.inner.units.clone();
        (boundary_at_output(y, &token.trainable, units, goes_on), loss)
    }

    /// [`Part::run`] in forward, and again in backward.
    fn run_twice(
        &self,
        x: Tensor<3>,
        token: &Token,
        run: impl Fn(&M, Tensor<3>) -> BlockOutput + Send + Sync + 'static,
    ) -> BlockOutput {
        // Announced here, where the forward pass is; the second run adopts it.
        self.open_use();
        let part = self.clone();
        let body = Body::new(move |x, pass| {
            let token = Token::from_input(&x);
            match pass {
                Run::First => {
                    let module = part.materialize(&token, After::Forward { tape: false });
                    let (y, loss) = run(&module, x.clone());
                    if y.is_tracked() || loss.as_ref().is_some_and(Tensor::is_tracked) {
                        part.fail_captured();
                        return (x, None);
                    }
                    // A captured constant may be one of the tape's device.
                    (y.without_autodiff(), loss.map(Tensor::without_autodiff))
                }
                Run::Again => run(&part.materialize(&token.in_backward(), After::Backward), x),
            }
        });
        recompute(x, token.trainable.clone(), body)
    }

    fn fail_captured(&self) {
        let unit = self.inner.units.first().map(|unit| unit.layout.name.clone());
        let unit = unit.unwrap_or_default();
        self.inner.runtime.fail(ShardError::Captured { unit });
    }

    fn has_trainable(&self) -> bool {
        self.inner.units.iter().any(|unit| unit.layout.trainable)
    }

    fn open_use(&self) {
        for unit in self.inner.units.iter().filter(|unit| unit.layout.trainable) {
            unit.open_use();
        }
    }

    fn materialize(&self, token: &Token, after: After) -> Unsharded<M> {
        let Inner { template, slots, units, .. } = &*self.inner;
        // All gathers of the part start before the first is waited for.
        for unit in units {
            unit.unshard(token.phase);
        }
        let uses = units.iter().map(|_| Arc::default()).collect();
        let mut weights = Weights { token, slots: slots.iter(), units, uses };
        Unsharded { module: Some(template.clone().map(&mut weights)), units: units.clone(), after }
    }
}

/// Replaces the placeholders of a template by gathered weights.
struct Weights<'a> {
    token: &'a Token,
    slots: std::slice::Iter<'a, (usize, usize)>,
    units: &'a [Arc<Unit>],
    uses: Vec<Arc<Use>>,
}

impl ModuleMapper for Weights<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(&(index, slot)) = self.slots.next() else {
            unreachable!("invariant: a template has the parameters it was made from");
        };
        let unit = &self.units[index];
        let token = if unit.layout.trainable { &self.token.trainable } else { &self.token.frozen };
        let weight = WeightRef {
            unit: unit.clone(),
            slot,
            phase: self.token.phase,
            from: self.uses[index].clone(),
        };
        Param::initialized(param.id, gather(token, weight))
    }
}
