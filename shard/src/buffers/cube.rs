//! Flat buffers in the memory of a GPU, and burn's CubeCL backend.

use std::ops::Range;

use burn::backend::Cube;
use burn::tensor::Shape;
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::kernel::into_contiguous;
use burn_cubecl::tensor::CubeTensor;
use cubecl::calculate_cube_count_elemwise;
use cubecl::prelude::*;
use half::{bf16, f16};
use kiln_collectives::{Buffer, BufferError, DType, DeviceMemory};

use super::kernels;
use super::tensors::{DeviceScalar, FlatTensors, LossSum, burn_dtype};
use super::weights::FlatWeights;

/// Units (threads) of a cube.
pub(crate) const UNITS: usize = 256;

/// Runs `$body` with `$float` as the type of `$dtype`'s elements; for floats of 32 and 16 bits.
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
        let handle = like.client.empty(size_of::<f32>());
        CubeTensor::new_contiguous(
            like.client.clone(),
            like.device.clone(),
            Shape::new([1]),
            handle,
            burn_dtype(DType::F32),
        )
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
        let memory = device_of(target).map_err(|error| error.to_string())?;
        let gradient = into_contiguous(gradient);
        let len = range.len();
        // SAFETY: `range` lies inside `target`, and the gradient has as many elements.
        with_float!(dtype, F => unsafe {
            kernels::accumulate::launch_unchecked::<F>(
                memory.client(),
                cubes(memory.client(), len),
                CubeDim::new_1d(UNITS as u32),
                BufferArg::from_raw_parts(gradient.handle.clone(), len),
                whole(target, memory),
                range.start as u32,
                len as u32,
                replace,
            );
        });
        Ok(())
    }

    fn add_loss(loss: &CubeTensor, sum: &mut LossSum) -> Result<(), String> {
        let first = sum.device.is_none();
        let target = sum.device.get_or_insert_with(|| Buffer::empty_on(&loss.client, DType::F32, 1));
        Self::add_gradient(target, 0..1, loss.clone(), first)
    }

    fn scaled(gradient: CubeTensor, scale: &DeviceScalar) -> CubeTensor {
        let (client, device) = (gradient.client.clone(), gradient.device.clone());
        let (dtype, shape) = (burn_dtype(DType::F32), Shape::new([1]));
        let scale = CubeTensor::new_contiguous(client, device, shape, scale.clone(), dtype);
        Cube::float_mul(gradient, scale)
    }
}

/// `source` written as the dtype of `target`: floats of 32 and 16 bits, as long as each other.
pub(super) fn cast(source: &Buffer, target: &mut Buffer) -> Result<(), BufferError> {
    let (from, to, len) = (device_of(source)?, device_of(target)?, target.len());
    // SAFETY: both have `len` elements of the types that are named.
    with_float!(source.dtype(), A => with_float!(target.dtype(), B => unsafe {
        kernels::convert::launch_unchecked::<A, B>(
            to.client(),
            cubes(to.client(), len),
            CubeDim::new_1d(UNITS as u32),
            whole(source, from),
            whole(target, to),
        );
    }));
    Ok(())
}

/// `len` zeros on the device of `client`.
pub(crate) fn zeros(client: &Client, dtype: DType, len: usize) -> Buffer {
    let buffer = Buffer::empty_on(client, dtype, len);
    if let Some(memory) = buffer.device() {
        fill(&buffer, memory, 0..len);
    }
    buffer
}

/// Sets elements `range` of `buffer` to zero.
pub(super) fn clear(buffer: &mut Buffer, range: Range<usize>) -> Result<(), BufferError> {
    fill(buffer, device_of(buffer)?, range);
    Ok(())
}

fn fill(buffer: &Buffer, memory: &DeviceMemory, range: Range<usize>) {
    if range.is_empty() {
        return;
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
}

/// Writes `values` to the elements of `buffer` (f32) from `start` on.
pub(super) fn write(buffer: &mut Buffer, start: usize, values: &[f32]) -> Result<(), BufferError> {
    if values.is_empty() {
        return Ok(());
    }
    let memory = device_of(buffer)?;
    let source = memory.client().create_from_slice(bytemuck::cast_slice(values));
    // SAFETY: the values lie inside the buffer from `start` on.
    unsafe {
        kernels::accumulate::launch_unchecked::<f32>(
            memory.client(),
            cubes(memory.client(), values.len()),
            CubeDim::new_1d(UNITS as u32),
            BufferArg::from_raw_parts(source, values.len()),
            whole(buffer, memory),
            start as u32,
            values.len() as u32,
            true,
        );
    }
    Ok(())
}

/// Enough cubes for `len` units.
fn cubes(client: &Client, len: usize) -> CubeCount {
    calculate_cube_count_elemwise(client, len, CubeDim::new_1d(UNITS as u32))
}

/// All elements of a buffer, as a kernel's argument.
///
/// # Safety
///
/// The kernel must not touch elements behind those of the buffer.
unsafe fn whole(buffer: &Buffer, memory: &DeviceMemory) -> BufferArg {
    // SAFETY: the memory has room for as many elements as the buffer; the rest is up to the caller.
    unsafe { BufferArg::from_raw_parts(memory.handle().clone(), buffer.len()) }
}

pub(crate) fn device_of(buffer: &Buffer) -> Result<&DeviceMemory, BufferError> {
    let (dtype, len) = (buffer.dtype(), buffer.len());
    let on_host = || BufferError::Device { dtype, len, reason: "it is on the host".to_owned() };
    buffer.device().ok_or_else(on_host)
}
