//! Non-blocking copies from a GPU to the host.

use std::future::Future;
use std::pin::Pin;
use std::sync::Mutex;

use cubecl::bytes::Bytes;
use cubecl::prelude::*;
use cubecl::server::{Handle, ServerError};
use kiln_collectives::{Buffer, BufferError, DType};

use crate::sync::lock;

/// A queued copy to the host. It runs after the GPU work that was queued earlier, and before later work.
pub(crate) struct Readback {
    dtype: DType,
    len: usize,
    bytes: Pin<Box<dyn Future<Output = Result<Vec<Bytes>, ServerError>> + Send + 'static>>,
}

impl Readback {
    /// Starts to read `len` elements.
    pub(crate) fn start(client: &Client, handle: Handle, dtype: DType, len: usize) -> Self {
        let bytes = Box::pin(lasting(client).read_async(vec![handle]));
        Readback { dtype, len, bytes }
    }

    /// Starts to read `buffer`, which must be on a GPU.
    pub(crate) fn of(buffer: &Buffer) -> Result<Self, BufferError> {
        let (dtype, len) = (buffer.dtype(), buffer.len());
        let on_host = || BufferError::Device { dtype, len, reason: "it is on the host".to_owned() };
        let memory = buffer.device().ok_or_else(on_host)?;
        Ok(Readback::start(memory.client(), memory.handle().clone(), dtype, len))
    }

    /// Waits for the copy.
    pub(crate) fn wait(self) -> Result<Buffer, BufferError> {
        let Readback { dtype, len, bytes } = self;
        let failed = |reason: String| BufferError::Device { dtype, len, reason };
        let bytes = cubecl::future::block_on(bytes).map_err(|error| failed(error.to_string()))?;
        let mut host = Buffer::zeros(dtype, len);
        let size = host.size_in_bytes();
        let found = bytes.first().and_then(|bytes| bytes.get(..size));
        let found = found.ok_or_else(|| failed("fewer bytes came back".to_owned()))?;
        host.as_bytes_mut().copy_from_slice(found);
        Ok(host)
    }
}

/// Returns the queue of a device with a static lifetime, because the futures of reads borrow it. There is one queue
/// per device, and devices live as long as the process.
fn lasting(client: &Client) -> &'static Client {
    static CLIENTS: Mutex<Vec<&'static Client>> = Mutex::new(Vec::new());
    let mut clients = lock(&CLIENTS);
    let same = |known: &&&'static Client| known.service_id() == client.service_id();
    match clients.iter().find(same) {
        Some(known) => known,
        None => {
            let kept: &'static Client = Box::leak(Box::new(client.clone()));
            clients.push(kept);
            kept
        }
    }
}
