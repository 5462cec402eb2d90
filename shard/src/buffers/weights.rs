//! The whole weights of a parameter group, and the owners that keep them in memory.

use std::sync::{Arc, Mutex};

use burn::tensor::{AllocationProperty, Bytes};
#[cfg(feature = "cube")]
use kiln_collectives::DeviceMemory;
use kiln_collectives::{Buffer, DType};

use crate::memory::{Counter, Held};
use crate::sync::lock;

/// The whole weights of a parameter group in memory. Parameter tensors are views into them.
#[derive(Clone)]
pub(crate) enum FlatWeights {
    /// On the host. Views share the reference count.
    Host(Arc<Bytes>),
    /// On a GPU. Views share the reference count of the memory behind the buffer.
    #[cfg(feature = "cube")]
    Device(Arc<Owner>),
}

impl FlatWeights {
    /// Wraps weights that were gathered into a separate buffer.
    pub(crate) fn gathered(gathered: Gathered) -> Self {
        Self::new(Owner::Gathered(gathered))
    }

    /// Wraps a shard that contains the whole parameter group, without copying it.
    pub(crate) fn shared(shard: Arc<Buffer>) -> Self {
        Self::new(Owner::Shard(shard))
    }

    fn new(owner: Owner) -> Self {
        #[cfg(feature = "cube")]
        if owner.buffer().is_some_and(|buffer| !buffer.is_on_host()) {
            return FlatWeights::Device(Arc::new(owner));
        }
        let bytes = bytes::Bytes::from_owner(owner);
        FlatWeights::Host(Arc::new(Bytes::from_shared(bytes, AllocationProperty::Native)))
    }

    /// Returns the bytes, if they are on the host.
    pub(super) fn host(&self) -> Option<&Arc<Bytes>> {
        match self {
            FlatWeights::Host(bytes) => Some(bytes),
            #[cfg(feature = "cube")]
            FlatWeights::Device(_) => None,
        }
    }

    /// Returns the buffer, if it is on a GPU.
    #[cfg(feature = "cube")]
    pub(super) fn device(&self) -> Option<&Buffer> {
        match self {
            FlatWeights::Host(_) => None,
            FlatWeights::Device(owner) => owner.buffer(),
        }
    }

    /// Returns whether anything other than this value reads the weights.
    pub(crate) fn has_views(&self) -> bool {
        match self {
            FlatWeights::Host(bytes) => Arc::strong_count(bytes) > 1,
            #[cfg(feature = "cube")]
            FlatWeights::Device(owner) => {
                let memory = owner.buffer().and_then(Buffer::device);
                Arc::strong_count(owner) > 1 || memory.is_some_and(DeviceMemory::is_shared)
            }
        }
    }
}

/// Keeps the memory of weights alive.
// There is one per parameter group, so the size of its variants does not matter.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Owner {
    /// A gathered buffer.
    Gathered(Gathered),
    /// A shard that contains the whole parameter group.
    Shard(Arc<Buffer>),
}

impl Owner {
    fn buffer(&self) -> Option<&Buffer> {
        match self {
            Owner::Gathered(gathered) => gathered.buffer.as_ref(),
            Owner::Shard(shard) => Some(shard),
        }
    }
}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.buffer().map_or(&[], Buffer::as_bytes)
    }
}

/// A gathered buffer, which returns to its pool when its last view is dropped.
pub(crate) struct Gathered {
    /// `None` only while the value is dropped.
    buffer: Option<Buffer>,
    pool: Option<Arc<BufferPool>>,
    _counted: Counted,
}

impl Gathered {
    /// Creates a gathered buffer. `pool` is set if the weights are freed and gathered again within a pass.
    pub(crate) fn new(buffer: Buffer, pool: Option<Arc<BufferPool>>, counted: Counted) -> Self {
        Gathered { buffer: Some(buffer), pool, _counted: counted }
    }
}

impl Drop for Gathered {
    fn drop(&mut self) {
        let (Some(buffer), Some(pool)) = (self.buffer.take(), &self.pool) else { return };
        #[cfg(feature = "cube")]
        if buffer.device().is_some_and(DeviceMemory::is_shared) {
            // A view remains, and will free the memory.
            return;
        }
        pool.put(buffer);
    }
}

/// Keeps at most one free gather buffer for reuse within a pass. One is enough: when a parameter group's weights are
/// freed, the next group is already gathered, so only the group after next needs a buffer.
#[derive(Default)]
pub(crate) struct BufferPool {
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    free: Option<Buffer>,
    /// True if the current pass may gather more weights.
    open: bool,
}

impl BufferPool {
    /// Takes the kept buffer, with arbitrary contents, if it has this dtype and length. A kept buffer of a different
    /// size is freed, to make room for the one that the caller then allocates.
    pub(crate) fn take(&self, dtype: DType, len: usize) -> Option<Buffer> {
        let free = lock(&self.state).free.take();
        free.filter(|buffer| buffer.dtype() == dtype && buffer.len() == len)
    }

    /// Keeps `buffer` for the next gather of the pass, unless the pass gathers nothing more or another rank reads the
    /// buffer.
    pub(crate) fn put(&self, buffer: Buffer) {
        if buffer.is_shared() {
            return;
        }
        let mut state = lock(&self.state);
        if state.open && state.free.is_none() {
            state.free = Some(buffer);
        }
    }

    /// Starts keeping buffers.
    pub(crate) fn open(&self) {
        lock(&self.state).open = true;
    }

    /// Frees the kept buffer and stops keeping buffers, because the pass gathers nothing more.
    pub(crate) fn close(&self) {
        *lock(&self.state) = PoolState::default();
    }
}

/// Updates of counters that last as long as a gathered buffer.
#[derive(Default)]
pub(crate) struct Counted {
    /// The parameter group, counted as unsharded.
    pub(crate) _group: Option<UnshardedGroup>,
    /// The bytes, if several ranks share the buffer.
    pub(crate) _bytes: Option<Held>,
}

/// Number of parameter groups that are unsharded at the same time, not counting those that stay unsharded from
/// forward to backward.
pub(crate) type UnshardedCount = Counter;

/// Counts one parameter group in an [`UnshardedCount`] until it is dropped.
pub(crate) struct UnshardedGroup(Arc<UnshardedCount>);

impl UnshardedGroup {
    pub(crate) fn new(count: &Arc<UnshardedCount>) -> Self {
        count.add(1);
        UnshardedGroup(count.clone())
    }
}

impl Drop for UnshardedGroup {
    fn drop(&mut self) {
        self.0.remove(1);
    }
}
