//! Matrix products with NVIDIA's cuBLASLt, in CubeCL's memory and on its streams.
//!
//! A caller queues a product like a kernel, and CubeCL's thread resolves the addresses on the caller's stream. The
//! first product of a kind waits until cuBLASLt has chosen an algorithm. Nothing waits for the GPU, except to measure.
//!
//! The order of sums depends only on the algorithm, so GPUs of one kind that use the same algorithms give the same
//! bits.

mod agreement;
mod algorithms;
mod error;
mod library;
mod measure;
mod plan;
mod problem;
mod queue;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use burn_cubecl::tensor::CubeTensor;
use cubecl::client::Client;
use cubecl_common::device::{DeviceId, ServiceId};
use cubecl_common::device_handle::DeviceHandle;
use cubecl_environment::stream::StreamId;

use super::super::plain::{FusedOp, is_plain};
pub use algorithms::{
    ProductAlgorithms, measure_algorithms, measured_algorithms, use_algorithms, used_algorithms,
};

use error::ProductError;
use library::PLANS;
use problem::{Alignments, Problem, alignment_of};
use queue::{Product, Server};

static TF32: AtomicBool = AtomicBool::new(false);

/// Sets whether products of `f32` may round operands to TF32 (10 fraction bits instead of 23), which is several times
/// as fast. Then burn's kernels, which use TF32, may compute products for which cuBLASLt has no algorithm.
///
/// Applies to the whole process and is off by default.
pub fn allow_tf32(allowed: bool) {
    TF32.store(allowed, Ordering::Relaxed);
}

/// Returns whether cuBLASLt multiplies on the device of `tensor`: an NVIDIA GPU, with a library that gives right
/// results.
pub(super) fn serves(tensor: &CubeTensor) -> bool {
    is_nvidia(&tensor.client) && is_used()
}

/// Returns whether products of `f32` round operands to TF32 on the GPU behind `client`.
pub(super) fn rounds_to_tf32(client: &Client) -> bool {
    is_nvidia(client) && (!is_used() || TF32.load(Ordering::Relaxed))
}

fn is_nvidia(client: &Client) -> bool {
    let service = client.service_id();
    service == ServiceId::of::<Server>(service.device)
}

fn is_used() -> bool {
    !is_plain(FusedOp::MatrixProduct) && library::present()
}

/// Queues `output = alpha · a · b (+ bias) + beta · output`, with `factors` alpha and beta, for `[m, k]`, `[k, n]`,
/// `[n]` and a contiguous `[m, n]`. Returns `false` and does nothing if cuBLASLt cannot compute the product.
///
/// # Panics
///
/// If cuBLASLt has no algorithm and burn's kernels would round the operands to TF32, which is not allowed.
pub(super) fn multiply(
    a: &CubeTensor,
    b: &CubeTensor,
    bias: Option<&CubeTensor>,
    output: &CubeTensor,
    factors: [f32; 2],
) -> bool {
    if !serves(a) {
        return false;
    }
    let service = a.client.service_id();
    let tf32 = TF32.load(Ordering::Relaxed);
    let Some(problem) = Problem::new(a, b, bias, output, tf32) else { return false };
    let all = [a, b, output].into_iter().chain(bias);
    assert!(
        all.into_iter().all(|tensor| tensor.handle.service == service),
        "matrices on different devices cannot be multiplied"
    );
    let alignments = [a, b, output].map(|tensor| alignment_of(tensor.handle.offset_start.unwrap_or(0)));
    if !has_algorithm(service.device, problem, alignments) {
        assert!(
            problem.allows_burn(),
            "{}, but burn's kernels would round the operands to TF32. Compute in bf16 (precision.compute = \
             \"bf16\") or on the CPU (device.backend = \"cpu\"), or allow TF32 in your program with \
             kiln_model::ops::cube::matmul::allow_tf32(true)",
            ProductError::no_algorithm(problem)
        );
        return false;
    }
    let binding = |tensor: &CubeTensor| tensor.handle.clone().binding();
    let (matrices, bias) = ([a, b, output].map(binding), bias.map(binding));
    let product = Product { problem, matrices, bias, factors };
    let (device, caller) = (service.device, StreamId::current());
    DeviceHandle::<Server>::new(device).submit(move |server| queue::queue(server, device, caller, &product));
    true
}

/// Returns whether cuBLASLt has an algorithm for `problem` on an NVIDIA GPU. The first call for a kind of product waits
/// for CubeCL's thread, and logs a warning if burn's kernels are used.
///
/// Ranks with the same GPUs and library agree, because `alignments` are those of offsets and not of addresses.
fn has_algorithm(device: DeviceId, problem: Problem, alignments: Alignments) -> bool {
    static ANSWERS: Mutex<BTreeMap<(u16, Problem, Alignments), bool>> = Mutex::new(BTreeMap::new());
    let answers = || ANSWERS.lock().unwrap_or_else(PoisonError::into_inner);
    let key = (device.index_id, problem, alignments);
    if let Some(answer) = answers().get(&key) {
        return *answer;
    }
    let asked = DeviceHandle::<Server>::new(device)
        .submit_blocking(|_| queue::has_algorithm(device, &problem, alignments));
    // If CubeCL's thread has ended, queueing the product reports the reason.
    let answer = asked.unwrap_or(true);
    let mut answers = answers();
    if answers.len() >= PLANS {
        answers.clear();
    }
    // Ranks that are threads may have asked concurrently: one warning is enough.
    let is_new = answers.insert(key, answer).is_none();
    drop(answers);
    if is_new && !answer && problem.allows_burn() {
        tracing::warn!("{}: burn's slower kernels compute it", ProductError::no_algorithm(problem));
    }
    answer
}
