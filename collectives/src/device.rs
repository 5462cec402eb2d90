//! Buffers in the memory of a GPU, as CubeCL manages it: on CUDA, or whatever wgpu runs on.

#![allow(unsafe_code)]

use std::fmt;

use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::buffer::{Buffer, BufferError};
use crate::dtype::DType;

/// Bytes that sizes are rounded up to: contents are copied in words.
const WORD: usize = size_of::<u32>();

/// Words that one unit of [`copy_words`] copies.
const UNITS: u32 = 256;

/// Memory of a GPU. `Clone` copies the contents.
pub struct DeviceMemory {
    client: Client,
    handle: Handle,
}

impl DeviceMemory {
    /// The memory behind `handle`, which belongs to the device of `client`.
    pub fn new(client: Client, handle: Handle) -> DeviceMemory {
        DeviceMemory { client, handle }
    }

    /// The device's queue.
    pub fn client(&self) -> &Client {
        &self.client
    }

    /// The memory. A clone of it refers to the same memory.
    pub fn handle(&self) -> &Handle {
        &self.handle
    }
}

impl fmt::Debug for DeviceMemory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("DeviceMemory").field("device", &self.client.name()).finish()
    }
}

impl Clone for DeviceMemory {
    fn clone(&self) -> DeviceMemory {
        let bytes = self.handle.size_in_used() as usize;
        let (copy, words) = (self.client.empty(bytes), bytes / WORD);
        if words > 0 {
            let cubes =
                cubecl::calculate_cube_count_elemwise(&self.client, words, CubeDim::new_1d(UNITS));
            // SAFETY: both have `words` words, and no unit reads or writes behind them.
            unsafe {
                copy_words::launch_unchecked(
                    &self.client,
                    cubes,
                    CubeDim::new_1d(UNITS),
                    BufferArg::from_raw_parts(self.handle.clone(), words),
                    BufferArg::from_raw_parts(copy.clone(), words),
                );
            }
        }
        DeviceMemory { client: self.client.clone(), handle: copy }
    }
}

#[cube(launch_unchecked)]
fn copy_words(from: &[u32], to: &mut [u32]) {
    if ABSOLUTE_POS < to.len() {
        to[ABSOLUTE_POS] = from[ABSOLUTE_POS];
    }
}

impl Buffer {
    /// Room for `len` elements on the device of `client`, with arbitrary contents.
    pub fn empty_on(client: &Client, dtype: DType, len: usize) -> Buffer {
        let bytes = (len * dtype.size()).next_multiple_of(WORD);
        let handle = client.empty(bytes);
        Buffer::from_device(dtype, len, DeviceMemory::new(client.clone(), handle))
    }

    /// A copy on the device of `client` of a buffer on the host.
    ///
    /// # Panics
    ///
    /// If it is not on the host.
    pub fn to_device(&self, client: &Client) -> Buffer {
        let mut bytes = self.as_bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(WORD), 0);
        let handle = client.create_from_slice(&bytes);
        Buffer::from_device(self.dtype(), self.len(), DeviceMemory::new(client.clone(), handle))
    }

    /// A copy on the host. Waits for the device.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn to_host(&self) -> Result<Buffer, BufferError> {
        let Some(memory) = self.device() else { return Ok(self.clone()) };
        let mut host = Buffer::zeros(self.dtype(), self.len());
        let bytes = memory.client.read_one(memory.handle.clone()).map_err(|error| {
            let (dtype, len) = (self.dtype(), self.len());
            BufferError::Device { dtype, len, reason: error.to_string() }
        })?;
        let size = host.size_in_bytes();
        host.as_bytes_mut().copy_from_slice(&bytes[..size]);
        Ok(host)
    }
}
