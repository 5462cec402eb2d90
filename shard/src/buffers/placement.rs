//! The memory that the flat buffers of a rank are in.

use std::borrow::Cow;

use burn::tensor::Device;
use kiln_collectives::{Buffer, DType};

#[cfg(feature = "cube")]
use {burn::backend::DispatchDevice, cubecl::MemoryScope, cubecl::prelude::Client};

/// The memory that a rank computes with.
#[derive(Clone)]
pub(crate) enum Placement {
    /// Of the host.
    Host,
    /// Of the GPU behind this queue.
    #[cfg(feature = "cube")]
    Device(Client),
}

impl Placement {
    /// Where tensors of `device` are.
    pub(crate) fn of_device(device: &Device) -> Self {
        match device.clone().without_autodiff().as_dispatch() {
            #[cfg(feature = "cube")]
            DispatchDevice::Cube(device) => Placement::Device(device.client()),
            _ => Placement::Host,
        }
    }

    /// Whether it is the host's.
    pub(crate) fn is_host(&self) -> bool {
        matches!(self, Placement::Host)
    }

    /// Where `buffer` is.
    pub(crate) fn of_buffer(buffer: &Buffer) -> Self {
        #[cfg(feature = "cube")]
        if let Some(memory) = buffer.device() {
            return Placement::Device(memory.client().clone());
        }
        let _ = buffer;
        Placement::Host
    }

    /// Room for `len` elements, with arbitrary contents.
    pub(crate) fn empty(&self, dtype: DType, len: usize) -> Buffer {
        match self {
            // Zeros from the system cost nothing until they are written.
            Placement::Host => Buffer::zeros(dtype, len),
            #[cfg(feature = "cube")]
            Placement::Device(client) => Buffer::empty_on(client, dtype, len),
        }
    }

    /// `len` zeros.
    pub(crate) fn zeros(&self, dtype: DType, len: usize) -> Buffer {
        match self {
            Placement::Host => Buffer::zeros(dtype, len),
            #[cfg(feature = "cube")]
            Placement::Device(client) => super::cube::zeros(client, dtype, len),
        }
    }

    /// `buffer`, which is on the host, here.
    pub(crate) fn place(&self, buffer: Cow<'_, Buffer>) -> Buffer {
        match self {
            Placement::Host => buffer.into_owned(),
            #[cfg(feature = "cube")]
            Placement::Device(client) => buffer.to_device(client),
        }
    }

    /// Bytes that the device holds for the calling thread; `None` on the host.
    pub(crate) fn device_bytes(&self) -> Option<u64> {
        match self {
            Placement::Host => None,
            // Every thread has a stream of its own there, and every stream pools of memory.
            #[cfg(feature = "cube")]
            Placement::Device(client) => {
                Some(client.memory_report(MemoryScope::CurrentStream).usage().bytes_reserved)
            }
        }
    }
}

/// `len` zeros where tensors of `device` are, for measurements of collectives.
pub fn zeros_on(device: &Device, dtype: DType, len: usize) -> Buffer {
    Placement::of_device(device).zeros(dtype, len)
}

/// Lets the memory of `device` that this thread's tensors will share be laid out in pages for buffers of up to
/// `bytes`. Call it before anything is there. CubeCL's pages have the size of the largest buffer so far: after a
/// larger one, pages of the old size are left with holes that only small buffers fit into. Without effect on the
/// host.
pub fn lay_out_pages(device: &Device, bytes: u64) {
    let placement = Placement::of_device(device);
    if !placement.is_host() {
        drop(placement.empty(DType::U8, usize::try_from(bytes).unwrap_or(usize::MAX)));
    }
}

/// Gives memory of `device` that nothing uses back to it; CubeCL keeps it otherwise. Without effect on the
/// host.
pub fn release_unused(device: &Device) {
    match Placement::of_device(device) {
        Placement::Host => {}
        #[cfg(feature = "cube")]
        Placement::Device(client) => {
            if let Err(error) = client.memory_cleanup() {
                tracing::warn!(%error, "the GPU keeps memory that nothing uses");
            }
        }
    }
}
