//! A gather buffer kept for the next gather of a pass.

use std::sync::Mutex;

use kiln_collectives::{Buffer, DType};

use crate::sync::lock;

/// Keeps at most one gather buffer between two gathers of a pass. One is enough: when the weights of
/// a parameter group are freed, the next group is already gathered, and the one after it takes the
/// buffer.
#[derive(Default)]
pub(crate) struct BufferPool {
    state: Mutex<PoolState>,
}

#[derive(Default)]
struct PoolState {
    free: Option<Buffer>,
    /// Whether the current pass will gather again.
    open: bool,
}

impl BufferPool {
    /// The kept buffer, with arbitrary contents, if it has this dtype and length. A kept buffer of
    /// another size is freed, so that it makes room for the one that the caller allocates instead.
    pub(crate) fn take(&self, dtype: DType, len: usize) -> Option<Buffer> {
        let free = lock(&self.state).free.take();
        free.filter(|buffer| buffer.dtype() == dtype && buffer.len() == len)
    }

    /// Keeps `buffer` for the next gather of the pass, if there will be one and no other rank reads it.
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

    /// Frees the kept buffer and keeps none from now on: the pass gathers nothing more.
    pub(crate) fn close(&self) {
        *lock(&self.state) = PoolState::default();
    }
}
