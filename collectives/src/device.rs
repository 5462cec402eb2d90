//! Buffers in the memory of a GPU, as CubeCL manages it: on CUDA, or whatever wgpu runs on.

#![allow(unsafe_code)]

use std::fmt;
use std::ops::Range;

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::Handle;

use crate::buffer::{Buffer, BufferError};
use crate::dtype::DType;
use crate::kernels::{self, WORD};

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
        let copy = room(&self.client, bytes);
        kernels::copy(&self.client, &self.handle, 0..bytes, &copy, 0);
        DeviceMemory { client: self.client.clone(), handle: copy }
    }
}

/// New memory for `bytes` in whole words, and at least one: kernels cannot be given none.
fn room(client: &Client, bytes: usize) -> Handle {
    client.empty(bytes.next_multiple_of(WORD).max(WORD))
}

impl Buffer {
    /// Room for `len` elements on the device of `client`, with arbitrary contents.
    pub fn empty_on(client: &Client, dtype: DType, len: usize) -> Buffer {
        let handle = room(client, len * dtype.size());
        Buffer::from_device(dtype, len, DeviceMemory::new(client.clone(), handle))
    }

    /// A copy on the device of `client` of a buffer on the host.
    ///
    /// # Panics
    ///
    /// If it is not on the host.
    pub fn to_device(&self, client: &Client) -> Buffer {
        let mut bytes = self.as_bytes().to_vec();
        bytes.resize(bytes.len().next_multiple_of(WORD).max(WORD), 0);
        let handle = client.create(Bytes::from_bytes_vec(bytes));
        Buffer::from_device(self.dtype(), self.len(), DeviceMemory::new(client.clone(), handle))
    }

    /// A copy on the host. Waits for the device.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    pub fn to_host(&self) -> Result<Buffer, BufferError> {
        match self.device() {
            Some(_) => self.range_to_host(0..self.len()),
            None => Ok(self.clone()),
        }
    }

    /// A copy of elements `range` on the host, which lie in whole words. Waits for the device.
    ///
    /// # Errors
    ///
    /// If the device has failed.
    ///
    /// # Panics
    ///
    /// If the range is not inside the buffer, or does not start with a word.
    pub fn range_to_host(&self, range: Range<usize>) -> Result<Buffer, BufferError> {
        assert!(range.start <= range.end && range.end <= self.len(), "{range:?} of {}", self.len());
        let (dtype, len, width) = (self.dtype(), range.len(), self.dtype().size());
        let start = range.start * width;
        assert!(start.is_multiple_of(WORD), "element {} of {dtype} starts no word", range.start);
        let mut host = Buffer::zeros(dtype, len);
        let size = host.size_in_bytes();
        let Some(memory) = self.device() else {
            host.as_bytes_mut().copy_from_slice(&self.as_bytes()[start..start + size]);
            return Ok(host);
        };
        if len == 0 {
            return Ok(host);
        }
        // Memory is in whole words, and so is what can be read of it.
        let behind = memory.handle.size_in_used() as usize - (start + size).next_multiple_of(WORD);
        let part = memory.handle.clone().offset_start(start as u64).offset_end(behind as u64);
        let bytes = memory.client.read_one(part).map_err(|error| BufferError::Device {
            dtype,
            len,
            reason: error.to_string(),
        })?;
        host.as_bytes_mut().copy_from_slice(&bytes[..size]);
        Ok(host)
    }
}
