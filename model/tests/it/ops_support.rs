//! Helpers for the tests of operations. An operation is a function of flat tensors, which it reshapes, to a tensor of
//! any shape; its inputs are given by their sizes.

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use kiln_model::{Decoder, Key, Layers, ModelConfig};

/// Returns whether kernels are tested on an NVIDIA GPU, because `KILN_TEST_DEVICE` is `cuda`. If it is not set, or
/// `wgpu`, kernels are tested on wgpu.
#[cfg(feature = "wgpu")]
pub fn on_cuda() -> bool {
    match std::env::var("KILN_TEST_DEVICE").as_deref() {
        Err(_) | Ok("wgpu") => false,
        Ok("cuda") if cfg!(feature = "cuda") => {
            kiln_nvidia::prepare_compiler();
            true
        }
        Ok("cuda") => panic!("KILN_TEST_DEVICE=cuda needs a build with feature cuda"),
        Ok(other) => panic!("KILN_TEST_DEVICE={other}: must be wgpu or cuda"),
    }
}

/// Returns whether the stand-in for NVIDIA's driver executes and checks kernels.
#[cfg(feature = "cuda")]
pub fn is_executed() -> bool {
    on_cuda() && std::env::var("FAKE_CUDA_EXECUTE").is_ok_and(|value| value != "0")
}

#[cfg(all(feature = "wgpu", not(feature = "cuda")))]
pub fn is_executed() -> bool {
    false
}

/// Gives each tensor of this thread a separate allocation if kernels are executed and checked, or
/// `KILN_TEST_EXACT_BOUNDS` is set. Bounds are then checked per tensor, and reads of unwritten values are
/// reported.
#[cfg(feature = "cuda")]
pub fn with_exact_bounds() {
    thread_local! {
        static DONE: std::cell::Cell<bool> = const { std::cell::Cell::new(false) };
    }
    let is_checked = is_executed() || std::env::var_os("KILN_TEST_EXACT_BOUNDS").is_some();
    if is_checked && !DONE.replace(true) {
        let device = cubecl::cuda::CudaDevice::new(0);
        let client = burn_cubecl::CubeDevice::Cuda(device).client();
        let mode = cubecl_runtime::memory_management::MemoryAllocationMode::Dedicated;
        // SAFETY: this is the mode of this thread's stream, from its first tensor on.
        unsafe { client.allocation_mode(mode) };
    }
}

#[cfg(all(feature = "wgpu", not(feature = "cuda")))]
pub fn with_exact_bounds() {}

/// An operation under test.
pub trait Operation: Fn(&[Tensor<1>]) -> Tensor<1> {}
impl<F: Fn(&[Tensor<1>]) -> Tensor<1>> Operation for F {}

/// Returns standard normal values that depend only on `seed` and the index.
pub fn normal(len: usize, seed: u64) -> Vec<f64> {
    let uniform = |i: u64| {
        let mut z = (seed << 40 | i).wrapping_add(1).wrapping_mul(0x9E37_79B9_7F4A_7C15);
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        ((z ^ (z >> 31)) >> 11) as f64 / (1u64 << 53) as f64
    };
    let value = |i: u64| {
        let (a, b) = (uniform(2 * i), uniform(2 * i + 1));
        (-2.0 * (1.0 - a).ln()).sqrt() * (std::f64::consts::TAU * b).cos()
    };
    (0..len as u64).map(value).collect()
}

/// Creates a flat tensor of `values` in `dtype`.
pub fn flat(values: &[f64], dtype: FloatDType, device: &Device) -> Tensor<1> {
    let dtype = DType::from(dtype);
    let data = TensorData::new(values.to_vec(), [values.len()]).convert_dtype(dtype);
    Tensor::from_data(data, (device, dtype))
}

/// Returns the values of a tensor.
pub fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f64> {
    tensor.into_data().convert_dtype(DType::F64).try_to_vec().expect("just converted to f64")
}

/// Returns the inputs of an operation that takes `sizes` values.
pub fn inputs(sizes: &[usize]) -> Vec<Vec<f64>> {
    sizes.iter().enumerate().map(|(i, &len)| normal(len, i as u64 + 1)).collect()
}

/// Output and gradients of one run.
pub struct Run {
    pub output: Vec<f64>,
    pub gradients: Vec<Option<Vec<f64>>>,
    pub output_dtype: DType,
}

/// Runs `op` and backward from `Σ output · normal`, tracking the inputs that are true in `tracked`.
pub fn run_tracked(
    op: &impl Operation,
    inputs: &[Vec<f64>],
    dtype: FloatDType,
    device: &Device,
    tracked: &[bool],
) -> Run {
    let leaves: Vec<_> = inputs
        .iter()
        .zip(tracked)
        .map(|(values, &tracked)| {
            let leaf = flat(values, dtype, device);
            if tracked { leaf.require_grad() } else { leaf }
        })
        .collect();
    let output = op(&leaves);
    let (output_values, output_dtype) = (values(output.clone()), output.dtype());
    assert_eq!(output.is_tracked(), tracked.contains(&true));
    let mut gradients = vec![None; inputs.len()];
    if output.is_tracked() {
        let weights = normal(output_values.len(), 99);
        let float: FloatDType = output_dtype.into();
        let grads = (output * flat(&weights, float, device)).sum().backward();
        for (gradient, leaf) in gradients.iter_mut().zip(&leaves) {
            *gradient = leaf.grad(&grads).map(|gradient| {
                assert_eq!(gradient.dtype(), DType::from(dtype), "a gradient has the dtype of its tensor");
                values(gradient)
            });
        }
    }
    Run { output: output_values, gradients, output_dtype }
}

/// Runs `op` with every input tracked.
pub fn run(op: &impl Operation, inputs: &[Vec<f64>], dtype: FloatDType) -> Run {
    run_tracked(op, inputs, dtype, &Device::flex().autodiff(), &vec![true; inputs.len()])
}

/// Asserts that two slices differ by at most `bound` times the largest expected magnitude.
#[track_caller]
pub fn assert_close(actual: &[f64], expected: &[f64], bound: f64, what: &str) {
    assert_eq!(actual.len(), expected.len(), "{what}: lengths");
    let scale = expected.iter().fold(1e-12f64, |max, v| max.max(v.abs()));
    for (i, (a, e)) in actual.iter().zip(expected).enumerate() {
        let error = (a - e).abs() / scale;
        assert!(error <= bound, "{what}[{i}]: {a} instead of {e}, an error of {error:e} (bound {bound:e})");
    }
}

/// Asserts that `op` and `reference` agree in `f32`, forward and backward.
#[track_caller]
pub fn assert_matches(op: impl Operation, reference: impl Operation, sizes: &[usize], bound: f64) {
    let inputs = inputs(sizes);
    let actual = run(&op, &inputs, FloatDType::F32);
    // The reference in f64, so that the bound applies only to the error of the operation.
    let expected = run(&reference, &inputs, FloatDType::F64);
    assert_runs_close(&actual, &expected, [bound; 2]);
}

/// Asserts that the outputs and gradients of two runs differ by at most the two bounds, as in
/// [`assert_close`].
#[track_caller]
pub fn assert_runs_close(actual: &Run, expected: &Run, [output, gradients]: [f64; 2]) {
    assert_close(&actual.output, &expected.output, output, "output");
    for (i, (a, e)) in actual.gradients.iter().zip(&expected.gradients).enumerate() {
        let (a, e) = (a.as_ref().expect("a gradient"), e.as_ref().expect("a gradient"));
        assert_close(a, e, gradients, &format!("gradient {i}"));
    }
}

/// Asserts that the gradients of `op` in `f64` match central differences of its output.
#[track_caller]
pub fn assert_finite_differences(op: impl Operation, sizes: &[usize]) {
    const STEP: f64 = 1e-5;
    let device = Device::flex();
    let inputs = inputs(sizes);
    let exact = run(&op, &inputs, FloatDType::F64);
    let loss = |inputs: &[Vec<f64>]| -> f64 {
        let tensors: Vec<_> = inputs.iter().map(|v| flat(v, FloatDType::F64, &device)).collect();
        let output = values(op(&tensors));
        output.iter().zip(normal(output.len(), 99)).map(|(y, w)| y * w).sum()
    };
    for (i, gradient) in exact.gradients.iter().enumerate() {
        let differences: Vec<f64> = (0..inputs[i].len())
            .map(|j| {
                let mut moved = inputs.clone();
                moved[i][j] += STEP;
                let above = loss(&moved);
                moved[i][j] -= 2.0 * STEP;
                (above - loss(&moved)) / (2.0 * STEP)
            })
            .collect();
        let gradient = gradient.as_ref().expect("a gradient");
        // The differences themselves are accurate to about STEP² plus the rounding of the loss over STEP.
        assert_close(gradient, &differences, 1e-7, &format!("gradient {i}"));
    }
}

/// Asserts that `op` on `bf16` tensors is close to `op` in `f32` on the same rounded values.
#[track_caller]
pub fn assert_half_precision(op: impl Operation, sizes: &[usize]) {
    let rounded: Vec<_> =
        inputs(sizes).iter().map(|v| values(flat(v, FloatDType::BF16, &Device::flex()))).collect();
    let half = run(&op, &rounded, FloatDType::BF16);
    let full = run(&op, &rounded, FloatDType::F32);
    // bf16 has eight bits of mantissa. The incoming gradients are rounded as well.
    assert_runs_close(&half, &full, [1.0 / 128.0, 1.0 / 64.0]);
}

/// Asserts that leaving any parents untracked changes neither the output nor the other gradients.
#[track_caller]
pub fn assert_untracked(op: impl Operation, sizes: &[usize]) {
    let (inputs, device) = (inputs(sizes), Device::flex().autodiff());
    let all = run(&op, &inputs, FloatDType::F32);
    for subset in 0..1usize << sizes.len() {
        let tracked: Vec<_> = (0..sizes.len()).map(|i| subset >> i & 1 == 1).collect();
        let some = run_tracked(&op, &inputs, FloatDType::F32, &device, &tracked);
        assert_eq!(some.output, all.output, "output with {tracked:?} tracked");
        for (i, &tracked) in tracked.iter().enumerate() {
            let expected = all.gradients[i].as_ref().filter(|_| tracked);
            assert_eq!(some.gradients[i].as_ref(), expected, "gradient {i}");
        }
    }
    // And on a device without autodiff at all.
    let plain: Vec<_> = inputs.iter().map(|v| flat(v, FloatDType::F32, &Device::flex())).collect();
    assert_eq!(values(op(&plain)), all.output, "output without autodiff");
}

/// Asserts that an operation gives the same bits under balanced checkpointing, where its parents and, if it is cheap,
/// its own result are computed again in backward.
#[track_caller]
pub fn assert_recomputed(op: impl Operation, sizes: &[usize]) {
    let inputs = inputs(sizes);
    // `mul_scalar` is memory bound: it runs again for a child that needs its output in backward.
    let through_parents = |leaves: &[Tensor<1>]| {
        let parents: Vec<_> = leaves.iter().map(|leaf| leaf.clone().mul_scalar(0.5)).collect();
        let result = op(&parents);
        // The square reads the result in backward.
        result.clone() * result
    };
    let tracked = vec![true; sizes.len()];
    let (kept, balanced) = (Device::flex().autodiff(), Device::flex().autodiff().gradient_checkpointing());
    let expected = run_tracked(&through_parents, &inputs, FloatDType::F32, &kept, &tracked);
    let actual = run_tracked(&through_parents, &inputs, FloatDType::F32, &balanced, &tracked);
    assert_eq!(actual.output, expected.output);
    assert_eq!(actual.gradients, expected.gradients);
}

/// Asserts that `op` gives the same bits on one, two and three threads.
#[track_caller]
pub fn assert_same_bits(op: impl Operation + Sync, sizes: &[usize]) {
    assert_same_bits_in(FloatDType::F32, op, sizes);
}

/// Asserts that `op` gives the same bits on one, two and three threads, in `dtype`.
#[track_caller]
pub fn assert_same_bits_in(dtype: FloatDType, op: impl Operation + Sync, sizes: &[usize]) {
    let inputs = inputs(sizes);
    let on = |threads: usize| {
        let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a thread pool");
        pool.install(|| run(&op, &inputs, dtype))
    };
    let one = on(1);
    for threads in [2, 3] {
        let more = on(threads);
        assert!(one.output == more.output, "output with {threads} threads");
        assert!(one.gradients == more.gradients, "gradients with {threads} threads");
    }
}

/// Makes all of the above assertions for one operation at one set of small sizes.
#[track_caller]
pub fn assert_sound(op: impl Operation + Sync, sizes: &[usize]) {
    assert_finite_differences(&op, sizes);
    assert_half_precision(&op, sizes);
    assert_untracked(&op, sizes);
    assert_recomputed(&op, sizes);
    assert_same_bits(&op, sizes);
}

/// Creates a decoder of built-in layers.
pub fn decoder(config: &ModelConfig, seed: u64, device: &Device) -> Decoder {
    Decoder::new(&Layers::default(), config, Key::new(seed), device).expect("built-in layers")
}
