//! The cache of keys and values, for text that grows token by token.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;

/// Keys and values of every layer, so that a new token takes the work of one row instead of the whole
/// sequence. Clones share their contents.
///
/// A cache belongs to one sequence, or to one batch of sequences of equal length, and to one pass at a time.
/// The first write of a layer allocates memory for all positions: `2 · layers · batch · capacity · kv_heads ·
/// head_dim` values.
#[derive(Clone, Debug)]
pub struct KeyValueCache {
    capacity: usize,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of positions that all layers have written. It grows at the end of a pass, so that a block may
    /// run twice.
    filled: usize,
    /// Keys and values of each layer that has written, `[batch, capacity, kv_heads, head_dim]`.
    layers: Vec<Option<[Tensor<4>; 2]>>,
}

/// More positions than a [`KeyValueCache`] has room for.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the key-value cache holds {filled} of at most {capacity} positions and has no room for {new} more: clear it, \
     or make it larger"
)]
pub struct CacheFull {
    /// Positions in the cache.
    pub filled: usize,
    /// Positions of the pass that does not fit.
    pub new: usize,
    /// The largest number of positions.
    pub capacity: usize,
}

impl KeyValueCache {
    /// An empty cache for at most `capacity` positions.
    pub fn new(capacity: usize) -> Self {
        KeyValueCache { capacity, state: Arc::default() }
    }

    /// The largest number of positions.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Number of positions in the cache, which is the position of the next token.
    pub fn len(&self) -> usize {
        self.state().filled
    }

    /// Whether no position is in the cache.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Forgets all positions. The memory is kept for the next ones.
    pub fn clear(&self) {
        self.state().filled = 0;
    }

    /// Fails unless `new` more positions fit.
    pub(crate) fn check_room(&self, new: usize) -> Result<(), CacheFull> {
        let (filled, capacity) = (self.len(), self.capacity);
        if new <= capacity - filled { Ok(()) } else { Err(CacheFull { filled, new, capacity }) }
    }

    /// Counts the positions of a pass in which every layer has written.
    pub(crate) fn advance(&self, positions: usize) {
        self.state().filled += positions;
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held leaves a layer empty, and the next append notices that.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The keys and values of one layer in a [`KeyValueCache`].
#[derive(Clone, Debug)]
pub struct LayerCache {
    pub(super) cache: KeyValueCache,
    pub(super) layer: usize,
}

impl LayerCache {
    /// The position of the first new token.
    pub fn position(&self) -> usize {
        self.cache.len()
    }

    /// Writes `keys` and `values` `[batch, seq, kv_heads, head_dim]` after the rows in the cache. Returns all
    /// keys and values of the layer, `[batch, capacity, kv_heads, head_dim]` each, of which the first
    /// [`position`](Self::position)` + seq` rows are filled.
    ///
    /// Writes in place if the tensors that were returned before have been dropped, and into a copy otherwise.
    ///
    /// # Panics
    ///
    /// If the cache has no room, which [`decoder::next_logits`](crate::decoder::next_logits) checks, or if
    /// its rows have another shape.
    pub fn append(&self, keys: Tensor<4>, values: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let [batch, seq, kv_heads, head_dim] = keys.dims();
        let shape = [batch, self.cache.capacity, kv_heads, head_dim];
        let mut state = self.cache.state();
        let (start, end) = (state.filled, state.filled + seq);
        assert!(end <= self.cache.capacity, "cache: {end} of {} positions", self.cache.capacity);
        if state.layers.len() <= self.layer {
            state.layers.resize_with(self.layer + 1, || None);
        }
        let fits = |held: &[Tensor<4>; 2]| held[0].dims() == shape && held[0].dtype() == keys.dtype();
        let held = state.layers[self.layer].take().filter(fits).unwrap_or_else(|| {
            assert_eq!(start, 0, "cache: layer {} holds no positions like {shape:?}", self.layer);
            let zeros = || Tensor::zeros(shape, (&keys.device(), keys.dtype()));
            [zeros(), zeros()]
        });
        let rows = [0..batch, start..end, 0..kv_heads, 0..head_dim];
        let [held_keys, held_values] = held;
        let keys = held_keys.slice_assign(rows.clone(), keys);
        let values = held_values.slice_assign(rows, values);
        state.layers[self.layer] = Some([keys.clone(), values.clone()]);
        (keys, values)
    }
}
