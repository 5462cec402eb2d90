//! Transfers between ranks that share a GPU: kernels read from the peers' buffers. Each rank has its own queue on the
//! GPU. It waits until the queue has written a buffer before it deposits the buffer, and until the queue has read the
//! peers' buffers before it reports that.

use crate::buffer::Buffer;
use crate::call::ArgumentError;
use crate::device::DeviceMemory;
use crate::dtype::DType;
use crate::kernels;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
use std::sync::Arc;

pub(super) fn has_sum(memory: &DeviceMemory, dtype: DType) -> bool {
    let properties = memory.client().properties();
    let knows = |element: ElemType| properties.supports_type(element);
    match dtype {
        DType::F64 => knows(f64::elem_type_native()),
        DType::F32 => true,
        DType::F16 => knows(f16::elem_type_native()),
        DType::BF16 => knows(bf16::elem_type_native()),
        DType::U8 => false,
    }
}

pub(super) fn synchronize(memory: &DeviceMemory) -> Result<(), String> {
    cubecl::future::block_on(memory.client().sync()).map_err(|error| error.to_string())
}

pub(super) fn copy_chunks(output: &DeviceMemory, inputs: &[Arc<Buffer>]) -> Result<(), String> {
    let mut at = 0;
    for (input, handle) in inputs.iter().zip(handles(output, inputs)?) {
        let bytes = input.size_in_bytes();
        kernels::copy(output.client(), handle, 0..bytes, output.handle(), at);
        at += bytes;
    }
    synchronize(output)
}

/// Sums `inputs` in order, from their element `start` on, into `output`, and waits. Has the same bits as on the host.
pub(super) fn sum(
    output: &Buffer,
    memory: &DeviceMemory,
    inputs: &[Arc<Buffer>],
    start: usize,
) -> Result<(), String> {
    let (client, handles) = (memory.client(), handles(memory, inputs)?);
    let (handle, len) = (memory.handle(), output.len());
    match output.dtype() {
        DType::F64 => kernels::sum::<f64, f64>(client, &handles, start, handle, len),
        DType::F32 => kernels::sum::<f32, f32>(client, &handles, start, handle, len),
        DType::F16 => kernels::sum::<f32, f16>(client, &handles, start, handle, len),
        DType::BF16 => kernels::sum::<f32, bf16>(client, &handles, start, handle, len),
        DType::U8 => return Err(ArgumentError::NoSum { dtype: DType::U8 }.to_string()),
    }
    synchronize(memory)
}

fn handles<'a>(own: &DeviceMemory, inputs: &'a [Arc<Buffer>]) -> Result<Vec<&'a Handle>, String> {
    let here = own.client().service_id();
    let handle = |input: &'a Arc<Buffer>| match input.device() {
        Some(memory) if memory.client().service_id() == here => Ok(memory.handle()),
        _ => Err(ArgumentError::OtherDevice.to_string()),
    };
    inputs.iter().map(handle).collect()
}
