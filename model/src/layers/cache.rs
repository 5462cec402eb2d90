//! The state of layers between passes, for generating one token at a time.

use std::any::Any;
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use burn::tensor::{Int, Tensor, TensorData};

use super::side_channel::inner_place;

/// State of every layer, such as its keys and values, so that a new token needs the work of one position instead of
/// the whole sequence. Clones share their contents.
///
/// A cache belongs to one sequence, or to one batch of sequences of equal length, and to one pass at a time. The
/// first append under a name allocates memory for all positions: in built-in attention
/// `2 · batch · capacity · kv_heads · head_dim` values, and with a window `2 · batch · window · kv_heads · head_dim`.
#[derive(Clone, Debug)]
pub struct KeyValueCache {
    capacity: usize,
    contents: Arc<Mutex<Contents>>,
}

#[derive(Debug, Default)]
struct Contents {
    /// Number of positions that all layers have written. Updated at the end of a pass, so that a block may run twice
    /// in a pass.
    filled: usize,
    /// Number of runs of modules so far.
    runs: u64,
    /// Tensors `[batch, rows, ...]`, by place and name. Position `p` is in row `p % rows`. There is one row per
    /// position of the cache or, in a layer with a window, per position of the window.
    rows: BTreeMap<String, Slot>,
    /// States, by place and name.
    states: BTreeMap<String, Slot>,
}

/// The contents of the cache under one name.
#[derive(Debug, Default)]
struct Slot {
    now: Option<Held>,
    /// Replaces `now` at the end of a pass that still needs the old contents.
    next: Option<Held>,
    /// The last run of a module that wrote here.
    written_in: Option<u64>,
}

/// A tensor of any number of dimensions, the first of which is the batch.
#[derive(Debug)]
struct Held {
    tensor: Box<dyn Any + Send>,
    bytes: usize,
    /// Returns the rows of the batch with these indices, given a tensor like this one.
    select: fn(Self, &[i32]) -> Self,
}

impl Held {
    fn new<const D: usize>(tensor: Tensor<D>) -> Self {
        let bytes = tensor.shape().num_elements() * tensor.dtype().size();
        Held { tensor: Box::new(tensor), bytes, select: Self::select::<D> }
    }

    fn select<const D: usize>(self, sequences: &[i32]) -> Self {
        let Some(tensor) = self.take::<D>() else {
            unreachable!("invariant: `new` chose this function for a tensor of {D} dimensions")
        };
        let batch = tensor.dims()[0];
        let exist = sequences.iter().all(|sequence| usize::try_from(*sequence).is_ok_and(|s| s < batch));
        assert!(exist, "cache: sequences {sequences:?} of {batch}");
        let indices = TensorData::new(sequences.to_vec(), [sequences.len()]);
        let indices = Tensor::<1, Int>::from_data(indices, &tensor.device());
        Held::new(tensor.select(0, indices))
    }

    /// Returns the tensor, if it has `D` dimensions.
    fn get<const D: usize>(&self) -> Option<Tensor<D>> {
        self.tensor.downcast_ref().cloned()
    }

    /// Returns the tensor, if it has `D` dimensions, and keeps no reference to it.
    fn take<const D: usize>(self) -> Option<Tensor<D>> {
        self.tensor.downcast().ok().map(|tensor| *tensor)
    }
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
        KeyValueCache { capacity, contents: Arc::default() }
    }

    /// Returns the maximum number of positions.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Returns the number of positions in the cache, which is the position of the next token.
    pub fn len(&self) -> usize {
        self.lock().filled
    }

    /// Returns whether the cache is empty.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes all positions, but keeps the memory for later ones, and forgets all states.
    pub fn clear(&self) {
        let mut contents = self.lock();
        contents.filled = 0;
        contents.states.clear();
    }

    /// Replaces the sequences by those with these indices, in this order. A sequence that occurs several times is
    /// copied, and one that does not occur is dropped. Rows and states must have a sequence for each index of their
    /// first dimension. Between passes only.
    ///
    /// # Panics
    ///
    /// If there is no sequence with one of the indices.
    pub fn select(&self, sequences: &[usize]) {
        // An index that does not fit is refused as one without a sequence.
        let sequences: Vec<_> =
            sequences.iter().map(|sequence| i32::try_from(*sequence).unwrap_or(-1)).collect();
        let mut contents = self.lock();
        let Contents { rows, states, .. } = &mut *contents;
        for slot in rows.values_mut().chain(states.values_mut()) {
            slot.now = slot.now.take().map(|held| (held.select)(held, &sequences));
        }
    }

    /// Returns the size in bytes of the rows and states of all layers.
    pub fn num_bytes(&self) -> usize {
        let contents = self.lock();
        let slots = contents.rows.values().chain(contents.states.values());
        slots.flat_map(|slot| slot.now.iter().chain(&slot.next)).map(|held| held.bytes).sum()
    }

    /// Fails unless `new` more positions fit.
    pub(crate) fn check_room(&self, new: usize) -> Result<(), CacheFull> {
        let (filled, capacity) = (self.len(), self.capacity);
        if new <= capacity - filled { Ok(()) } else { Err(CacheFull { filled, new, capacity }) }
    }

    /// Adds `positions` to the number of filled positions, at the end of a pass in which every layer has written.
    /// States written in the pass take effect.
    pub(crate) fn advance(&self, positions: usize) {
        let mut contents = self.lock();
        let Contents { filled, rows, states, .. } = &mut *contents;
        *filled += positions;
        for slot in rows.values_mut().chain(states.values_mut()) {
            if let Some(next) = slot.next.take() {
                slot.now = Some(next);
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Contents> {
        // A panic while the lock was held leaves a slot empty, which the next append detects.
        self.contents.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The part of a [`KeyValueCache`] that belongs to one place in the model, such as `layers.3.attention`.
/// [`Context::fork`](super::Context::fork) gives each layer of a block a separate place, and each place has separate
/// names. Rows may have the name of a state.
///
/// ```
/// use burn::module::Module;
/// use burn::tensor::Tensor;
/// use kiln_model::layers::{Context, Layer};
///
/// /// Adds the previous position to each position.
/// #[derive(Module, Debug)]
/// struct Shift {}
///
/// impl Layer for Shift {
///     fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
///         let [batch, seq, d_model] = x.dims();
///         let first = || Tensor::<3>::zeros([batch, 1, d_model], &x.device());
///         let before = context.cache().map_or_else(first, |cache| cache.state("last", first));
///         if let Some(cache) = context.cache() {
///             cache.set_state("last", x.clone().narrow(1, seq - 1, 1));
///         }
///         let shifted = Tensor::cat(vec![before, x.clone()], 1).narrow(1, 0, seq);
///         x + shifted
///     }
/// }
/// ```
#[derive(Clone, Debug)]
pub struct LayerCache {
    cache: KeyValueCache,
    place: String,
    run: u64,
}

impl LayerCache {
    pub(super) fn new(cache: KeyValueCache) -> Self {
        LayerCache { cache, place: String::new(), run: 0 }
    }

    /// Returns the cache of `place` within this place.
    pub(super) fn at(&self, place: &str) -> Self {
        LayerCache { place: inner_place(&self.place, place), ..self.clone() }
    }

    /// Returns this cache for a new run of a module.
    pub(super) fn for_one_run(&self) -> Self {
        let mut contents = self.cache.lock();
        contents.runs += 1;
        LayerCache { run: contents.runs, ..self.clone() }
    }

    /// Returns the position of the first new token.
    pub fn position(&self) -> usize {
        self.cache.len()
    }

    /// Returns the state `name` of the layer before this pass. At the first position of a sequence, returns
    /// `initial()`.
    ///
    /// # Panics
    ///
    /// If earlier passes over the sequence have set no such state, or one with another number of dimensions.
    pub fn state<const D: usize>(&self, name: &str, initial: impl FnOnce() -> Tensor<D>) -> Tensor<D> {
        let position = self.position();
        if position == 0 {
            return initial();
        }
        let key = self.key(name);
        let contents = self.cache.lock();
        match contents.states.get(&key).and_then(|slot| slot.now.as_ref()?.get()) {
            Some(state) => state,
            None => panic!("cache: no state `{key}` of {D} dimensions after {position} positions"),
        }
    }

    /// Sets the state `name` of the layer after this pass: a tensor of any shape that begins with the batch, such as
    /// `[batch, heads, head_dim, head_dim]`. It takes effect at the end of the pass, because a block may run twice in a
    /// pass, and stays until another pass sets it.
    ///
    /// # Panics
    ///
    /// If the shape of the state changes within a sequence, or if another layer at this place has set `name` in this
    /// pass.
    pub fn set_state<const D: usize>(&self, name: &str, state: Tensor<D>) {
        let key = self.key(name);
        let mut contents = self.cache.lock();
        let Contents { filled, states, .. } = &mut *contents;
        let slot = self.slot(states, &key);
        let fits = |held: &Held| held.get().is_some_and(|held: Tensor<D>| held.dims() == state.dims());
        let fits = *filled == 0 || slot.now.as_ref().is_some_and(fits);
        assert!(fits, "cache: the state `{key}` was not {:?} before", state.dims());
        slot.next = Some(Held::new(state));
    }

    /// Writes `x` `[batch, seq, ...]` after the rows that earlier passes have appended under `name`. Returns all rows,
    /// `[batch, `[`position`](Self::position)` + seq, ...]`.
    ///
    /// Writes in place if the tensors returned by earlier calls have been dropped, and into a copy otherwise.
    ///
    /// # Panics
    ///
    /// If the cache has no room, which [`decoder::next_logits`](crate::decoder::next_logits) checks, if its rows
    /// have a different shape, or if another layer at this place has appended to `name` in this pass.
    pub fn append<const D: usize>(&self, name: &str, x: Tensor<D>) -> Tensor<D> {
        let (rows, filled) = self.append_in_window(name, x, None);
        rows.narrow(1, 0, filled)
    }

    /// Like [`append`](Self::append), for a layer in which a position depends on at most `window` positions: the
    /// cache keeps the last `window` rows, and drops earlier ones. Returns rows `[batch, rows, ...]` and the number
    /// of filled rows, which are the first ones. The last `seq` of the filled rows are the new ones, in order,
    /// preceded by the rows that they attend to, as [`ops::cached_attention`](crate::ops::cached_attention)
    /// requires. A single new row attends to all filled rows, whose order does not matter.
    ///
    /// # Panics
    ///
    /// As [`append`](Self::append), or if the window is 0.
    pub fn append_in_window<const D: usize>(
        &self,
        name: &str,
        x: Tensor<D>,
        window: Option<usize>,
    ) -> (Tensor<D>, usize) {
        const { assert!(D >= 2, "cache: rows without a dimension of positions") };
        assert!(window != Some(0), "cache: a window of 0 positions");
        let key = self.key(name);
        let capacity = self.cache.capacity;
        let rows = window.map_or(capacity, |window| window.min(capacity));
        let mut shape = x.dims();
        let seq = std::mem::replace(&mut shape[1], rows);
        let mut contents = self.cache.lock();
        let (start, end) = (contents.filled, contents.filled + seq);
        assert!(end <= capacity, "cache: {end} of {capacity} positions");
        let slot = self.slot(&mut contents.rows, &key);
        let zeros = || Tensor::<D>::zeros(shape, (&x.device(), x.dtype()));
        let fits = |held: &Tensor<D>| held.dims() == shape && held.dtype() == x.dtype();
        let held = slot.now.take().and_then(Held::take).filter(fits).unwrap_or_else(|| {
            assert_eq!(start, 0, "cache: `{key}` holds no positions like {shape:?}");
            zeros()
        });
        let (now, next, result, filled);
        if end <= rows || seq == 1 {
            // No row attends to the overwritten rows any more.
            now = write(held, x, start);
            (next, result, filled) = (None, now.clone(), end.min(rows));
        } else if start == 0 {
            now = write(held, x.clone(), start);
            (next, result, filled) = (None, x, seq);
        } else {
            let before = start.min(rows - 1);
            let empty = zeros();
            result = Tensor::cat([read(&held, start - before..start), vec![x]].concat(), 1);
            next = Some(Held::new(write(empty, result.clone(), start - before)));
            (now, filled) = (held, before + seq);
        }
        (slot.now, slot.next) = (Some(Held::new(now)), next);
        (result, filled)
    }

    fn key(&self, name: &str) -> String {
        inner_place(&self.place, name)
    }

    /// Returns the slot `key`, for the only write of this run.
    fn slot<'a>(&self, slots: &'a mut BTreeMap<String, Slot>, key: &str) -> &'a mut Slot {
        let slot = slots.entry(key.to_owned()).or_default();
        let earlier = slot.written_in.replace(self.run);
        assert!(
            earlier != Some(self.run),
            "cache: two layers write `{key}` in one pass: give each a separate context with `Context::fork`"
        );
        slot
    }
}

/// Writes `new` to `held`, beginning at position `start`; position `p` is in row `p % rows`. If `new` has more rows
/// than fit, only the last ones are kept.
fn write<const D: usize>(held: Tensor<D>, new: Tensor<D>, start: usize) -> Tensor<D> {
    let (shape, seq) = (held.dims(), new.dims()[1]);
    let kept = seq.min(shape[1]);
    let mut written = seq - kept;
    let pieces = pieces(start + written..start + seq, shape[1]);
    pieces.into_iter().fold(held, |held, piece| {
        let part = new.clone().narrow(1, written, piece.len());
        written += piece.len();
        let mut ranges = shape.map(|length| 0..length);
        ranges[1] = piece;
        held.slice_assign(ranges, part)
    })
}

/// Returns the rows of `held` that contain `positions`; position `p` is in row `p % rows`.
fn read<const D: usize>(held: &Tensor<D>, positions: Range<usize>) -> Vec<Tensor<D>> {
    let pieces = pieces(positions, held.dims()[1]).into_iter();
    pieces.map(|piece| held.clone().narrow(1, piece.start, piece.len())).collect()
}

/// Returns the ranges of rows that contain `positions`, in order. There must be at most `rows` positions.
fn pieces(positions: Range<usize>, rows: usize) -> Vec<Range<usize>> {
    let first = positions.start % rows;
    let before_end = positions.len().min(rows - first);
    let pieces = [first..first + before_end, 0..positions.len() - before_end];
    pieces.into_iter().filter(|piece| !piece.is_empty()).collect()
}

#[cfg(test)]
mod tests {
    use burn::tensor::{Device, TensorData};

    use super::KeyValueCache;
    use crate::layers::{Context, LayerCache};

    type Tensor<const D: usize> = burn::tensor::Tensor<D>;

    /// Returns the cache of one run of a layer.
    fn run_at(cache: &KeyValueCache, place: &str) -> LayerCache {
        let context = Context::decoding(cache.clone()).at_layer(3).for_one_run().fork(place);
        context.cache().expect("a pass with a cache").clone()
    }

    /// Returns a tensor of consecutive numbers from `first`.
    fn numbers<const D: usize>(shape: [usize; D], first: usize) -> Tensor<D> {
        let count: usize = shape.iter().product();
        let values: Vec<f32> = (first..first + count).map(|value| value as f32).collect();
        Tensor::from_data(TensorData::new(values, shape), &Device::flex())
    }

    fn equal<const D: usize>(a: Tensor<D>, b: Tensor<D>) -> bool {
        a.into_data() == b.into_data()
    }

    #[test]
    fn a_state_changes_at_the_end_of_the_pass() {
        let cache = KeyValueCache::new(8);
        let add_ten = || {
            let layer = run_at(&cache, "attention");
            let before = layer.state("sum", || numbers([2, 3], 0));
            layer.set_state("sum", before.clone() + 10.0);
            before
        };
        let initial = numbers([2, 3], 0);
        for pass in 0..3 {
            // As when blocks are recomputed.
            for _ in 0..2 {
                assert!(equal(add_ten(), initial.clone() + 10.0 * pass as f32));
            }
            cache.advance(2);
            assert_eq!(cache.num_bytes(), 4 * 2 * 3);
        }
        cache.clear();
        assert_eq!(cache.num_bytes(), 0);
        assert!(equal(add_ten(), initial));
    }

    #[test]
    fn rows_of_any_rank_follow_each_other() {
        let cache = KeyValueCache::new(5);
        let (flat, deep) = (numbers([1, 5], 0), numbers([1, 5, 2, 1, 3], 7));
        let mut filled = 0;
        for seq in [2, 1, 2] {
            let layer = run_at(&cache, "attention");
            let all = layer.append("flat", flat.clone().narrow(1, filled, seq));
            let in_window = layer.append_in_window("deep", deep.clone().narrow(1, filled, seq), Some(3));
            filled += seq;
            assert!(equal(all, flat.clone().narrow(1, 0, filled)));
            let (rows, of_window) = in_window;
            let newest = rows.narrow(1, of_window - seq, seq);
            assert!(seq == 1 || equal(newest, deep.clone().narrow(1, filled - seq, seq)));
            cache.advance(seq);
        }
        assert_eq!(cache.num_bytes(), 4 * (5 + 3 * 2 * 3));
    }

    #[test]
    fn each_place_has_separate_names() {
        let cache = KeyValueCache::new(4);
        let layers = || [run_at(&cache, "attention"), run_at(&cache, "ffn")];
        for (number, layer) in layers().iter().enumerate() {
            layer.append("x", numbers([1, 2, 4], number));
            layer.set_state("x", numbers([1], number));
        }
        cache.advance(2);
        for (number, layer) in layers().iter().enumerate() {
            let rows = layer.append("x", numbers([1, 1, 4], 50));
            assert!(equal(rows.narrow(1, 0, 2), numbers([1, 2, 4], number)));
            assert!(equal(layer.state("x", || numbers([1], 9)), numbers([1], number)));
        }
    }

    #[test]
    #[should_panic(expected = "two layers write `layers.3.attention.keys` in one pass")]
    fn layers_at_one_place_do_not_share_a_name() {
        let layer = run_at(&KeyValueCache::new(4), "attention");
        layer.append("keys", numbers([1, 1], 0));
        layer.append("keys", numbers([1, 1], 0));
    }

    /// Writes a row and a state of `batch` sequences.
    fn write_both(cache: &KeyValueCache, batch: usize) {
        let layer = run_at(cache, "attention");
        layer.set_state("s", numbers([batch, 2], 0));
        layer.append("x", numbers([batch, 1, 2], 0));
        cache.advance(1);
    }

    #[test]
    fn sequences_are_copied_and_dropped() {
        let cache = KeyValueCache::new(4);
        write_both(&cache, 3);
        cache.select(&[2, 0, 2, 2]);
        let layer = run_at(&cache, "attention");
        let state: Tensor<2> = layer.state("s", || numbers([1, 1], 9));
        let expected = [[4.0, 5.0], [0.0, 1.0], [4.0, 5.0], [4.0, 5.0]];
        assert!(equal(state, Tensor::from_data(expected, &Device::flex())));
        let rows = layer.append("x", numbers([4, 1, 2], 10)).slice([0..4, 0..1, 0..2]).reshape([4, 2]);
        assert!(equal(rows, Tensor::from_data(expected, &Device::flex())));
        assert_eq!(cache.len(), 1);
    }

    #[test]
    #[should_panic(expected = "cache: sequences [1, 3] of 3")]
    fn only_sequences_in_the_cache_are_selected() {
        let cache = KeyValueCache::new(4);
        write_both(&cache, 3);
        cache.select(&[1, 3]);
    }

    #[test]
    fn a_new_sequence_may_have_another_batch() {
        let cache = KeyValueCache::new(4);
        write_both(&cache, 1);
        cache.clear();
        write_both(&cache, 3);
        assert_eq!(cache.num_bytes(), 4 * 3 * (2 + 4 * 2));
    }

    #[test]
    #[should_panic(expected = "the state `layers.3.attention.s` was not [3, 2] before")]
    fn a_state_keeps_its_shape_within_a_sequence() {
        let cache = KeyValueCache::new(4);
        write_both(&cache, 1);
        write_both(&cache, 3);
    }

    #[test]
    #[should_panic(expected = "`layers.3.attention.x` holds no positions like [1, 4, 5]")]
    fn rows_keep_their_shape_within_a_sequence() {
        let cache = KeyValueCache::new(4);
        write_both(&cache, 1);
        run_at(&cache, "attention").append("x", numbers([1, 1, 5], 0));
    }

    #[test]
    #[should_panic(expected = "no state `layers.3.attention.other` of 2 dimensions after 1 positions")]
    fn a_state_that_was_never_set_is_missed() {
        let cache = KeyValueCache::new(4);
        write_both(&cache, 1);
        run_at(&cache, "attention").state("other", || numbers([1, 2], 0));
    }
}
