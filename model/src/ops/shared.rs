//! State that operations on the same input share in backward.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

/// A form of the input that one operation's backward has prepared for later weight gradients.
pub type Prepared = Option<Box<dyn Any + Send>>;

/// The state shared by all operations that read one input. Each operation accesses it once, in backward.
#[derive(Clone)]
pub struct SharedInput(Arc<Mutex<State>>);

/// The contents of a [`SharedInput`].
pub(super) struct State {
    /// Number of operations whose backward has not run yet.
    left: usize,
    /// True if an operation has registered a gradient of the input, to which the next operation adds its own.
    pub(super) has_gradient: bool,
    /// The prepared input; dropped after the backward of the last operation.
    pub(super) prepared: Prepared,
}

impl SharedInput {
    /// Creates the state of an input that `count` operations read.
    pub(super) fn new(count: usize) -> Self {
        SharedInput(Arc::new(Mutex::new(State { left: count, has_gradient: false, prepared: None })))
    }

    /// Calls `backward`, the backward pass of one operation, with the state.
    pub(super) fn enter<R>(&self, backward: impl FnOnce(&mut State) -> R) -> R {
        // Each statement leaves the state valid, so it is valid after a panic.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.left = state.left.saturating_sub(1);
        let result = backward(&mut state);
        if state.left == 0 {
            state.prepared = None;
        }
        result
    }
}

impl fmt::Debug for SharedInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedInput")
    }
}
