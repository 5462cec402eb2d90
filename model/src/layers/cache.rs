//! The key-value cache, for generating one token at a time.

use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::Tensor;

/// Keys and values of every layer, so that a new token needs the work of one position instead of the whole sequence.
/// Clones share their contents.
///
/// A cache belongs to one sequence, or to one batch of sequences of equal length, and to one pass at a time. The
/// first write of a layer allocates memory for all positions: `2 · batch · capacity · kv_heads · head_dim` values,
/// and in a layer with a window `2 · batch · window · kv_heads · head_dim`.
#[derive(Clone, Debug)]
pub struct KeyValueCache {
    capacity: usize,
    state: Arc<Mutex<State>>,
}

#[derive(Debug, Default)]
struct State {
    /// Number of positions that all layers have written. Updated at the end of a pass, so that a block may run twice
    /// in a pass.
    filled: usize,
    /// Keys and values of each layer that has written.
    layers: Vec<Option<Held>>,
}

/// The keys and values of a layer, `[batch, rows, kv_heads, head_dim]`. Position `p` is in row `p % rows`. There is
/// one row per position of the cache or, in a layer with a window, per position of the window.
#[derive(Debug)]
struct Held {
    rows: [Tensor<4>; 2],
    /// Replaces `rows` at the end of a pass that still needs the old contents.
    next: Option<[Tensor<4>; 2]>,
}

/// A [`KeyValueCache`] has no room for the positions of a pass.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
#[error(
    "the key-value cache holds {filled} of at most {capacity} positions and has no room for {new} more: clear it, \
     or make it larger"
)]
pub struct CacheFull {
    /// Positions in the cache.
    pub filled: usize,
    /// Number of positions that the pass would add.
    pub new: usize,
    /// The largest number of positions.
    pub capacity: usize,
}

impl KeyValueCache {
    /// Creates an empty cache for at most `capacity` positions.
    pub fn new(capacity: usize) -> Self {
        KeyValueCache { capacity, state: Arc::default() }
    }

    /// Returns the maximum number of positions.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of positions in the cache, which is the position of the next token.
    pub fn len(&self) -> usize {
        self.state().filled
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all positions, but keeps the memory for later ones.
    pub fn clear(&self) {
        self.state().filled = 0;
    }

    /// Returns the size in bytes of the keys and values of all layers.
    pub fn num_bytes(&self) -> usize {
        let bytes = |tensor: &Tensor<4>| tensor.shape().num_elements() * tensor.dtype().size();
        let state = self.state();
        let held =
            state.layers.iter().flatten().flat_map(|held| held.rows.iter().chain(held.next.iter().flatten()));
        held.map(bytes).sum()
    }

    /// Fails unless `new` more positions fit.
    pub(crate) fn check_room(&self, new: usize) -> Result<(), CacheFull> {
        let (filled, capacity) = (self.len(), self.capacity);
        if new <= capacity - filled { Ok(()) } else { Err(CacheFull { filled, new, capacity }) }
    }

    /// Adds `positions` to the number of filled positions, at the end of a pass in which every layer has written.
    pub(crate) fn advance(&self, positions: usize) {
        let mut state = self.state();
        state.filled += positions;
        for held in state.layers.iter_mut().flatten() {
            if let Some(next) = held.next.take() {
                held.rows = next;
            }
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // A panic while the lock was held leaves a layer empty, which the next append detects.
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
    /// Returns the position of the first new token.
    pub fn position(&self) -> usize {
        self.cache.len()
    }

    /// Writes `keys` and `values` `[batch, seq, kv_heads, head_dim]` after the rows in the cache. Returns all keys
    /// and values of the layer, `[batch, capacity, kv_heads, head_dim]` each, of which the first
    /// [`position`](Self::position)` + seq` rows are filled.
    ///
    /// Writes in place if the tensors returned by earlier calls have been dropped, and into a copy otherwise.
    ///
    /// # Panics
    ///
    /// If the cache has no room, which [`decoder::next_logits`](crate::decoder::next_logits) checks, or if its rows
    /// have a different shape.
    pub fn append(&self, keys: Tensor<4>, values: Tensor<4>) -> (Tensor<4>, Tensor<4>) {
        let (keys, values, _) = self.append_in_window(keys, values, None);
        (keys, values)
    }

    /// Like [`append`](Self::append), for a layer in which a position attends to at most `window` positions: the
    /// cache keeps the last `window` rows, and drops earlier ones. Returns keys and values `[batch, rows, kv_heads,
    /// head_dim]`, and the number of filled rows, which are the first ones. The last `seq` of the filled rows are the
    /// new ones, in order, preceded by the rows that they attend to, as
    /// [`ops::cached_attention`](crate::ops::cached_attention) requires. A single new row attends to all filled rows,
    /// whose order does not matter.
    ///
    /// # Panics
    ///
    /// As [`append`](Self::append), or if the window is 0.
    pub fn append_in_window(
        &self,
        keys: Tensor<4>,
        values: Tensor<4>,
        window: Option<usize>,
    ) -> (Tensor<4>, Tensor<4>, usize) {
        assert!(window != Some(0), "cache: a window of 0 positions");
        let [batch, seq, kv_heads, head_dim] = keys.dims();
        let capacity = self.cache.capacity;
        let rows = window.map_or(capacity, |window| window.min(capacity));
        let shape = [batch, rows, kv_heads, head_dim];
        let mut state = self.cache.state();
        let (start, end) = (state.filled, state.filled + seq);
        assert!(end <= capacity, "cache: {end} of {capacity} positions");
        if state.layers.len() <= self.layer {
            state.layers.resize_with(self.layer + 1, || None);
        }
        let zeros = |like: &Tensor<4>| Tensor::zeros(shape, (&like.device(), like.dtype()));
        let fits = |held: &Held| held.rows[0].dims() == shape && held.rows[0].dtype() == keys.dtype();
        let Held { rows: held, .. } = state.layers[self.layer].take().filter(fits).unwrap_or_else(|| {
            assert_eq!(start, 0, "cache: layer {} holds no positions like {shape:?}", self.layer);
            Held { rows: [zeros(&keys), zeros(&values)], next: None }
        });
        let new = [keys, values];
        let (held, [keys, values], filled) = if end <= rows || seq == 1 {
            // No row attends to the overwritten rows any more.
            let [keys, values] = zip(held, new, |held, new| write(held, new, start));
            let held = Held { rows: [keys.clone(), values.clone()], next: None };
            (held, [keys, values], end.min(rows))
        } else if start == 0 {
            let held = zip(held, new.clone(), |held, new| write(held, new, start));
            (Held { rows: held, next: None }, new, seq)
        } else {
            let before = start.min(rows - 1);
            let seen = zip(held.clone(), new, |held, new| {
                Tensor::cat([read(&held, start - before..start), vec![new]].concat(), 1)
            });
            let next = seen.clone().map(|seen| write(zeros(&seen), seen, start - before));
            (Held { rows: held, next: Some(next) }, seen, before + seq)
        };
        state.layers[self.layer] = Some(held);
        (keys, values, filled)
    }
}

/// Applies `f` to the two tensors of keys, and to the two tensors of values.
fn zip(
    a: [Tensor<4>; 2],
    b: [Tensor<4>; 2],
    f: impl Fn(Tensor<4>, Tensor<4>) -> Tensor<4>,
) -> [Tensor<4>; 2] {
    let ([a_keys, a_values], [b_keys, b_values]) = (a, b);
    [f(a_keys, b_keys), f(a_values, b_values)]
}

/// Writes `new` to `held`, beginning at position `start`; position `p` is in row `p % rows`. If `new` has more rows
/// than fit, only the last ones are kept.
fn write(held: Tensor<4>, new: Tensor<4>, start: usize) -> Tensor<4> {
    let ([batch, rows, kv_heads, head_dim], [_, seq, ..]) = (held.dims(), new.dims());
    let kept = seq.min(rows);
    let mut written = seq - kept;
    let pieces = pieces(start + written..start + seq, rows);
    pieces.into_iter().fold(held, |held, piece| {
        let part = new.clone().narrow(1, written, piece.len());
        written += piece.len();
        held.slice_assign([0..batch, piece, 0..kv_heads, 0..head_dim], part)
    })
}

/// Returns the rows of `held` that contain `positions`; position `p` is in row `p % rows`.
fn read(held: &Tensor<4>, positions: Range<usize>) -> Vec<Tensor<4>> {
    let [_, rows, ..] = held.dims();
    let pieces = pieces(positions, rows).into_iter();
    pieces.map(|piece| held.clone().narrow(1, piece.start, piece.len())).collect()
}

/// Returns the ranges of rows that contain `positions`, in order. There must be at most `rows` positions.
fn pieces(positions: Range<usize>, rows: usize) -> Vec<Range<usize>> {
    let first = positions.start % rows;
    let before_end = positions.len().min(rows - first);
    let pieces = [first..first + before_end, 0..positions.len() - before_end];
    pieces.into_iter().filter(|piece| !piece.is_empty()).collect()
}
