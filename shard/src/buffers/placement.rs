//! The memory that contains the flat buffers of a rank.

use std::borrow::Cow;

use burn::tensor::Device;
use kiln_collectives::{Buffer, DType};

#[cfg(feature = "cube")]
use {burn::backend::DispatchDevice, cubecl::MemoryScope, cubecl::prelude::Client};

/// The memory that a rank computes with.
#[derive(Clone)]
pub(crate) enum Placement {
    /// The host's memory.
    Host,
    /// The memory of the GPU behind this queue.
    #[cfg(feature = "cube")]
    Device(Client),
}

impl Placement {
    /// Returns the memory that the tensors of `device` are in.
    pub(crate) fn from_device(device: &Device) -> Self {
        match device.clone().without_autodiff().as_dispatch() {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(device) => Placement::Device(device.client()),
            _ => Placement::Host,
        }
    }

    /// Returns whether this is the host's memory.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self, Placement::Host)
    }

    /// Returns the memory that contains `buffer`.
    pub(crate) fn from_buffer(buffer: &Buffer) -> Self {
        #[cfg(feature = "cube")]
        if let Some(memory) = buffer.device() {
            return Placement::Device(memory.client().clone());
        }
        let _ = buffer;
        Placement::Host
    }

    /// Allocates `len` elements with arbitrary contents.
    pub(crate) fn empty(&self, dtype: DType, len: usize) -> Buffer {
        match self {
            // Zeros from the system cost nothing until they are written.
            Placement::Host => Buffer::zeros(dtype, len),
            #[cfg(feature = "cube")]
            Placement::Device(client) => Buffer::empty_on(client, dtype, len),
        }
    }

    /// Allocates `len` zeros.
    pub(crate) fn zeros(&self, dtype: DType, len: usize) -> Buffer {
        match self {
            Placement::Host => Buffer::zeros(dtype, len),
            #[cfg(feature = "cube")]
            Placement::Device(client) => super::cube::zeros(client, dtype, len),
        }
    }

    /// Copies `buffer`, which is on the host, to this memory.
    pub(crate) fn place(&self, buffer: Cow<'_, Buffer>) -> Buffer {
        match self {
            Placement::Host => buffer.into_owned(),
            #[cfg(feature = "cube")]
            Placement::Device(client) => buffer.to_device(client),
        }
    }

    /// Returns the bytes that the device has reserved for the calling thread; `None` on the host.
    pub(crate) fn device_bytes(&self) -> Option<u64> {
        match self {
            Placement::Host => None,
            // On a GPU, every thread has its own stream, and every stream its own memory pools.
            #[cfg(feature = "cube")]
            Placement::Device(client) => {
                Some(client.memory_report(MemoryScope::CurrentStream).usage().bytes_reserved)
            }
        }
    }
}

/// Allocates `len` zeros in the memory of the tensors of `device`, for measurements of collectives.
pub fn zeros_on(device: &Device, dtype: DType, len: usize) -> Buffer {
    Placement::from_device(device).zeros(dtype, len)
}

/// Makes CubeCL use pages on `device`, for this thread, that fit buffers of up to `bytes`. Call this before any
/// allocation. Otherwise, CubeCL sizes pages by the largest buffer so far: after a larger buffer, the smaller old
/// pages keep holes that only small buffers fit into. Does nothing on the host.
pub fn lay_out_pages(device: &Device, bytes: u64) {
    let placement = Placement::from_device(device);
    if !placement.is_host() {
        drop(placement.empty(DType::U8, usize::try_from(bytes).unwrap_or(usize::MAX)));
    }
}

/// Returns unused memory to `device`, which CubeCL would otherwise keep. Does nothing on the host.
pub fn release_unused(device: &Device) {
    match Placement::from_device(device) {
        Placement::Host => {}
        #[cfg(feature = "cube")]
        Placement::Device(client) => {
            if let Err(error) = client.memory_cleanup() {
                tracing::warn!(%error, "cannot return unused memory to the GPU");
            }
        }
    }
}
