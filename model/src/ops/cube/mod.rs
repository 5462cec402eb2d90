//! The CubeCL kernels, for every GPU that CubeCL supports.
//!
//! Kernels are generic over the dtypes of tensors and compute in `f32`. They read and write contiguous buffers:
//! operands with gaps or other strides are copied first, results are allocated without padding. A launch never waits
//! for the device. The order of every sum depends only on the shapes, and nothing is added atomically, so that a
//! result has the same bits in every run.
//!
//! Values that exist only on the device cannot be checked without waiting for it. Where the CPU kernels panic because
//! of such a value (an id outside the vocabulary), these kernels write NaN, which makes the loss NaN.

/// Launches a kernel without bounds checks on a grid, which is a number of cubes and their size. Does nothing
/// if there are no cubes.
///
/// The grid is followed by the tensors whose ends the kernel's indices must reach, and the vector size that
/// it is compiled for, if it has these. Then come its buffers, each with the number of elements that it reads
/// at once, and its other arguments.
macro_rules! launch {
    (
        $kernel:ident, $grid:expr $(, [$($indexed:expr),+] $(, $vector:expr)?)?;
        $first:ident / $size:expr $(, $tensor:ident / $more:expr)*;
        $($argument:expr),+
    ) => {{
        let (count, dim) = $grid;
        if !count.is_empty() {
            $kernel::launch_unchecked(
                &$first.client,
                count,
                dim,
                $($crate::ops::cube::address_type(&[$(&$indexed),+]), $($vector,)?)?
                $crate::ops::cube::arg(&$first, $size),
                $($crate::ops::cube::arg(&$tensor, $more),)*
                $($argument),+
            );
        }
    }};
}

pub mod attention;
mod cross_entropy;
#[cfg(feature = "cuda")]
mod cublaslt;
mod dropout;
mod embedding;
mod experts;
mod glu;
mod linear;
pub mod matmul;
mod residual;
mod rms_norm;
mod rotary;
mod squared_relu;
mod sums;
mod top_k;

use burn::tensor::{DType, Shape};
use burn_backend::cubecl::dtype_to_storage_type;
use burn_backend::{Backend, DTypeUsage};
use burn_cubecl::CubeBackend;
use burn_cubecl::kernel::{cast, into_contiguous};
use burn_cubecl::ops::numeric::empty_device_contiguous_dtype;
use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

/// Default number of units per cube.
const UNITS: usize = 256;

/// Maximum number of elements that a unit reads at once: sixteen bytes of `f32`.
const WIDEST: usize = 4;

/// Returns `tensor` without gaps between its elements, as the kernels require.
///
/// # Panics
///
/// If the dtype has more than 32 bits, or if the device does not support it. Without this check, the kernel would
/// fail on the device's own thread, and reading its result would not return an error.
fn contiguous(tensor: &CubeTensor) -> CubeTensor {
    assert_float(tensor, tensor.dtype);
    into_contiguous(tensor.clone())
}

/// Returns `tensor` in `dtype`, without gaps between its elements.
fn contiguous_in(tensor: &CubeTensor, dtype: DType) -> CubeTensor {
    if tensor.dtype == dtype {
        return contiguous(tensor);
    }
    assert_float(tensor, tensor.dtype);
    assert_float(tensor, dtype);
    into_contiguous(cast(tensor.clone(), dtype))
}

/// Allocates a contiguous float tensor with arbitrary contents on the device of `like`.
fn empty(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    assert_float(like, dtype);
    allocate(like, shape, dtype)
}

/// Allocates a tensor like [`empty`], but of any dtype.
fn allocate(like: &CubeTensor, shape: impl Into<Shape>, dtype: DType) -> CubeTensor {
    empty_device_contiguous_dtype(like.client.clone(), like.device.clone(), shape.into(), dtype)
}

fn assert_float(tensor: &CubeTensor, dtype: DType) {
    match dtype {
        DType::F32 => {}
        DType::BF16 | DType::F16 => {
            let usage = CubeBackend::dtype_usage(&tensor.device, dtype);
            let name = CubeBackend::name(&tensor.device);
            assert!(usage.contains(DTypeUsage::Storage), "{name} has no tensors of {dtype:?}");
        }
        other => panic!("no kernel for tensors of {other:?} on a GPU"),
    }
}

/// Reshapes `tensor`, which is contiguous.
fn reshaped(tensor: CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    let shape = shape.into();
    debug_assert_eq!(shape.num_elements(), tensor.meta.num_elements());
    CubeTensor::new_contiguous(tensor.client, tensor.device, shape, tensor.handle, tensor.dtype)
}

/// Returns rows `start..start + count` of a contiguous tensor.
///
/// For kernels that read several elements at once, the first row must be aligned accordingly.
fn rows_at(tensor: &CubeTensor, start: usize, count: usize) -> CubeTensor {
    let mut shape = tensor.meta.shape().clone();
    let row: usize = shape.iter().skip(1).product();
    let bytes = |rows: usize| (rows * row * tensor.dtype.size()) as u64;
    let behind = shape[0] - start - count;
    let handle = tensor.handle.clone().offset_start(bytes(start)).offset_end(bytes(behind));
    shape[0] = count;
    let (client, device) = (tensor.client.clone(), tensor.device.clone());
    CubeTensor::new_contiguous(client, device, shape, handle, tensor.dtype)
}

/// Returns the number of elements.
fn len_of(tensor: &CubeTensor) -> usize {
    tensor.meta.num_elements()
}

/// Passes `tensor`, which must be contiguous, to a kernel that reads `vector` elements at once.
fn arg(tensor: &CubeTensor, vector: usize) -> BufferArg {
    debug_assert!(tensor.is_contiguous(), "kernels take contiguous tensors");
    let len = len_of(tensor);
    // In a kernel, `len()` is the length of the handle. On CUDA, rows that come from the host are padded, even a
    // single row.
    let padding = tensor.handle.size_in_used() - (len * tensor.dtype.size()) as u64;
    // SAFETY: a contiguous tensor has this many elements from the start of its handle on.
    unsafe { BufferArg::from_raw_parts(tensor.handle.clone().offset_end(padding), len / vector) }
}

/// Returns the dtype of `tensor`, as an argument of a kernel.
fn elem(tensor: &CubeTensor) -> ElemType {
    dtype_to_storage_type(tensor.dtype)
}

/// Returns the type of an index into the largest of `tensors`.
fn address_type(tensors: &[&CubeTensor]) -> AddressType {
    tensors.iter().map(|tensor| tensor.required_address_type()).max().unwrap_or_default()
}

/// Returns how many elements of these tensors a kernel reads at once: a divisor of `width`, the number of elements
/// per row.
fn vector_size(tensors: &[&CubeTensor], width: usize) -> usize {
    let widest = tensors.iter().map(|tensor| tensor.dtype.size()).max().unwrap_or(1);
    let Some(tensor) = tensors.first() else { return 1 };
    tensor
        .client
        .io_optimized_vector_sizes(widest)
        .filter(|&size| size <= WIDEST && width.is_multiple_of(size))
        .max()
        .unwrap_or(1)
}

/// Returns cubes of [`UNITS`] units, with one unit per item.
fn cubes_for(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(UNITS as u32);
    (cubecl::calculate_cube_count_elemwise(client, items, dim), dim)
}

/// Returns `count` cubes of `units` units, spread over as many dimensions as the device requires. There may
/// be idle cubes at the end.
fn cubes(client: &Client, count: usize, units: usize) -> (CubeCount, CubeDim) {
    let count = cubecl::calculate_cube_count_elemwise(client, count, CubeDim::new_1d(1));
    (count, CubeDim::new_1d(units as u32))
}
