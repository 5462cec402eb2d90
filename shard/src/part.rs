//! A module whose weights come and go.

use std::ops::Deref;
use std::sync::Arc;

use burn::module::{Module, ModuleMapper, Param};
use burn::tensor::{Device, Tensor};
use kiln_collectives::Phase;

use crate::gather::{WeightRef, gather, order_token};
use crate::policy::Recompute;
use crate::recompute::{Body, Run, recompute};
use crate::runtime::Runtime;
use crate::unit::{Unit, Use};

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
    units: Vec<Arc<Unit>>,
    runtime: Arc<Runtime>,
}

/// Ties the reading of weights to a place on burn's tape.
pub struct Token {
    trainable: Tensor<1>,
    /// Frozen weights hang off a constant, so that no gradient of theirs is computed.
    frozen: Tensor<1>,
    phase: Phase,
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
        Token { trainable, frozen, phase: Phase::Forward }
    }

    /// A token for a part that reads `x`.
    pub fn from_input<const D: usize>(x: &Tensor<D>) -> Self {
        let device = x.device();
        if !x.is_tracked() {
            return Token::root(&device);
        }
        Token {
            trainable: order_token(x),
            frozen: Tensor::zeros([1], &device),
            phase: Phase::Forward,
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
    units: Vec<Arc<Unit>>,
    reshard: bool,
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
        for unit in self.units.iter().filter(|_| self.reshard) {
            unit.reshard_after_forward();
        }
    }
}

impl<M: Module + Sync + 'static> Part<M> {
    pub(crate) fn new(
        template: M,
        slots: Vec<(usize, usize)>,
        units: Vec<Arc<Unit>>,
        runtime: Arc<Runtime>,
    ) -> Self {
        Part { inner: Arc::new(Inner { template, slots, units, runtime }) }
    }

    /// The module with its weights in memory. If `token` is on the tape, so are the weights.
    pub fn unshard(&self, token: &Token) -> Unsharded<M> {
        if token.is_tracked() {
            self.open_use();
        }
        self.materialize(token, true)
    }

    /// `run(module, x)` with the weights in memory, run again in backward if the policy recomputes
    /// blocks. `run` must depend on nothing but its arguments and what it captured.
    pub fn run(
        &self,
        x: Tensor<3>,
        run: impl Fn(&M, Tensor<3>) -> Tensor<3> + Send + Sync + 'static,
    ) -> Tensor<3> {
        let token = Token::from_input(&x);
        // A frozen part before all trained ones has no backward.
        let has_backward = token.is_tracked() && (x.is_tracked() || self.has_trainable());
        if self.inner.runtime.policy.recompute == Recompute::None || !has_backward {
            let module = self.unshard(&token);
            return run(&module, x);
        }
        // Announced here, where the forward pass is; the second run adopts it.
        self.open_use();
        let part = self.clone();
        let body = Body(Arc::new(move |x, pass| {
            let token = Token::from_input(&x);
            match pass {
                Run::First => run(&part.materialize(&token, true), x),
                Run::Again => run(&part.materialize(&token.in_backward(), false), x),
            }
        }));
        recompute(x, token.trainable, body)
    }

    fn has_trainable(&self) -> bool {
        self.inner.units.iter().any(|unit| unit.layout.trainable)
    }

    fn open_use(&self) {
        for unit in self.inner.units.iter().filter(|unit| unit.layout.trainable) {
            unit.open_use();
        }
    }

    fn materialize(&self, token: &Token, reshard: bool) -> Unsharded<M> {
        let Inner { template, slots, units, .. } = &*self.inner;
        // All gathers of the part start before the first is waited for.
        for unit in units {
            unit.unshard(token.phase);
        }
        let uses = units.iter().map(|unit| unit.track_use()).collect();
        let mut weights = Weights { token, slots: slots.iter(), units, uses };
        Unsharded {
            module: Some(template.clone().map(&mut weights)),
            units: units.clone(),
            reshard,
        }
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
