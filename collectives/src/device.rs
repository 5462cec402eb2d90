//! GPU memory as managed by CubeCL, on CUDA or any wgpu device.

use std::fmt;
use std::ops::Range;
use std::time::{Duration, Instant};

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::kernels::{self, WORD};

/// An allocation on a GPU, and the client whose queue uses it. `Clone` copies the contents.
pub struct DeviceMemory {
    client: Client,
    handle: Handle,
}

impl DeviceMemory {
    /// Wraps the allocation behind `handle`, which belongs to the device of `client`.
    pub fn new(client: Client, handle: Handle) -> DeviceMemory {
        DeviceMemory { client, handle }
    }

    /// Allocates `bytes` arbitrary bytes, rounded up to at least one word, because kernels refuse empty buffers.
    pub(crate) fn empty(client: &Client, bytes: usize) -> DeviceMemory {
        DeviceMemory::new(client.clone(), client.empty(whole_words(bytes)))
    }

    pub(crate) fn upload(client: &Client, mut bytes: Vec<u8>) -> DeviceMemory {
        bytes.resize(whole_words(bytes.len()), 0);
        DeviceMemory::new(client.clone(), client.create(Bytes::from_bytes_vec(bytes)))
    }

    /// Copies `range` to the host, rounded up to whole words, and waits for the device.
    ///
    /// # Errors
    ///
    /// The error message of the GPU's runtime.
    pub(crate) fn download(&self, range: Range<usize>) -> Result<Bytes, String> {
        let behind = self.handle.size_in_used() as usize - range.end.next_multiple_of(WORD);
        let part = self.handle.clone().offset_start(range.start as u64).offset_end(behind as u64);
        self.client.read_one(part).map_err(|error| error.to_string())
    }

    /// The client whose queue uses the memory.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// CubeCL's handle of the allocation, whose clones refer to the same memory.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }

    /// Returns whether another handle of the allocation exists, such as a view. Waits up to 0.1 ms for CubeCL's server,
    /// which briefly holds a second handle of a new allocation.
    pub fn is_shared(&self) -> bool {
        const PATIENCE: Duration = Duration::from_micros(100);
        let begun = Instant::now();
        while !self.handle.can_mut() {
            if begun.elapsed() > PATIENCE {
                return true;
            }
            std::thread::yield_now();
        }
        false
    }
}

fn whole_words(bytes: usize) -> usize {
    bytes.next_multiple_of(WORD).max(WORD)
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").field("device", &self.client.name()).finish()
    }
}

impl Clone for DeviceMemory {
    fn clone(&self) -> DeviceMemory {
        let bytes = self.handle.size_in_used() as usize;
        let copy = DeviceMemory::empty(&self.client, bytes);
        kernels::copy(&self.client, &self.handle, 0..bytes, &copy.handle, 0);
        copy
    }
}
