//! Matrix products by cuBLASLt, with the stand-ins of `benches/standins`. The stand-ins compute products on the host,
//! enforce cuBLASLt's rules, and write a trace of every call that reaches the driver. They run no kernels, so these
//! tests only use products that need none.
//!
//! `benches/standins/products.sh` runs these tests. On a machine with a GPU, `products_are_right` and
//! `a_layer_is_one_product` can run without the stand-ins; they then only check results.

mod algorithms;
mod fallback;

use std::collections::BTreeMap;
use std::io::{Read, Seek, SeekFrom};
use std::path::PathBuf;
use std::process::Command;
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::{env, fs, thread};

use burn::tensor::{DType, Device, FloatDType, Tensor, TensorData};
use burn_cubecl::CubeDevice;
use burn_cubecl::tensor::CubeTensor;
use cubecl::cuda::CudaDevice;
use cubecl_common::device::Device as _;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use kiln_model::ops;
use kiln_model::ops::cube::matmul::{Output, allow_tf32, matmul, rounds_to_tf32, transposed};

use crate::ops_support::{assert_close, flat, normal, values};

fn device() -> CubeDevice {
    CubeDevice::Cuda(CudaDevice::new(0))
}

/// Runs one test at a time, because all tests read the same trace.
fn alone() -> MutexGuard<'static, ()> {
    static ONE: Mutex<()> = Mutex::new(());
    ONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Waits for CubeCL's thread, but not for the GPU.
fn wait_for_thread() {
    DeviceHandle::<<CudaRuntime as Runtime>::Server>::new(CudaDevice::new(0).to_id())
        .submit_blocking(|_| ())
        .expect("CubeCL's thread is alive");
}

/// The lines that the stand-ins have written to the trace since it was started.
struct Trace {
    path: PathBuf,
    /// Bytes that the trace already contained.
    seen: u64,
}

impl Trace {
    /// Starts a trace, or returns `None` on a GPU.
    fn start_if_kept() -> Option<Trace> {
        let path = PathBuf::from(env::var_os("FAKE_CUDA_TRACE")?);
        wait_for_thread();
        let seen = fs::metadata(&path).map_or(0, |file| file.len());
        Some(Trace { path, seen })
    }

    fn start() -> Trace {
        Trace::start_if_kept().expect("FAKE_CUDA_TRACE; benches/standins/products.sh runs this")
    }

    /// Returns all lines, once CubeCL's thread has finished its work.
    fn lines(&self) -> Vec<String> {
        wait_for_thread();
        let mut text = String::new();
        let read = fs::File::open(&self.path).and_then(|mut file| {
            file.seek(SeekFrom::Start(self.seen))?;
            file.read_to_string(&mut text)
        });
        read.expect("a trace");
        text.lines().map(str::to_owned).collect()
    }

    /// Returns the products in the trace, by field.
    fn products(&self) -> Vec<BTreeMap<String, String>> {
        let lines = self.lines();
        let products = lines.iter().filter_map(|line| line.strip_prefix("cublaslt_matmul "));
        let field = |field: &str| {
            let (name, value) = field.split_once('=').expect("name=value");
            (name.to_owned(), value.to_owned())
        };
        products.map(|line| line.split(' ').map(field).collect()).collect()
    }

    fn count(&self, name: &str) -> usize {
        self.lines().iter().filter(|line| line.starts_with(name)).count()
    }
}

fn upload(bytes: &[u8], shape: &[usize], dtype: DType) -> CubeTensor {
    let (device, client) = (device(), device().client());
    let handle = client.create_from_slice(bytes);
    CubeTensor::new_contiguous(client, device, shape.to_vec().into(), handle, dtype)
}

fn download(tensor: &CubeTensor) -> Vec<f64> {
    let bytes = tensor.client.read_one(tensor.handle.clone()).expect("a readable tensor");
    let data = TensorData::from_bytes_vec(bytes.to_vec(), tensor.meta.shape().clone(), tensor.dtype);
    data.convert_dtype(DType::F64).try_to_vec().expect("just converted to f64")
}

fn data(values: Vec<f64>, dtype: DType) -> TensorData {
    let len = values.len();
    TensorData::new(values, [len]).convert_dtype(dtype)
}

/// The memory layout of a matrix.
#[derive(Clone, Copy, Debug)]
struct Lies {
    /// True for a transposed view.
    columns: bool,
    /// Number of unused elements between rows (or columns), and before the first one.
    gaps: usize,
    front: usize,
}

const LIES: [Lies; 5] = [
    Lies { columns: false, gaps: 0, front: 0 },
    Lies { columns: true, gaps: 0, front: 0 },
    Lies { columns: false, gaps: 3, front: 0 },
    Lies { columns: true, gaps: 8, front: 0 },
    Lies { columns: false, gaps: 0, front: 1 },
];

/// Creates a matrix of normal values, and returns these values in row-major order. Memory that is not part of the
/// matrix is NaN.
fn matrix(seed: u64, [rows, columns]: [usize; 2], lies: Lies, dtype: DType) -> (CubeTensor, Vec<f64>) {
    let exact = data(normal(rows * columns, seed), dtype).convert_dtype(DType::F64);
    let exact: Vec<f64> = exact.try_to_vec().expect("just converted to f64");
    let (lines, len) = if lies.columns { (columns, rows) } else { (rows, columns) };
    let step = len + lies.gaps;
    let mut stored = vec![f64::NAN; lies.front + lines * step];
    for (line, stored) in stored[lies.front..].chunks_mut(step).enumerate() {
        for (i, stored) in stored[..len].iter_mut().enumerate() {
            let (row, column) = if lies.columns { (i, line) } else { (line, i) };
            *stored = exact[row * columns + column];
        }
    }
    let mut tensor = upload(data(stored, dtype).as_bytes(), &[lines, step], dtype);
    tensor.handle = tensor.handle.offset_start((lies.front * dtype.size()) as u64);
    tensor.meta.shape = [lines, len].into();
    let tensor = if lies.columns { transposed(&tensor) } else { tensor };
    (tensor, exact)
}

fn multiplied(a: &[f64], b: &[f64], [m, k, n]: [usize; 3]) -> Vec<f64> {
    let at = |i: usize| (0..k).map(|j| a[i / n * k + j] * b[j * n + i % n]).sum();
    (0..m * n).map(at).collect()
}

/// Returns the bound relative to the largest value, for sums in f32 and one rounding to the output's dtype.
fn bound(written: DType) -> f64 {
    match written {
        DType::BF16 => 4e-3,
        DType::F16 => 5e-4,
        _ => 1e-6,
    }
}

fn type_of(dtype: DType) -> &'static str {
    match dtype {
        DType::BF16 => "14",
        DType::F16 => "2",
        _ => "0",
    }
}

/// `x · w`, `dy · wᵀ`, `xᵀ · dy` and views with gaps, in every dtype, to every kind of output.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn products_are_right() {
    let _alone = alone();
    let sizes = [[1, 1, 1], [3, 5, 7], [1, 7, 3], [5, 1, 4], [6, 9, 1], [33, 20, 17], [64, 32, 48]];
    let mut checked = 0;
    for (input, written) in [
        (DType::F32, DType::F32),
        (DType::BF16, DType::BF16),
        (DType::BF16, DType::F32),
        (DType::F16, DType::F16),
        (DType::F16, DType::F32),
    ] {
        for size in sizes {
            for lies in LIES.into_iter().flat_map(|a| LIES.map(|b| [a, b])) {
                check(size, lies, input, written);
                checked += 1;
            }
        }
    }
    assert_eq!(checked, 5 * 7 * 25);
}

fn check([m, k, n]: [usize; 3], lies: [Lies; 2], input: DType, written: DType) {
    let what = format!("{m} × {k} × {n}, {lies:?}, {input:?} to {written:?}");
    let (a, a_values) = matrix(1, [m, k], lies[0], input);
    let (b, b_values) = matrix(2, [k, n], lies[1], input);
    let exact = multiplied(&a_values, &b_values, [m, k, n]);
    let nan = upload(&vec![0xff; m * n * written.size()], &[m, n], written);
    let (sum, old) = matrix(3, [m, n], LIES[0], written);
    for (alpha, output, old) in [
        (1.0, Output::New(written), None),
        (0.5, Output::Overwrite(nan), None),
        (-2.0, Output::Add(sum), Some(old)),
    ] {
        let trace = Trace::start_if_kept();
        let added = old.is_some();
        let expected: Vec<f64> =
            (0..m * n).map(|i| alpha * exact[i] + old.as_ref().map_or(0.0, |old| old[i])).collect();
        let product = matmul(a.clone(), b.clone(), alpha as f32, output);
        assert_eq!((product.dtype, product.meta.shape().dims()), (written, [m, n]), "{what}");
        assert_close(&download(&product), &expected, bound(written), &what);

        let Some(trace) = trace else { continue };
        let [line] = &trace.products()[..] else { panic!("{what}: {:?}", trace.lines()) };
        assert_eq!(trace.count("launch"), 0, "{what}: {:?}", trace.lines());
        let field = |name: &str| line[name].as_str();
        // cuBLASLt's matrices are the transposes of ours, so the operands change places.
        assert_eq!([field("m"), field("n"), field("k")], [n, m, k].map(|size| size.to_string()), "{what}");
        let types = format!("{},{}", type_of(input), type_of(written));
        assert_eq!((field("types"), field("compute")), (types.as_str(), "68"), "{what}");
        let factors = (alpha.to_string(), if added { "1" } else { "0" });
        assert_eq!((field("alpha"), field("beta")), (factors.0.as_str(), factors.1), "{what}");
        assert_eq!(field("c"), field("d"), "{what}: in place");
        assert_eq!((field("epilogue"), field("workspace")), ("1", "33554432"), "{what}");
        if m > 1 && k > 1 && n > 1 {
            let letter = |lies: Lies| if lies.columns { "T" } else { "N" };
            let both = format!("{}{}", letter(lies[1]), letter(lies[0]));
            assert_eq!(field("transposed"), both, "{what}");
        }
    }
}

/// The second product of a kind reaches the driver as one call, and nothing else.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn only_the_first_product_asks() {
    let _alone = alone();
    let (a, _) = matrix(1, [31, 29], LIES[1], DType::BF16);
    let (b, _) = matrix(2, [29, 37], LIES[0], DType::BF16);
    let (sum, _) = matrix(3, [31, 37], LIES[0], DType::F32);

    let trace = Trace::start();
    matmul(a.clone(), b.clone(), 1.0, Output::Add(sum.clone()));
    // The caller asks whether there is an algorithm, and the plan asks for it.
    assert_eq!((trace.count("cublaslt_heuristic"), trace.products().len()), (2, 1));

    // Other factors, and overwriting the output: still the same problem.
    for output in [Output::Add(sum.clone()), Output::Overwrite(sum)] {
        let trace = Trace::start();
        matmul(a.clone(), b.clone(), 0.25, output);
        let lines = trace.lines();
        assert_eq!((lines.len(), trace.products().len()), (1, 1), "{lines:#?}");
    }

    // Another dtype of the output is another problem. The first iteration creates its plan, which the second
    // one uses.
    for heuristics in [2, 0] {
        let trace = Trace::start();
        drop(matmul(a.clone(), b.clone(), 1.0, Output::New(DType::BF16)));
        assert_eq!(trace.count("cublaslt_heuristic"), heuristics, "{:#?}", trace.lines());
        assert_eq!(trace.products().len(), 1);
        for line in trace.lines() {
            assert!(!line.contains("synchron"), "{line}");
            assert!(heuristics > 0 || !line.starts_with("alloc"), "{line}");
        }
    }
}

/// The bias of a layer is added by its product, even if the weight is a transposed view.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn a_layer_is_one_product() {
    let _alone = alone();
    let device = Device::cuda(0);
    for dtype in [FloatDType::F32, FloatDType::BF16, FloatDType::F16] {
        let [rows, d_in, d_out] = [2 * 9, 13, 11];
        let [x, w, bias] = [(rows * d_in, 1), (d_in * d_out, 2), (d_out, 3)]
            .map(|(len, seed)| flat(&normal(len, seed), dtype, &device));
        let [x_values, w_values, b_values] = [&x, &w, &bias].map(|t| values(t.clone()));
        // The weight as `[d_out, d_in]`, viewed as `[d_in, d_out]`.
        let rows_of_w: Vec<f64> = (0..d_in * d_out).map(|i| w_values[i % d_out * d_in + i / d_out]).collect();
        let exact = multiplied(&x_values, &rows_of_w, [rows, d_in, d_out]);
        let expected: Vec<f64> = exact.iter().enumerate().map(|(i, y)| y + b_values[i % d_out]).collect();

        let (x, w) = (x.reshape([2, 9, d_in]), w.reshape([d_out, d_in]).transpose());
        let trace = Trace::start_if_kept();
        let y: Tensor<3> = ops::linear(x, w, Some(bias));
        let bound = bound(DType::from(dtype));
        assert_close(&values(y), &expected, bound, &format!("{dtype:?}"));
        let Some(trace) = trace else { continue };
        let [product] = &trace.products()[..] else { panic!("{:#?}", trace.lines()) };
        assert_eq!((product["epilogue"].as_str(), product["transposed"].as_str()), ("4", "TN"));
        assert_eq!(trace.count("launch"), 0, "{:#?}", trace.lines());
    }
}

/// Each stream has its own workspace, and products wait for the results of other streams.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn streams_share_no_workspace() {
    let _alone = alone();
    let (a, _) = matrix(1, [19, 23], LIES[0], DType::F32);
    let (b, _) = matrix(2, [23, 5], LIES[0], DType::F32);
    let place = || {
        let trace = Trace::start();
        let twice = [1, 2].map(|_| matmul(a.clone(), b.clone(), 1.0, Output::New(DType::F32)));
        let products = trace.products();
        assert_eq!(products.len(), 2, "{:#?}", trace.lines());
        let place = |i: usize| [products[i]["stream"].clone(), products[i]["at"].clone()];
        assert_eq!(place(0), place(1));
        (place(0), download(&twice[0]), trace.lines())
    };
    let (here, expected, lines) = place();
    assert!(!lines.iter().any(|line| line.starts_with("stream_wait_event")), "{lines:#?}");
    let (there, product, lines) = thread::scope(|scope| scope.spawn(place).join().expect("no panic"));
    assert_eq!(product, expected);
    assert!(here[0] != there[0] && here[1] != there[1], "{here:?} {there:?}");
    let wait = format!("stream_wait_event stream={} ", there[0]);
    let position = |start: &str| lines.iter().position(|line| line.starts_with(start));
    let (waits, multiplies) = (position(&wait), position("cublaslt_matmul"));
    assert!(waits.is_some() && waits < multiplies, "{lines:#?}");
}

#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn tf32_is_asked_for() {
    let _alone = alone();
    let computes = |dtype| {
        let (a, _) = matrix(1, [4, 4], LIES[0], dtype);
        let trace = Trace::start();
        matmul(a.clone(), a, 1.0, Output::New(DType::F32));
        trace.products().iter().map(|line| line["compute"].clone()).collect::<Vec<_>>()
    };
    assert_eq!((computes(DType::F32), rounds_to_tf32(&Device::cuda(0))), (vec!["68".to_owned()], false));
    allow_tf32(true);
    let said = (computes(DType::F32), computes(DType::BF16), rounds_to_tf32(&Device::cuda(0)));
    allow_tf32(false);
    assert_eq!(said, (vec!["77".to_owned()], vec!["68".to_owned()], true));
    assert_eq!(computes(DType::F32), ["68"]);
}

/// If cuBLASLt refuses a product, readers of its result get the error, directly or through later results.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn a_failure_reaches_the_reader() {
    const RESULT: &str = "FAKE_CUBLASLT_RESULT";
    const NAME: &str = "cublaslt::a_failure_reaches_the_reader";
    if env::var_os(RESULT).is_none() {
        let _alone = alone();
        // In a separate process, where every product fails: 13 is CUBLAS_STATUS_EXECUTION_FAILED.
        let this = env::current_exe().expect("this program");
        let status =
            Command::new(this).args(["--exact", "--ignored", "--nocapture", NAME]).env(RESULT, "13").status();
        assert!(status.expect("this program starts").success());
        return;
    }
    let trace = Trace::start();
    let (a, _) = matrix(1, [3, 5], LIES[0], DType::F32);
    let (b, _) = matrix(2, [5, 3], LIES[0], DType::F32);
    let product = matmul(a.clone(), b, 1.0, Output::New(DType::F32));
    let next = matmul(product.clone(), a, 1.0, Output::New(DType::F32));
    for result in [&product, &next] {
        let error = result.client.read_one(result.handle.clone()).expect_err("nothing to read");
        let text = error.to_string();
        assert!(text.contains("CUBLAS_STATUS_EXECUTION_FAILED"), "{text}");
        assert!(text.contains("[3, 5] · [5, 3] of F32"), "{text}");
    }
    // The second product was skipped.
    assert_eq!(trace.products().len(), 1, "{:#?}", trace.lines());
}
