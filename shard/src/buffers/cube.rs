//! Flat buffers in the memory of a GPU, and burn's CubeCL backend.

use std::ops::Range;

use burn::backend::Cube;
use burn::tensor::Shape;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;
use cubecl::server::Handle;
use half::{bf16, f16};
use kiln_collectives::{Buffer, BufferError, DType, DeviceMemory};

use super::kernels;
use super::pending::PendingValues;
use super::readback::Readback;
use super::tensors::{DeviceScalar, FlatTensors, LossSum, burn_dtype};
use super::weights::FlatWeights;

/// Number of units (threads) per cube.
pub(crate) const UNITS: usize = 256;

/// Number of elements that a module reads at once if all offsets and lengths are multiples of it: 16 bytes of `f32`.
const VECTOR: usize = 4;

/// Runs `$body` with `$float` as the element type of `$dtype`, a float of 16 or 32 bits.
macro_rules! with_float {
    ($dtype:expr, $float:ident => $body:expr) => {
        match $dtype {
            DType::F16 => {
                type $float = f16;
                $body
            }
            DType::BF16 => {
                type $float = bf16;
                $body
            }
            _ => {
                type $float = f32;
                $body
            }
        }
    };
}

impl FlatTensors for Cube {
    fn view(
        weights: &FlatWeights,
        like: &CubeTensor,
        shape: &[usize],
        offset: usize,
        dtype: DType,
    ) -> CubeTensor {
        let Some(memory) = weights.device().and_then(Buffer::device) else {
            unreachable!("invariant: a rank's tensors and buffers are in the same memory");
        };
        let (start, bytes) = (offset * dtype.size(), shape.iter().product::<usize>() * dtype.size());
        let handle = memory.handle().clone();
        let behind = handle.size() - (start + bytes) as u64;
        CubeTensor::new_contiguous(
            memory.client().clone(),
            like.device.clone(),
            Shape::from(shape.to_vec()),
            handle.offset_start(start as u64).offset_end(behind),
            burn_dtype(dtype),
        )
    }

    fn token(like: &CubeTensor) -> CubeTensor {
        scalar(like, like.client.empty(size_of::<f32>()))
    }

    fn add_gradient(
        target: &mut Buffer,
        range: Range<usize>,
        gradient: CubeTensor,
        replace: bool,
    ) -> Result<(), String> {
        let found = gradient.meta.num_elements();
        if found != range.len() {
            return Err(format!("has {found} elements, expected {}", range.len()));
        }
        let dtype = [DType::F32, DType::BF16, DType::F16]
            .into_iter()
            .find(|dtype| burn_dtype(*dtype) == gradient.dtype);
        let dtype = dtype
            .ok_or_else(|| format!("has dtype {:?}, expected a float of 32 or 16 bits", gradient.dtype))?;
        // SAFETY: `range` lies inside `target`, and the gradient has as many elements.
        let added = unsafe { accumulate(into_contiguous(gradient).handle, dtype, target, range, replace) };
        added.map_err(|error| error.to_string())
    }

    fn add_loss(loss: &CubeTensor, sum: &mut LossSum) -> Result<(), String> {
        let first = sum.device.is_none();
        let target = sum.device.get_or_insert_with(|| Buffer::empty_on(&loss.client, DType::F32, 1));
        Self::add_gradient(target, 0..1, loss.clone(), first)
    }

    fn start_reading(values: &CubeTensor) -> Result<PendingValues, String> {
        if values.dtype != burn_dtype(DType::F32) {
            return Err(format!("has dtype {:?}, expected f32", values.dtype));
        }
        let (values, len) = (into_contiguous(values.clone()), values.meta.num_elements());
        let read = Readback::start(&values.client, values.handle.clone(), DType::F32, len);
        Ok(PendingValues::on_device(read))
    }

    fn scaled(gradient: CubeTensor, scale: &DeviceScalar) -> CubeTensor {
        let scale = scalar(&gradient, scale.clone());
        Cube::float_mul(gradient, scale)
    }
}

/// Returns the f32 value at `handle` as a tensor `[1]` on the device of `like`.
fn scalar(like: &CubeTensor, handle: Handle) -> CubeTensor {
    let (client, device, shape) = (like.client.clone(), like.device.clone(), Shape::new([1]));
    CubeTensor::new_contiguous(client, device, shape, handle, burn_dtype(DType::F32))
}

/// Writes `source` to `target`, converted to the dtype of `target`. Both are floats of 16 or 32 bits, of equal
/// length.
pub(super) fn cast(source: &Buffer, target: &mut Buffer) -> Result<(), BufferError> {
    let (from, to, len) = (device_of(source)?, device_of(target)?, target.len());
    let vector = vector_of([len]);
    // SAFETY: both have `len` elements of the types that are named.
    with_float!(source.dtype(), A => with_float!(target.dtype(), B => unsafe {
        kernels::convert::launch_unchecked::<A, B>(
            to.client(),
            cubes(to.client(), len / vector),
            CubeDim::new_1d(UNITS as u32),
            vector,
            BufferArg::from_raw_parts(from.handle().clone(), len / vector),
            BufferArg::from_raw_parts(to.handle().clone(), len / vector),
        );
    }));
    Ok(())
}

/// Adds `source` to `target` (f32); both have the same length.
pub(super) fn add(target: &mut Buffer, source: &Buffer) -> Result<(), BufferError> {
    let (handle, len) = (device_of(source)?.handle().clone(), target.len());
    // SAFETY: both have `len` elements, those of `source` of its dtype.
    unsafe { accumulate(handle, source.dtype(), target, 0..len, false) }
}

/// Allocates `len` zeros on the device of `client`.
pub(crate) fn zeros(client: &Client, dtype: DType, len: usize) -> Buffer {
    let mut buffer = Buffer::empty_on(client, dtype, len);
    // Cannot fail, because the buffer is on a device.
    let _ = clear(&mut buffer, 0..len);
    buffer
}

/// Sets elements `range` of `buffer` to zero.
pub(super) fn clear(buffer: &mut Buffer, range: Range<usize>) -> Result<(), BufferError> {
    let memory = device_of(buffer)?;
    if range.is_empty() {
        return Ok(());
    }
    // SAFETY: `range` lies inside the buffer, whose elements have the type that is named.
    with_float!(buffer.dtype(), F => unsafe {
        kernels::fill::launch_unchecked::<F>(
            memory.client(),
            cubes(memory.client(), range.len()),
            CubeDim::new_1d(UNITS as u32),
            whole(buffer, memory),
            range.start as u32,
            range.end as u32,
            0.0,
        );
    });
    Ok(())
}

/// Writes `values` to `buffer` (f32), from element `start` on.
pub(super) fn write(buffer: &mut Buffer, start: usize, values: &[f32]) -> Result<(), BufferError> {
    if values.is_empty() {
        return Ok(());
    }
    let source = device_of(buffer)?.client().create_from_slice(bytemuck::cast_slice(values));
    // SAFETY: the values lie inside the buffer from `start` on.
    unsafe { accumulate(source, DType::F32, buffer, start..start + values.len(), true) }
}

/// Adds the values at `source`, of `dtype`, to elements `range` of `target` (f32), or overwrites those elements.
///
/// # Safety
///
/// `range` must lie inside `target`, and `source` must have as many values as `range`.
unsafe fn accumulate(
    source: Handle,
    dtype: DType,
    target: &mut Buffer,
    range: Range<usize>,
    replace: bool,
) -> Result<(), BufferError> {
    let memory = device_of(target)?;
    // A view may begin at any of its tensor's elements.
    let offset = source.offset_start.unwrap_or(0) as usize / dtype.size();
    // Vectors of four f32, and the four values that they are added to, would exceed the kernel's register limit.
    let vector = match dtype {
        DType::F32 => 1,
        _ => vector_of([offset, range.start, range.len(), target.len()]),
    };
    // SAFETY: the caller's promise.
    with_float!(dtype, F => unsafe {
        kernels::accumulate::launch_unchecked::<F>(
            memory.client(),
            cubes(memory.client(), range.len() / vector),
            CubeDim::new_1d(UNITS as u32),
            vector,
            BufferArg::from_raw_parts(source, range.len() / vector),
            BufferArg::from_raw_parts(memory.handle().clone(), target.len() / vector),
            (range.start / vector) as u32,
            (range.len() / vector) as u32,
            replace,
        );
    });
    Ok(())
}

/// Returns how many elements a module reads at once: [`VECTOR`] if it divides all of `counts`, else 1.
fn vector_of<const N: usize>(counts: [usize; N]) -> usize {
    if counts.iter().all(|count| count.is_multiple_of(VECTOR)) { VECTOR } else { 1 }
}

/// Returns enough cubes for `len` units.
fn cubes(client: &Client, len: usize) -> CubeCount {
    calculate_cube_count_elemwise(client, len, CubeDim::new_1d(UNITS as u32))
}

/// Passes all elements of `buffer` to a kernel.
///
/// # Safety
///
/// The kernel must not access memory beyond the end of the buffer.
pub(crate) unsafe fn whole(buffer: &Buffer, memory: &DeviceMemory) -> BufferArg {
    // SAFETY: the memory has room for as many elements as the buffer; the rest is up to the caller.
    unsafe { BufferArg::from_raw_parts(memory.handle().clone(), buffer.len()) }
}

pub(crate) fn device_of(buffer: &Buffer) -> Result<&DeviceMemory, BufferError> {
    let (dtype, len) = (buffer.dtype(), buffer.len());
    let on_host = || BufferError::Device { dtype, len, reason: "it is on the host".to_owned() };
    buffer.device().ok_or_else(on_host)
}
