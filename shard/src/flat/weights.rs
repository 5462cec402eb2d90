//! A unit's whole weights, and who still reads them.

use std::sync::Arc;

use burn::tensor::{AllocationProperty, Bytes};
use kiln_collectives::Buffer;

use crate::runtime::{Counted, Runtime};

/// A unit's whole weights in memory. Parameter tensors are views into it.
#[derive(Clone)]
pub(crate) enum FlatWeights {
    /// On the host. Views share the reference count.
    Host(Arc<Bytes>),
    /// On a GPU. Views share the reference count of the memory behind the buffer.
    #[cfg(feature = "cube")]
    Device(Arc<Owner>),
}

impl FlatWeights {
    /// Weights that were gathered; the buffer goes back to the pool when the last view is gone, if it
    /// is streamed: freed and gathered again within a pass.
    pub(crate) fn gathered(
        buffer: Buffer,
        runtime: &Arc<Runtime>,
        streamed: bool,
        counted: Counted,
    ) -> Self {
        let runtime = streamed.then(|| runtime.clone());
        Self::new(Owner::Gathered(Gathered { buffer: Some(buffer), runtime, _counted: counted }))
    }

    /// The master itself as weights, where the shard is the whole unit: nothing is copied.
    pub(crate) fn master(master: Arc<Buffer>) -> Self {
        Self::new(Owner::Master(master))
    }

    fn new(owner: Owner) -> Self {
        #[cfg(feature = "cube")]
        if owner.buffer().is_some_and(|buffer| !buffer.is_on_host()) {
            return FlatWeights::Device(Arc::new(owner));
        }
        let bytes = bytes::Bytes::from_owner(owner);
        FlatWeights::Host(Arc::new(Bytes::from_shared(bytes, AllocationProperty::Native)))
    }

    /// The bytes, if they are on the host.
    pub(super) fn host(&self) -> Option<&Arc<Bytes>> {
        match self {
            FlatWeights::Host(bytes) => Some(bytes),
            #[cfg(feature = "cube")]
            FlatWeights::Device(_) => None,
        }
    }

    /// The buffer on a GPU, if they are there.
    #[cfg(feature = "cube")]
    pub(super) fn device(&self) -> Option<&Buffer> {
        match self {
            FlatWeights::Host(_) => None,
            FlatWeights::Device(owner) => owner.buffer(),
        }
    }

    /// Whether anything but this reads the weights.
    pub(crate) fn has_views(&self) -> bool {
        match self {
            FlatWeights::Host(bytes) => Arc::strong_count(bytes) > 1,
            #[cfg(feature = "cube")]
            FlatWeights::Device(owner) => {
                let memory = owner.buffer().and_then(Buffer::device);
                Arc::strong_count(owner) > 1 || memory.is_some_and(|m| !m.handle().can_mut())
            }
        }
    }
}

/// What keeps the memory of weights.
// One per unit: the difference in size does not matter.
#[allow(clippy::large_enum_variant)]
pub(crate) enum Owner {
    /// A buffer that was gathered.
    Gathered(Gathered),
    /// A master shard that is the whole unit, read in place.
    Master(Arc<Buffer>),
}

impl Owner {
    /// The memory.
    pub(crate) fn buffer(&self) -> Option<&Buffer> {
        match self {
            Owner::Gathered(gathered) => gathered.buffer.as_ref(),
            Owner::Master(master) => Some(master),
        }
    }
}

impl AsRef<[u8]> for Owner {
    fn as_ref(&self) -> &[u8] {
        self.buffer().map_or(&[], Buffer::as_bytes)
    }
}

/// A gathered buffer.
pub(crate) struct Gathered {
    /// Taken in drop only.
    buffer: Option<Buffer>,
    /// Whose pool it goes back to.
    runtime: Option<Arc<Runtime>>,
    _counted: Counted,
}

impl Drop for Gathered {
    fn drop(&mut self) {
        let (Some(buffer), Some(runtime)) = (self.buffer.take(), &self.runtime) else { return };
        #[cfg(feature = "cube")]
        if buffer.device().is_some_and(|memory| !memory.handle().can_mut()) {
            // A view is left, and keeps the memory for itself.
            return;
        }
        runtime.pool.put(buffer);
    }
}
