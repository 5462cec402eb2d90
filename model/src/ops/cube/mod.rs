//! The CubeCL kernels, for every GPU that CubeCL supports.
//!
//! Kernels compute in `f32`, read and write contiguous buffers, and never wait for the device. The order of every sum
//! depends only on the shapes, without atomic additions, so every run gets the same bits.
//!
//! Where a CPU kernel panics because of a value, such as an invalid id, these kernels write NaN: the loss becomes NaN.

/// Launches a kernel without bounds checks on a grid: a number of cubes and their size. Skips empty grids.
///
/// Arguments: the grid; the tensors that the kernel indexes and the vector size, if any; buffers, each with the
/// elements per read; other arguments.
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

/// Maximum number of elements per read: sixteen bytes of `f32`.
const WIDEST: usize = 4;

/// Returns `tensor` without gaps between its elements, as the kernels require.
///
/// # Panics
///
/// If the dtype has more than 32 bits or the device does not support it: a failing kernel would report no error.
fn contiguous(tensor: &CubeTensor) -> CubeTensor {
    assert_float(tensor, tensor.dtype);
    into_contiguous(tensor.clone())
}

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

fn reshaped(tensor: CubeTensor, shape: impl Into<Shape>) -> CubeTensor {
    let shape = shape.into();
    debug_assert_eq!(shape.num_elements(), tensor.meta.num_elements());
    CubeTensor::new_contiguous(tensor.client, tensor.device, shape, tensor.handle, tensor.dtype)
}

/// Returns a view of rows `start..start + count` of a contiguous tensor, aligned only as its first row is.
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

fn len_of(tensor: &CubeTensor) -> usize {
    tensor.meta.num_elements()
}

fn arg(tensor: &CubeTensor, vector: usize) -> BufferArg {
    debug_assert!(tensor.is_contiguous(), "kernels take contiguous tensors");
    let len = len_of(tensor);
    // `len()` in a kernel is the length of the handle, and CUDA pads rows that come from the host.
    let padding = tensor.handle.size_in_used() - (len * tensor.dtype.size()) as u64;
    // SAFETY: a contiguous tensor has this many elements from the start of its handle on.
    unsafe { BufferArg::from_raw_parts(tensor.handle.clone().offset_end(padding), len / vector) }
}

fn elem(tensor: &CubeTensor) -> ElemType {
    dtype_to_storage_type(tensor.dtype)
}

fn address_type(tensors: &[&CubeTensor]) -> AddressType {
    tensors.iter().map(|tensor| tensor.required_address_type()).max().unwrap_or_default()
}

/// Returns the number of elements per read: a divisor of `width`, the number of elements per row.
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

fn cubes_for(client: &Client, items: usize) -> (CubeCount, CubeDim) {
    let dim = CubeDim::new_1d(UNITS as u32);
    (cubecl::calculate_cube_count_elemwise(client, items, dim), dim)
}

/// Returns `count` cubes of `units` units, in as many dimensions as the device requires, perhaps with idle ones.
fn cubes(client: &Client, count: usize, units: usize) -> (CubeCount, CubeDim) {
    let count = cubecl::calculate_cube_count_elemwise(client, count, CubeDim::new_1d(1));
    (count, CubeDim::new_1d(units as u32))
}
