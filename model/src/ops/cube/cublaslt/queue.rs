//! Queues products on CubeCL's thread for a GPU, which knows the addresses of memory and the driver's streams.

#![allow(unsafe_code)]

use std::cell::RefCell;
use std::collections::HashMap;
use std::collections::hash_map::Entry;

use cubecl_common::device::DeviceId;
use cubecl_cuda::CudaRuntime;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::id::KernelId;
use cubecl_runtime::runtime::Runtime;
use cubecl_runtime::server::{BufferBinding, ServerError};
use cubecl_server::stream::{ExecuteScope, WriteScoped};

use super::error::ProductError;
use super::library::CublasLt;
use super::problem::{Alignments, Problem};

/// CubeCL's server of a GPU, which runs on one thread.
pub(super) type Server = <CudaRuntime as Runtime>::Server;

thread_local! {
    /// The opened libraries. CubeCL runs each GPU on one thread, which the handles never leave.
    static OPENED: RefCell<HashMap<DeviceId, CublasLt>> = RefCell::default();
}

/// A product and its memory, which is neither moved nor reused while this value lives.
pub(super) struct Product {
    pub(super) problem: Problem,
    pub(super) matrices: [BufferBinding; 3],
    pub(super) bias: Option<BufferBinding>,
    pub(super) factors: [f32; 2],
}

/// Queues a product on stream `caller`, after all work that its operands depend on.
///
/// The output carries errors, as with kernels: kernels that read it are skipped, and reading on the host fails.
pub(super) fn queue(server: &mut Server, device: DeviceId, caller: StreamId, product: &Product) {
    let Product { matrices: [a, b, output], bias, factors: [_, beta], .. } = product;
    let added = (*beta != 0.0).then_some(output);
    let reads = [a, b].into_iter().chain(bias).chain(added);
    let mut written = server.write_set();
    written.push(output.clone());
    // Names the skipped work in such an error.
    let name = KernelId::new::<Product>();
    let scope = ExecuteScope::launching(server, name, caller, reads, written);
    scope.execute(|server| Ok(multiply(server, device, caller, product)?));
}

fn multiply(
    server: &mut Server,
    device: DeviceId,
    caller: StreamId,
    product: &Product,
) -> Result<(), ProductError> {
    let Product { problem, matrices, bias, factors } = product;
    let mut resolved = server.write_streams().resolve(caller, matrices.iter().chain(bias))?;
    let stream = resolved.current().sys;
    let mut address = |binding: &BufferBinding| {
        let memory = &mut resolved.get(&binding.stream).memory_management_gpu;
        let (start, end) = (binding.offset_start, binding.offset_end);
        let resource = memory.get_resource(binding.memory.clone(), start, end);
        resource.map(|resource| resource.ptr).map_err(ServerError::from)
    };
    let [a, b, output] = matrices;
    let addresses = [address(a)?, address(b)?, address(output)?];
    let bias = bias.as_ref().map(address).transpose()?;
    with_library(device, |library| {
        // SAFETY: the bindings hold the matrices of the problem, and CubeCL reuses their memory only for work that
        // comes later on the stream or waits for it. The stream belongs to the server, which is borrowed.
        unsafe { library.multiply(problem, addresses, bias, *factors, stream) }
    })?
}

/// Returns whether cuBLASLt has an algorithm, as [`CublasLt::has_algorithm`] reports. Runs on CubeCL's thread.
pub(super) fn has_algorithm(device: DeviceId, problem: &Problem, alignments: Alignments) -> bool {
    with_library(device, |library| library.has_algorithm(problem, alignments)).unwrap_or(true)
}

/// Calls `body` with cuBLASLt on `device`, which the first call opens.
fn with_library<R>(device: DeviceId, body: impl FnOnce(&mut CublasLt) -> R) -> Result<R, ProductError> {
    OPENED.with_borrow_mut(|opened| {
        let library = match opened.entry(device) {
            Entry::Occupied(entry) => entry.into_mut(),
            Entry::Vacant(entry) => entry.insert(CublasLt::open(device.index_id)?),
        };
        Ok(body(library))
    })
}
