//! What operations that read one input share in backward.

use std::any::Any;
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// What a backend has made of an input for the next gradient of a weight.
pub type Prepared = Option<Box<dyn Any + Send>>;

/// Held by all operations that read one input. Each enters it once, when its backward comes.
#[derive(Clone)]
pub struct SharedInput(Arc<Mutex<State>>);

/// The state that they share.
pub(super) struct State {
    /// Operations whose backward has not come yet.
    left: usize,
    /// Whether one of them has registered a gradient of the input: what the next one adds its own to.
    pub(super) has_gradient: bool,
    /// Gone when the last of them is through.
    pub(super) prepared: Prepared,
}

/// The state, for the operation whose backward it is.
pub(super) struct Entered<'a>(MutexGuard<'a, State>);

impl SharedInput {
    /// To be shared by `count` operations.
    pub(super) fn new(count: usize) -> Self {
        SharedInput(Arc::new(Mutex::new(State {
            left: count,
            has_gradient: false,
            prepared: None,
        })))
    }

    /// Counts down the operations that are still to come.
    pub(super) fn enter(&self) -> Entered<'_> {
        // Each statement leaves the state whole, so a panic elsewhere has not broken it.
        let mut state = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        state.left = state.left.saturating_sub(1);
        Entered(state)
    }
}

impl std::ops::Deref for Entered<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.0
    }
}

impl std::ops::DerefMut for Entered<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.0
    }
}

impl Drop for Entered<'_> {
    fn drop(&mut self) {
        if self.0.left == 0 {
            self.0.prepared = None;
        }
    }
}

impl fmt::Debug for SharedInput {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("SharedInput")
    }
}
