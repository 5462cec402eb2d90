//! Tensors without values, and a tape of the operations on them.

use std::cell::{Cell, RefCell};
use std::collections::BTreeSet;
use std::rc::Rc;

use super::ledger::{Held, Ledger, Owner};
use crate::ops::bf16_instructions;

/// Owner of saved values, and of the temporary memory of operations.
pub const ACTIVATIONS: Owner = "activations";
/// Owner of logits and their gradients.
pub const LOGITS: Owner = "logits";
/// Owner of gradients of weights.
pub const GRADIENTS: Owner = "gradients";

/// Rows of activations with a size and no values. Memory is held while any clone lives.
#[derive(Clone, Debug)]
pub struct MetaTensor {
    pub(super) memory: Rc<Held>,
    pub(super) width: u64,
    /// Index of the tensor on the tape, if it has a gradient.
    pub(super) node: Option<usize>,
    /// Set if backward computes the tensor again where an operation would save it.
    pub(super) again: Option<Rc<Again>>,
}

impl MetaTensor {
    /// Returns the number of elements per row.
    pub fn width(&self) -> usize {
        self.width as usize
    }
}

/// A tensor that backward computes again from saved operands. The result is held until its last reader has it.
#[derive(Debug)]
pub(super) struct Again {
    operands: RefCell<Vec<Saved>>,
    result: RefCell<Option<MetaTensor>>,
    /// Number of operations that have saved the tensor and not read it yet.
    readers: Cell<usize>,
    width: u64,
    kind: Repeat,
}

/// The memory of a result that is computed again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Repeat {
    /// New memory.
    New,
    /// On the CPU, the memory of the operand if nothing else holds it; else new memory.
    InPlace,
    /// The memory of the operand.
    Same,
}

/// An operand that is saved for backward.
#[derive(Clone, Debug)]
pub(super) enum Saved {
    Held(MetaTensor),
    Again(Rc<Again>),
}

impl Saved {
    /// Returns the tensor, computing it again if it was not held.
    pub(super) fn take(self, tape: &MetaTape<'_>) -> MetaTensor {
        let again = match self {
            Saved::Held(x) => return x,
            Saved::Again(again) => again,
        };
        let readers = again.readers.get().saturating_sub(1);
        again.readers.set(readers);
        let result = again.result.take().unwrap_or_else(|| {
            let mut operands: Vec<_> =
                again.operands.take().into_iter().map(|saved| saved.take(tape)).collect();
            match (again.kind, operands.pop()) {
                (Repeat::Same, Some(x)) => x,
                (Repeat::InPlace, Some(x)) if tape.batch.on_host => tape.in_place(x),
                _ => tape.tensor(again.width),
            }
        });
        if readers > 0 {
            again.result.replace(Some(result.clone()));
        }
        result
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

/// Batch of a pass, and how it is computed.
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
    /// True if the CPU computes, which copies operands to reorder them.
    pub on_host: bool,
}

impl MetaBatch {
    /// Returns the number of tokens.
    pub fn rows(self) -> u64 {
        self.batch.saturating_mul(self.seq_len)
    }
}

type Step<'a> = Box<dyn FnOnce(&MetaTape<'a>) + 'a>;

/// A tape of operations on [`MetaTensor`]s. Backward runs the steps in reverse order, and each step frees its memory.
pub struct MetaTape<'a> {
    pub(super) ledger: Ledger,
    pub(super) batch: MetaBatch,
    records: Cell<bool>,
    trains: Cell<bool>,
    is_selective: Cell<bool>,
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
            is_selective: Cell::new(false),
            steps: RefCell::default(),
            gradients: RefCell::default(),
            weight_gradients: RefCell::default(),
            undescribed: RefCell::default(),
        }
    }

    /// Returns the type names of layers without [`Layer::meta_forward`](crate::layers::Layer::meta_forward), whose
    /// memory is estimated from their parameters.
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

    /// Sets whether the following weights are trained, and returns the previous setting.
    pub(super) fn replace_trained(&self, trains: bool) -> bool {
        self.trains.replace(trains)
    }

    /// Sets whether the following layers save operands of operations that are cheap to repeat instead of their results.
    pub fn set_selective(&self, is_selective: bool) {
        self.is_selective.set(is_selective);
    }

    /// Returns `y`, the result of a block, which the next block saves.
    pub fn block_output(&self, y: MetaTensor) -> MetaTensor {
        MetaTensor { again: None, ..y }
    }

    /// Returns `y`, the result of a cheap operation on `operands`, such that backward computes it again from them
    /// where it would be saved, if the pass is selective.
    pub(super) fn again<const N: usize>(
        &self,
        y: MetaTensor,
        operands: [&MetaTensor; N],
        kind: Repeat,
    ) -> MetaTensor {
        if !self.is_selective() || operands.iter().any(|x| x.node.is_none()) {
            return y;
        }
        let again = Again {
            operands: RefCell::new(operands.map(|x| self.save(x)).into()),
            result: RefCell::default(),
            readers: Cell::new(0),
            width: y.width,
            kind,
        };
        MetaTensor { again: Some(Rc::new(again)), ..y }
    }

    pub(super) fn is_selective(&self) -> bool {
        self.records.get() && self.is_selective.get()
    }

    /// Saves `x` for backward.
    pub(super) fn save(&self, x: &MetaTensor) -> Saved {
        match &x.again {
            Some(again) => {
                again.readers.set(again.readers.get() + 1);
                Saved::Again(again.clone())
            }
            None => Saved::Held(x.clone()),
        }
    }

    /// Returns the memory of `x` if nothing else holds it, else new memory of the same size.
    pub(super) fn in_place(&self, x: MetaTensor) -> MetaTensor {
        if Rc::strong_count(&x.memory) == 1 { x } else { self.tensor(x.width) }
    }

    pub(super) fn trains(&self) -> bool {
        self.records.get() && self.trains.get()
    }

    /// Returns a new tensor of `width` elements per token.
    pub fn tensor(&self, width: u64) -> MetaTensor {
        let bytes = self.batch.rows().saturating_mul(width).saturating_mul(self.batch.element);
        MetaTensor { memory: Rc::new(self.ledger.hold(ACTIVATIONS, bytes)), width, node: None, again: None }
    }

    /// Requests `bytes` of temporary memory for an operation.
    pub(super) fn scratch(&self, bytes: u64) -> Held {
        self.ledger.hold(ACTIVATIONS, bytes)
    }

    /// Puts `y` on the tape if it `is_tracked` or weights are trained. Backward calls `step` with the gradient of `y`,
    /// if any.
    pub(super) fn record(
        &self,
        mut y: MetaTensor,
        is_tracked: bool,
        step: impl FnOnce(&MetaTape<'a>, Rc<Held>) + 'a,
    ) -> MetaTensor {
        (y.node, y.again) = (None, None);
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

    /// Registers a gradient of `x`, if `x` is on the tape. Adds a second gradient in the memory of the first.
    pub(super) fn register(&self, x: Option<usize>, gradient: Rc<Held>) {
        if let Some(node) = x {
            self.gradients.borrow_mut()[node].get_or_insert(gradient);
        }
    }

    /// Registers the gradient of a weight, which is held until the module is finished.
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
        let y = run(self, MetaTensor { node: None, again: None, ..x.clone() }, false);
        self.records.set(true);
        self.record(y, is_tracked, move |tape, dy| {
            let first = tape.steps.borrow().len();
            let inner = MetaTensor { node: Some(tape.new_node()), again: None, ..x.clone() };
            let (parent, node) = (x.node, inner.node);
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
