//! Checks of a device's fused kernels against their plain forms on small inputs, and of a model's [`layers`].
//!
//! Each operation runs on the device, and in `f64` on the CPU as a reference, forward and backward. An operation whose
//! error exceeds its bound is then computed in plain burn in this process ([`crate::ops::use_plain`]). Operations that
//! others use are checked first, so that one wrong kernel does not fail the others.

mod cases;
pub mod layers;

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use serde::{Deserialize, Serialize};

#[cfg(feature = "cube")]
use crate::ops::cube::{attention::has_warpgroups, matmul::rounds_to_tf32};
use crate::ops::{FusedOp, use_plain};
use crate::panics::message;
use crate::random::{GOLDEN, mix};
pub use cases::Shapes;
use cases::{Case, cases};

/// Comparison of an operation with its reference in one dtype.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Finding {
    /// The operation.
    pub op: FusedOp,
    /// Dtype of the inputs.
    pub dtype: FloatDType,
    /// Largest error of any value, relative to the largest magnitude of its result or gradient in the reference.
    /// `None` if a value is not finite or the operation failed.
    pub error: Option<f64>,
    /// Largest error that rounding can explain.
    pub bound: f64,
    /// Location of the error: `output` or `gradient 1` (of the second input), or the message of a failure.
    pub place: String,
}

impl Finding {
    /// Returns whether the error is within the bound.
    pub fn is_right(&self) -> bool {
        self.error.is_some_and(|error| error <= self.bound)
    }
}

/// Compares each fused operation with its reference on `device`, which must not have autodiff, in each supported dtype.
/// An operation that differs is computed in plain burn from then on in this process.
///
/// Doubles the results of the operation `fault`, to test how a wrong kernel is handled.
pub fn verify(
    device: &Device,
    dtypes: &[FloatDType],
    shapes: &Shapes,
    fault: Option<FusedOp>,
) -> Vec<Finding> {
    let cases = cases(shapes);
    let mut findings = Vec::new();
    for op in FusedOp::ALL {
        let dtypes = match op {
            FusedOp::WarpgroupAttention => dtypes_of_warpgroups(device, dtypes),
            _ => dtypes.to_vec(),
        };
        let of_op: Vec<_> = cases.iter().filter(|case| case.op == op).collect();
        let scale = if fault == Some(op) { 2.0 } else { 1.0 };
        let first = findings.len();
        for dtype in dtypes.into_iter().filter(|&dtype| device.supports_dtype(DType::from(dtype))) {
            let of_cases = of_op.iter().map(|case| compare(case, device, dtype, scale));
            findings.extend(of_cases.reduce(worse));
        }
        if findings[first..].iter().any(|finding| !finding.is_right()) {
            use_plain(&[op]);
        }
    }
    findings
}

fn worse(a: Finding, b: Finding) -> Finding {
    let error = |finding: &Finding| finding.error.unwrap_or(f64::INFINITY);
    if error(&b) > error(&a) { b } else { a }
}

fn dtypes_of_warpgroups(device: &Device, dtypes: &[FloatDType]) -> Vec<FloatDType> {
    let is_half = |dtype: &&FloatDType| matches!(dtype, FloatDType::F16 | FloatDType::BF16);
    match has_warpgroups(device) {
        true => dtypes.iter().filter(is_half).copied().collect(),
        false => Vec::new(),
    }
}

/// Returns the largest error of `case`, with its results multiplied by `scale`.
fn compare(case: &Case, device: &Device, dtype: FloatDType, scale: f64) -> Finding {
    let cpu = Device::flex();
    let inputs: Vec<_> = case.sizes.iter().enumerate().map(|(i, &len)| normal(len, i as u64 + 1)).collect();
    let inputs: Vec<_> = inputs.iter().map(|input| values(flat(input, dtype, &cpu))).collect();
    let expected = run(&case.plain, &inputs, FloatDType::F64, &cpu.autodiff());
    let device = device.clone().autodiff();
    let bound = bound(case.op, dtype, &device);
    let finding = |error, place| Finding { op: case.op, dtype, error, bound, place };
    // If a device cannot compile or launch a kernel, burn panics.
    match catch_unwind(AssertUnwindSafe(|| run(&case.fused, &inputs, dtype, &device))) {
        Err(panic) => finding(None, message(&*panic).to_owned()),
        Ok(actual) => {
            let largest = |values: &[f64]| values.iter().fold(0.0f64, |max, value| max.max(value.abs()));
            let mut worst = finding(Some(0.0), "output".to_owned());
            for (i, (actual, expected)) in actual.iter().zip(&expected).enumerate() {
                let factor = if i == 0 { scale } else { 1.0 };
                let difference = |(a, e): (&f64, &f64)| (a * factor - e).abs();
                let differences: Vec<_> = actual.iter().zip(expected).map(difference).collect();
                let is_finite = differences.iter().all(|difference| difference.is_finite());
                let error = largest(&differences) / largest(expected).max(1e-12);
                let error = (is_finite && actual.len() == expected.len()).then_some(error);
                let place = if i == 0 { "output".to_owned() } else { format!("gradient {}", i - 1) };
                worst = worse(worst, finding(error, place));
            }
            worst
        }
    }
}

/// Returns the result of `op`, and the gradients of its inputs for the loss `Σ result · normal`.
fn run(
    op: &dyn Fn(&[Tensor<1>]) -> Tensor<1>,
    inputs: &[Vec<f64>],
    dtype: FloatDType,
    device: &Device,
) -> Vec<Vec<f64>> {
    let leaves: Vec<_> = inputs.iter().map(|input| flat(input, dtype, device).require_grad()).collect();
    let output = op(&leaves);
    let weights = flat(&normal(output.dims()[0], 99), output.dtype().into(), device);
    let result = values(output.clone());
    let gradients = (output * weights).sum().backward();
    let of_leaf = |leaf: &Tensor<1>| leaf.grad(&gradients).map_or_else(Vec::new, values);
    std::iter::once(result).chain(leaves.iter().map(of_leaf)).collect()
}

/// Returns standard normal values that depend only on `seed` and the index.
fn normal(len: usize, seed: u64) -> Vec<f64> {
    let uniform = |i: u64| (mix((seed << 40 | i).wrapping_mul(GOLDEN)) >> 11) as f64 / (1u64 << 53) as f64;
    let value = |i: u64| {
        let (a, b) = (uniform(2 * i), uniform(2 * i + 1));
        (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    };
    (0..len as u64).map(value).collect()
}

fn flat(values: &[f64], dtype: FloatDType, device: &Device) -> Tensor<1> {
    let dtype = DType::from(dtype);
    let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// Panics if the device has failed.
fn values(tensor: Tensor<1>) -> Vec<f64> {
    tensor.into_data().convert_dtype(DType::F64).iter().collect()
}

/// Returns the error bound relative to the largest value. `f32` values are rounded to 24 bits, or to 11 bits in
/// products with TF32. In `bf16`, the result and the incoming gradient are rounded to 8 bits.
fn bound(op: FusedOp, dtype: FloatDType, device: &Device) -> f64 {
    let has_products = matches!(
        op,
        FusedOp::MatrixProduct
            | FusedOp::Linear
            | FusedOp::WarpgroupAttention
            | FusedOp::Attention
            | FusedOp::CrossEntropy
            | FusedOp::Experts
    );
    match dtype {
        FloatDType::F32 if has_products && rounds_to_tf32(device) => 4e-3,
        FloatDType::F32 => 1e-5,
        FloatDType::F64 => 1e-10,
        _ => 2e-2,
    }
}

#[cfg(not(feature = "cube"))]
fn has_warpgroups(_: &Device) -> bool {
    false
}

#[cfg(not(feature = "cube"))]
fn rounds_to_tf32(_: &Device) -> bool {
    false
}
