//! Tensors without values, and a tape of the operations on them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use super::ledger::{Held, Ledger, Owner};
use crate::ops::bf16_instructions;

/// Owner of values saved for backward, and of the temporary memory of operations.
pub const ACTIVATIONS: Owner = "activations";
/// Owner of logits, and of their gradients.
pub const LOGITS: Owner = "logits";
/// Owner of gradients of weights.
pub const GRADIENTS: Owner = "gradients";

/// A matrix of rows of activations that has a size and no values. Memory is held while any clone lives.
#[derive(Clone, Debug)]
pub struct MetaTensor {
    pub(super) memory: Rc<Held>,
    pub(super) width: u64,
    /// Index of the tensor on the tape, if it has a gradient.
    pub(super) node: Option<usize>,
}

impl MetaTensor {
    /// Returns the number of elements per row.
    pub fn width(&self) -> usize {
        self.width as usize
    }
}

/// The form in which matrix products read their operands.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Products {
    /// In place. On the CPU, transposed operands are copied.
    InPlace,
    /// As bf16, copied into the order that the processor's instructions need; results are f32.
    Packed,
    /// As copies in f32, with results in f32, on a processor without instructions for bf16.
    Widened,
}

impl Products {
    /// Returns how this process reads operands on the CPU, for activations of `element` bytes.
    pub fn on_host(element: usize) -> Self {
        match (element, bf16_instructions()) {
            (4, _) => Products::InPlace,
            (_, Some(_)) => Products::Packed,
            (_, None) => Products::Widened,
        }
    }
}

/// The batch of a pass, and how it is computed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MetaBatch {
    /// Number of sequences.
    pub batch: u64,
    /// Tokens per sequence.
    pub seq_len: u64,
    /// Bytes of an element of an activation.
    pub element: u64,
    /// True if the pass has dropout.
    pub dropout: bool,
    /// The form in which matrix products read their operands.
    pub products: Products,
    /// True if operations are those of the CPU, which copy operands to reorder them.
    pub on_host: bool,
}

impl MetaBatch {
    /// Returns the number of tokens.
    pub fn rows(self) -> u64 {
        self.batch.saturating_mul(self.seq_len)
    }
}

type Step<'a> = Box<dyn FnOnce(&MetaTape<'a>) + 'a>;

/// A tape of operations on [`MetaTensor`]s. Its ledger tracks the memory of the real operations: backward runs the
/// steps in reverse order, and each step frees the memory that was saved for it.
pub struct MetaTape<'a> {
    pub(super) ledger: Ledger,
    pub(super) batch: MetaBatch,
    records: Cell<bool>,
    trains: Cell<bool>,
    steps: RefCell<Vec<Step<'a>>>,
    gradients: RefCell<Vec<Option<Rc<Held>>>>,
    weight_gradients: RefCell<Vec<Held>>,
    undescribed: RefCell<BTreeSet<&'static str>>,
}

impl<'a> MetaTape<'a> {
    /// Creates a tape for passes over `batch`.
    pub fn new(ledger: Ledger, batch: MetaBatch) -> Self {
        MetaTape {
            ledger,
            batch,
            records: Cell::new(true),
            trains: Cell::new(true),
            steps: RefCell::default(),
            gradients: RefCell::default(),
            weight_gradients: RefCell::default(),
            undescribed: RefCell::default(),
        }
    }

    /// Returns the Rust type names of the layers so far that do not implement
    /// [`Layer::meta_forward`](crate::layers::Layer::meta_forward), whose memory is estimated from their parameters.
    pub fn undescribed(&self) -> BTreeSet<&'static str> {
        self.undescribed.borrow().clone()
    }

    pub(super) fn note_undescribed(&self, layer: &'static str) {
        self.undescribed.borrow_mut().insert(layer);
    }

    /// Returns the ledger, which contains the bytes held by each owner.
    pub fn ledger(&self) -> &Ledger {
        &self.ledger
    }

    /// Returns the batch.
    pub fn batch(&self) -> MetaBatch {
        self.batch
    }

    /// Sets whether the weights of the following layers are trained.
    pub fn set_trained(&self, trains: bool) {
        self.trains.set(trains);
    }

    pub(super) fn trains(&self) -> bool {
        self.records.get() && self.trains.get()
    }

    /// Returns a new tensor of `width` elements per token.
    pub fn tensor(&self, width: u64) -> MetaTensor {
        let bytes = self.batch.rows().saturating_mul(width).saturating_mul(self.batch.element);
        MetaTensor { memory: Rc::new(self.ledger.hold(ACTIVATIONS, bytes)), width, node: None }
    }

    /// Requests `bytes` of temporary memory for an operation.
    pub(super) fn scratch(&self, bytes: u64) -> Held {
        self.ledger.hold(ACTIVATIONS, bytes)
    }

    /// Puts `y` on the tape, if a parent is on it or weights are trained, and returns `y`. Backward calls `step` with
    /// the gradient of `y`, if there is one.
    pub(super) fn record(
        &self,
        mut y: MetaTensor,
        is_tracked: bool,
        step: impl FnOnce(&MetaTape<'a>, Rc<Held>) + 'a,
    ) -> MetaTensor {
        y.node = None;
        if self.records.get() && (is_tracked || self.trains.get()) {
            let node = self.new_node();
            y.node = Some(node);
            self.steps.borrow_mut().push(Box::new(move |tape| {
                if let Some(gradient) = tape.take_gradient(node) {
                    step(tape, gradient);
                }
            }));
        }
        y
    }

    /// Calls `step` when backward reaches this point.
    pub fn on_backward(&self, step: impl FnOnce(&MetaTape<'a>) + 'a) {
        if self.records.get() {
            self.steps.borrow_mut().push(Box::new(step));
        }
    }

    fn new_node(&self) -> usize {
        let mut gradients = self.gradients.borrow_mut();
        gradients.push(None);
        gradients.len() - 1
    }

    pub(super) fn take_gradient(&self, node: usize) -> Option<Rc<Held>> {
        self.gradients.borrow_mut()[node].take()
    }

    /// Registers a gradient of `x`, if `x` is on the tape. A second gradient is added to the first, in its memory.
    pub(super) fn register(&self, x: Option<usize>, gradient: Rc<Held>) {
        if let Some(node) = x {
            self.gradients.borrow_mut()[node].get_or_insert(gradient);
        }
    }

    /// Registers the gradient of a weight of `elements` elements. The gradient is held until the module is finished.
    pub(super) fn register_weight(&self, elements: u64) {
        let bytes = elements.saturating_mul(self.batch.element);
        self.keep_weight(self.ledger.hold(GRADIENTS, bytes));
    }

    pub(super) fn keep_weight(&self, gradient: Held) {
        self.weight_gradients.borrow_mut().push(gradient);
    }

    /// Takes the gradients of the weights of the modules that backward has finished.
    pub fn take_weight_gradients(&self) -> Vec<Held> {
        self.weight_gradients.take()
    }

    /// Runs backward from `loss`.
    pub fn backward(&self, loss: MetaTensor) {
        if let Some(node) = loss.node {
            self.gradients.borrow_mut()[node] = Some(loss.memory);
        }
        self.run_back_to(0);
    }

    fn run_back_to(&self, first: usize) {
        loop {
            let step = {
                let mut steps = self.steps.borrow_mut();
                if steps.len() > first { steps.pop() } else { None }
            };
            match step {
                Some(step) => step(self),
                None => break,
            }
        }
    }

    /// Returns `run(x)`, saving only `x` for backward, which calls `run` again (Chen et al., 2016).
    pub fn checkpoint(
        &self,
        x: MetaTensor,
        run: impl Fn(&MetaTape<'a>, MetaTensor, bool) -> MetaTensor + 'a,
    ) -> MetaTensor {
        let is_tracked = x.node.is_some();
        self.records.set(false);
        let y = run(self, MetaTensor { node: None, ..x.clone() }, false);
        self.records.set(true);
        self.record(y, is_tracked, move |tape, dy| {
            let first = tape.steps.borrow().len();
            let inner = MetaTensor { node: Some(tape.new_node()), ..x.clone() };
            let (parent, node) = (x.node, inner.node);
            // From here on, the second run's own tape holds the input.
            drop(x);
            let y = run(tape, inner, true);
            let out = y.node;
            drop(y);
            tape.register(out, dy);
            tape.run_back_to(first);
            if let Some(gradient) = node.and_then(|node| tape.take_gradient(node)) {
                tape.register(parent, gradient);
            }
        })
    }
}
