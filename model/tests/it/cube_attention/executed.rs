//! Runs attention on wgpu, possibly with a software Vulkan driver, or on an NVIDIA GPU if `KILN_TEST_DEVICE` is
//! `cuda`, and compares the results with the reference in f64.

use std::panic::{AssertUnwindSafe, catch_unwind};

use burn::tensor::{DType, FloatDType, Tensor, TensorData};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::wgpu::WgpuDevice;
use kiln_model::ops::cube::attention::{backward, backward_into, cached_forward, forward, forward_into};
use kiln_model::ops::{cached_attention_reference, causal_attention_reference};

use crate::ops_support::{assert_close, flat, normal, on_cuda, run, values, with_exact_bounds};

/// Batch size, sequence length, heads, key heads, width of a head.
pub type Sizes = [usize; 5];

fn device() -> CubeDevice {
    if on_cuda() {
        with_exact_bounds();
    }
    let (device, runtime) = match on_cuda() {
        true => (cuda(), "cuda"),
        false => (CubeDevice::Wgpu(WgpuDevice::default()), "wgpu"),
    };
    let name = device.client().name().to_string();
    assert!(name.contains(runtime), "{name} is not what these tests are for");
    device
}

#[cfg(feature = "cuda")]
fn cuda() -> CubeDevice {
    CubeDevice::Cuda(cubecl::cuda::CudaDevice::new(0))
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> CubeDevice {
    unreachable!("invariant: on_cuda checks the build")
}

/// Creates a tensor of bytes on the device.
fn tensor(bytes: &[u8], shape: &[usize], dtype: DType) -> CubeTensor {
    let device = device();
    let client = device.client();
    let handle = client.create_from_slice(bytes);
    CubeTensor::new_contiguous(client, device, shape.to_vec().into(), handle, dtype)
}

fn upload(values: &[f64], shape: &[usize], dtype: DType) -> CubeTensor {
    let data = TensorData::new(values.to_vec(), shape.to_vec()).convert_dtype(dtype);
    tensor(data.as_bytes(), shape, dtype)
}

/// Creates a tensor filled with NaN.
fn poisoned(shape: &[usize], dtype: DType) -> CubeTensor {
    tensor(&vec![0xff; shape.iter().product::<usize>() * dtype.size()], shape, dtype)
}

fn download(tensor: &CubeTensor) -> Vec<f64> {
    let bytes = tensor.client.read_one(tensor.handle.clone()).expect("a readable tensor");
    let data = TensorData::from_bytes_vec(bytes.to_vec(), tensor.meta.shape().clone(), tensor.dtype);
    data.convert_dtype(DType::F64).try_to_vec().expect("just converted to f64")
}

/// Rounds values to `dtype`.
fn rounded(values: Vec<f64>, dtype: DType) -> Vec<f64> {
    let len = values.len();
    let data = TensorData::new(values, [len]).convert_dtype(dtype).convert_dtype(DType::F64);
    data.try_to_vec().expect("just converted to f64")
}

struct Case {
    sizes: Sizes,
    /// Maximum number of rows that a row attends to.
    window: Option<usize>,
    dtype: DType,
    /// q, k, v, and the gradient of the result.
    inputs: [Vec<f64>; 4],
}

impl Case {
    fn new(sizes: Sizes, dtype: DType) -> Case {
        let [batch, seq, heads, kv_heads, dim] = sizes;
        let (q, kv) = (batch * seq * heads * dim, batch * seq * kv_heads * dim);
        // The last seed is the one with which `run` weights the result.
        let inputs = [(q, 1), (kv, 2), (kv, 3), (q, 99)].map(|(len, seed)| rounded(normal(len, seed), dtype));
        Case { sizes, window: None, dtype, inputs }
    }

    fn in_window(self, window: usize) -> Case {
        Case { window: Some(window), ..self }
    }

    fn shapes(&self) -> [[usize; 4]; 4] {
        let [batch, seq, heads, kv_heads, dim] = self.sizes;
        let (q, kv) = ([batch, seq, heads, dim], [batch, seq, kv_heads, dim]);
        [q, kv, kv, q]
    }

    fn uploaded(&self) -> [CubeTensor; 4] {
        let shapes = self.shapes();
        [0, 1, 2, 3].map(|i| upload(&self.inputs[i], &shapes[i], self.dtype))
    }

    fn bound(&self) -> f64 {
        match self.dtype {
            DType::F32 if on_cuda() => 1e-3,
            DType::F32 => 1e-4,
            _ => 1e-2,
        }
    }

    /// Returns the logarithm of each row's sum, in f64.
    fn lse(&self) -> Vec<f64> {
        let [batch, seq, heads, kv_heads, dim] = self.sizes;
        let [q, k, ..] = &self.inputs;
        let mut lse = Vec::new();
        for (b, i, h) in
            (0..batch).flat_map(|b| (0..seq).flat_map(move |i| (0..heads).map(move |h| (b, i, h))))
        {
            let g = h * kv_heads / heads;
            let q = &q[((b * seq + i) * heads + h) * dim..][..dim];
            let seen = self.window.map_or(0, |window| (i + 1).saturating_sub(window));
            let scores = (seen..=i).map(|j| {
                let k = &k[((b * seq + j) * kv_heads + g) * dim..][..dim];
                q.iter().zip(k).map(|(q, k)| q * k).sum::<f64>() / (dim as f64).sqrt()
            });
            let scores: Vec<f64> = scores.collect();
            let top = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            lse.push(top + scores.iter().map(|s| (s - top).exp()).sum::<f64>().ln());
        }
        lse
    }

    /// Runs forward and backward into poisoned tensors, and compares the results with the reference.
    fn check(&self) {
        let [batch, seq, heads, ..] = self.sizes;
        let what = |name| format!("{name} of {:?} in {:?}, window {:?}", self.sizes, self.dtype, self.window);
        let shapes = self.shapes();
        let reference = |t: &[Tensor<1>]| {
            let [q, k, v] = [0, 1, 2].map(|i| t[i].clone().reshape(shapes[i]));
            let len = shapes[0].iter().product::<usize>();
            causal_attention_reference(q, k, v, self.window).reshape([len])
        };
        let expected = run(&reference, &self.inputs[..3], FloatDType::F64);

        let [q, k, v, dout] = self.uploaded();
        let out = poisoned(&shapes[0], self.dtype);
        let lse = poisoned(&[batch, seq, heads], DType::F32);
        forward_into(&q, &k, &v, seq, self.window, &out, &lse);
        assert_close(&download(&out), &expected.output, self.bound(), &what("out"));
        assert_close(&download(&lse), &self.lse(), self.bound(), &what("lse"));

        let gradients = [0, 1, 2].map(|i| poisoned(&shapes[i], self.dtype));
        let [dq, dk, dv] = &gradients;
        backward_into([&q, &k, &v], self.window, &out, &lse, &dout, dq, Some((dk, dv)));
        for (i, name) in ["dq", "dk", "dv"].into_iter().enumerate() {
            let (actual, expected) = (download(&gradients[i]), &expected.gradients[i]);
            let expected = expected.as_ref().expect("tracked");
            if (seq == 1 || self.window == Some(1)) && name != "dv" {
                // A single score has no slope: there is no largest value to compare with.
                assert!(expected.iter().all(|v| *v == 0.0));
                assert!(actual.iter().all(|v| v.abs() < self.bound()), "{}", what(name));
            } else {
                assert_close(&actual, expected, self.bound(), &what(name));
            }
        }
    }
}

/// Compares the kernels with the reference.
pub fn check_attention(sizes: Sizes, dtype: DType) {
    Case::new(sizes, dtype).check();
}

/// Lengths around those of tiles, groups of one, two and four heads, and widths that are or are not multiples of what
/// the units process.
///
/// In the last sizes, the gradients of keys have one cube per key head or per two query heads, depending on the
/// device. Some of the sizes with grouped heads before them have one cube per query head.
const SIZES: [Sizes; 16] = [
    [1, 1, 1, 1, 8],
    [2, 7, 2, 2, 8],
    [1, 63, 4, 2, 40],
    [2, 65, 4, 1, 40],
    [1, 130, 2, 1, 64],
    [1, 321, 2, 1, 64],
    [2, 65, 2, 2, 64],
    [1, 1, 4, 1, 64],
    [1, 63, 4, 1, 128],
    [2, 130, 2, 1, 128],
    [1, 7, 2, 1, 128],
    [1, 33, 2, 2, 72],
    [1, 40, 2, 1, 256],
    [70, 7, 4, 1, 8],
    [140, 7, 4, 1, 8],
    [140, 3, 4, 1, 64],
];

#[test]
fn attention_on_wgpu_matches_reference_in_f32() {
    SIZES.into_iter().for_each(|sizes| Case::new(sizes, DType::F32).check());
}

#[test]
fn attention_on_wgpu_matches_reference_in_f16() {
    SIZES.into_iter().for_each(|sizes| Case::new(sizes, DType::F16).check());
}

/// bf16 is the dtype of training on NVIDIA GPUs, which wgpu does not support.
#[test]
fn attention_on_cuda_matches_reference_in_bf16() {
    if on_cuda() {
        SIZES.into_iter().for_each(|sizes| Case::new(sizes, DType::BF16).check());
    } else {
        eprintln!("SKIPPED: KILN_TEST_DEVICE is not cuda");
    }
}

/// Windows that begin and end within tiles, at their edges, and before the first row of a tile.
///
/// Each window needs its own kernel, which NVRTC compiles for half a second. On CUDA, every window is tested
/// with one head width for each method, f32 without tensor cores and bf16 with them, and some windows with
/// the other widths.
#[test]
fn windowed_attention_on_wgpu_matches_reference() {
    let sizes =
        [[1, 1, 1, 1, 8], [2, 65, 4, 1, 40], [1, 130, 2, 1, 64], [2, 97, 2, 1, 128], [1, 40, 2, 1, 256]];
    for sizes in sizes {
        let width = sizes[4];
        let some = |all: &'static [usize], every: &[usize]| match !on_cuda() || every.contains(&width) {
            true => all,
            false => &all[1..3],
        };
        for window in some(&[1, 33, 64, 3, 7, 15, 16, 17, 31, 32, 65], &[40, 128]) {
            Case::new(sizes, DType::F32).in_window(*window).check();
        }
        Case::new(sizes, DType::F16).in_window(33).check();
        if on_cuda() {
            for window in some(&[1, 63, 64, 7, 65], &[64, 128]) {
                Case::new(sizes, DType::BF16).in_window(*window).check();
            }
        }
    }
}

/// A window as long as the sequence uses the kernels for no window.
#[test]
fn attention_on_wgpu_in_a_full_window_keeps_bits() {
    let [q, k, v, dout] = Case::new([2, 65, 4, 2, 64], DType::F32).uploaded();
    let run = |window| {
        let (out, lse) = forward(&q, &k, &v, window);
        let gradients = backward([&q, &k, &v], window, &out, &lse, &dout, [true; 3]);
        let gradients = gradients.map(|gradient| download(&gradient.expect("wanted")));
        (download(&out), download(&lse), gradients)
    };
    let full = run(None);
    assert!(run(Some(65)) == full && run(Some(1000)) == full);
    assert!(run(Some(64)) != full);
}

/// Scores in the hundreds would overflow without the running maximum.
#[test]
fn attention_on_wgpu_with_large_scores() {
    let mut case = Case::new([1, 70, 2, 1, 8], DType::F32);
    case.inputs[0].iter_mut().for_each(|q| *q *= 40.0);
    case.inputs[1].iter_mut().for_each(|k| *k *= 10.0);
    case.check();
}

/// Returns one dtype for each method: without tensor cores, and on CUDA with them.
fn ways() -> Vec<DType> {
    if on_cuda() { vec![DType::F32, DType::BF16] } else { vec![DType::F32] }
}

#[test]
fn attention_on_wgpu_has_the_same_bits_each_time() {
    for dtype in ways() {
        let [q, k, v, dout] = Case::new([2, 65, 4, 2, 64], dtype).uploaded();
        let run = || {
            let (out, lse) = forward(&q, &k, &v, None);
            let gradients = backward([&q, &k, &v], None, &out, &lse, &dout, [true; 3]);
            let gradients = gradients.map(|gradient| download(&gradient.expect("wanted")));
            (download(&out), download(&lse), gradients)
        };
        let first = run();
        assert!(first.0.iter().any(|v| *v != 0.0));
        assert!(first == run(), "{dtype:?}");
    }
}

#[test]
fn attention_on_wgpu_returns_requested_gradients() {
    let [q, k, v, dout] = Case::new([1, 9, 2, 1, 8], DType::F32).uploaded();
    let (out, lse) = forward(&q, &k, &v, None);
    let gradients = |wanted| backward([&q, &k, &v], None, &out, &lse, &dout, wanted);
    let all = gradients([true; 3]).map(|gradient| download(&gradient.expect("wanted")));
    for wanted in [[true, false, false], [false, true, false], [false, false, true], [false; 3]] {
        for (i, gradient) in gradients(wanted).into_iter().enumerate() {
            assert_eq!(gradient.is_some(), wanted[i], "gradient {i} of {wanted:?}");
            if let Some(gradient) = gradient {
                assert!(download(&gradient) == all[i], "gradient {i} of {wanted:?}");
            }
        }
    }
}

/// Attention for the last rows of a sequence. The rows beyond `filled` are NaN.
#[test]
fn cached_attention_on_wgpu_matches_reference() {
    let cases = [
        ([1, 1, 1, 1, 8], 1, 1, None),
        ([1, 1, 4, 2, 40], 130, 131, None),
        ([3, 1, 4, 4, 64], 93, 200, None),
        ([2, 5, 4, 1, 8], 196, 200, None),
        ([1, 70, 4, 1, 8], 130, 156, None),
        ([2, 65, 2, 2, 128], 65, 70, None),
        ([1, 1, 4, 2, 40], 130, 131, Some(33)),
        ([2, 5, 4, 1, 8], 196, 200, Some(7)),
        ([1, 70, 4, 1, 8], 130, 156, Some(1)),
        ([1, 70, 4, 1, 8], 130, 156, Some(64)),
    ];
    // Widths that tensor cores multiply; first all columns are visible, then some, and stages are reused.
    let of_tensor_cores = [
        ([1, 1, 4, 2, 64], 130, 140, None),
        ([1, 70, 4, 1, 64], 330, 340, None),
        ([2, 65, 2, 1, 128], 200, 210, None),
        ([1, 70, 2, 1, 64], 130, 156, Some(64)),
    ];
    cases.into_iter().for_each(|case| check_cached(case, DType::F32));
    if on_cuda() {
        of_tensor_cores.into_iter().for_each(|case| check_cached(case, DType::BF16));
    }
}

/// Compares attention for the last rows of a cache, with the given numbers of filled and allocated rows, with the
/// reference.
fn check_cached((sizes, filled, capacity, window): (Sizes, usize, usize, Option<usize>), dtype: DType) {
    let [batch, seq, heads, kv_heads, dim] = sizes;
    let [q, k, v] = [(seq, heads, 1), (filled, kv_heads, 2), (filled, kv_heads, 3)]
        .map(|(rows, heads, seed)| rounded(normal(batch * rows * heads * dim, seed), dtype));
    let bound = if dtype == DType::F32 { 1e-4 } else { 1e-2 };
    let kept = |rows: &[f64]| {
        let row = kv_heads * dim;
        let beyond = vec![f64::NAN; (capacity - filled) * row];
        let kept: Vec<f64> = rows.chunks(filled * row).flat_map(|rows| [rows, &beyond].concat()).collect();
        upload(&kept, &[batch, capacity, kv_heads, dim], dtype)
    };
    let actual =
        cached_forward(&upload(&q, &[batch, seq, heads, dim], dtype), &kept(&k), &kept(&v), filled, window);
    let cpu = burn::tensor::Device::flex();
    let of = |x: &[f64], rows, heads| flat(x, FloatDType::F64, &cpu).reshape([batch, rows, heads, dim]);
    let expected = cached_attention_reference(
        of(&q, seq, heads),
        of(&k, filled, kv_heads),
        of(&v, filled, kv_heads),
        filled,
        window,
    );
    let what = format!("{seq} of {filled} rows of {capacity}, window {window:?}, in {dtype:?}");
    assert_close(&download(&actual), &values(expected), bound, &what);
}

#[test]
fn attention_on_wgpu_refuses_unsupported_dtypes() {
    if on_cuda() {
        eprintln!("SKIPPED: NVIDIA GPUs have all dtypes");
        return;
    }
    let x = poisoned(&[1, 4, 1, 8], DType::BF16);
    let panic = catch_unwind(AssertUnwindSafe(|| forward(&x, &x, &x, None))).expect_err("no bf16");
    let message = panic.downcast_ref::<String>().expect("a message");
    assert!(message.contains("this device cannot compute in BF16"), "{message}");
}

#[test]
#[should_panic(expected = "3 heads cannot share 2 key heads")]
fn attention_on_wgpu_rejects_ungroupable_heads() {
    let kv = poisoned(&[1, 4, 2, 8], DType::F32);
    forward(&poisoned(&[1, 4, 3, 8], DType::F32), &kv, &kv, None);
}

#[test]
#[should_panic(expected = "a GPU needs a multiple of 8")]
fn attention_on_wgpu_rejects_odd_heads() {
    let x = poisoned(&[1, 4, 1, 12], DType::F32);
    forward(&x, &x, &x, None);
}
