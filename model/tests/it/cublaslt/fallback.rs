//! Products for which cuBLASLt has no algorithm at first, or none at all.

use std::env;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::Command;

use burn::tensor::{DType, Device, FloatDType, Tensor};
use kiln_model::ops;
use kiln_model::ops::cube::matmul::{Output, allow_tf32, matmul};

use super::{LIES, Trace, alone, bound, download, matrix, multiplied};
use crate::ops_support::{assert_close, flat, normal, values};

/// Runs the test `name` in a separate process, with a trace, for each value of `FAKE_CUBLASLT_NONE_ABOVE`. Within
/// such a process, returns the value instead.
fn none_above(name: &str, values: &[u32]) -> Option<u32> {
    const SETTING: &str = "FAKE_CUBLASLT_NONE_ABOVE";
    if let Ok(value) = env::var(SETTING) {
        return Some(value.parse().expect("bytes"));
    }
    let _alone = alone();
    let name = format!("cublaslt::fallback::{name}");
    for value in values {
        let trace = tempfile::NamedTempFile::new().expect("a file");
        let mut command = Command::new(env::current_exe().expect("this program"));
        command.args(["--exact", "--ignored", "--nocapture", &name]);
        let status = command.env(SETTING, value.to_string()).env("FAKE_CUDA_TRACE", trace.path()).status();
        assert!(status.expect("this program starts").success(), "{SETTING}={value}");
    }
    None
}

/// A plan retries without a workspace, and then with smaller alignments. The query whether there is an algorithm does
/// the same.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn retries_find_an_algorithm() {
    let Some(most) = none_above("retries_find_an_algorithm", &[256, 16, 4]) else { return };
    // The first matrix begins two bytes after the start of its memory.
    let (a, a_values) = matrix(1, [33, 20], LIES[4], DType::BF16);
    let (b, b_values) = matrix(2, [20, 17], LIES[1], DType::BF16);
    let trace = Trace::start();
    let product = matmul(a.clone(), b.clone(), 1.0, Output::New(DType::F32));
    let expected = multiplied(&a_values, &b_values, [33, 20, 17]);
    assert_close(&download(&product), &expected, bound(DType::F32), "a product after retries");

    let tries = [
        "aligned=256,2,256,256 workspace=33554432",
        "aligned=256,2,256,256 workspace=0",
        "aligned=16,2,16,16 workspace=0",
        "aligned=2,2,4,4 workspace=0",
    ];
    let needed = match most {
        256 => 2,
        16 => 3,
        _ => 4,
    };
    let lines = trace.lines();
    let asked: Vec<_> = lines.iter().filter(|line| line.starts_with("cublaslt_heuristic")).collect();
    let expected = tries[..needed].repeat(2);
    let is_as_expected = asked.iter().zip(&expected).all(|(line, expected)| line.contains(expected));
    assert!(asked.len() == expected.len() && is_as_expected, "{lines:#?}");
    assert_eq!((trace.products().len(), trace.count("launch")), (1, 0), "{lines:#?}");

    let trace = Trace::start();
    matmul(a, b, 1.0, Output::New(DType::F32));
    assert_eq!((trace.products().len(), trace.count("cublaslt_heuristic")), (1, 0), "{:#?}", trace.lines());
}

/// Without an error, burn's kernels would round `f32` to TF32.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/products.sh"]
fn f32_without_an_algorithm_is_an_error() {
    if none_above("f32_without_an_algorithm_is_an_error", &[0]).is_none() {
        return;
    }
    let (a, _) = matrix(1, [33, 20], LIES[0], DType::F32);
    let (b, _) = matrix(2, [20, 17], LIES[1], DType::F32);
    for asks in [4, 0] {
        let trace = Trace::start();
        let product = || matmul(a.clone(), b.clone(), 1.0, Output::New(DType::F32));
        let panic = catch_unwind(AssertUnwindSafe(product)).expect_err("an error at the product");
        assert_eq!(
            panic.downcast_ref::<String>().expect("a message"),
            "cuBLASLt has no algorithm for the product [33, 20] · [20, 17, transposed] of F32 in F32, but burn's \
             kernels would round the operands to TF32. Compute in bf16 (precision.compute = \"bf16\") or on the CPU \
             (device.backend = \"cpu\"), or allow TF32 in your program with \
             kiln_model::ops::cube::matmul::allow_tf32(true)"
        );
        let queued = (trace.products().len(), trace.count("launch"));
        assert_eq!((trace.count("cublaslt_heuristic"), queued), (asks, (0, 0)), "{:#?}", trace.lines());
    }
}

/// Products without any algorithm: in half precision, and in `f32` with TF32 allowed. With a factor, in
/// place, and with a bias.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/execute.sh model"]
fn burn_multiplies() {
    if none_above("burn_multiplies", &[0]).is_none() {
        return;
    }
    let sizes @ [m, k, n] = [33, 20, 17];
    for (dtype, bound) in [(DType::BF16, 8e-3), (DType::F16, 1e-3), (DType::F32, 4e-3)] {
        allow_tf32(dtype == DType::F32);
        let trace = Trace::start();
        let what = format!("{dtype:?} by burn");
        let (a, a_values) = matrix(1, [m, k], LIES[0], dtype);
        let (b, b_values) = matrix(2, [k, n], LIES[1], dtype);
        let (sum, old) = matrix(3, [m, n], LIES[0], dtype);
        let exact = multiplied(&a_values, &b_values, sizes);
        let expected: Vec<f64> = exact.iter().zip(old).map(|(product, old)| 0.5 * product + old).collect();
        let product = matmul(a, b, 0.5, Output::Add(sum));
        assert_close(&download(&product), &expected, bound, &what);

        let device = Device::cuda(0);
        let tensor = |len, seed| flat(&normal(len, seed), FloatDType::from(dtype), &device);
        let (x, w, bias) = (tensor(m * k, 4), tensor(k * n, 5), tensor(n, 6));
        let [x_values, w_values, b_values] = [&x, &w, &bias].map(|t| values(t.clone()));
        let exact = multiplied(&x_values, &w_values, sizes);
        let expected: Vec<f64> = exact.iter().enumerate().map(|(i, y)| y + b_values[i % n]).collect();
        let y: Tensor<2> = ops::linear(x.reshape([m, k]), w.reshape([k, n]), Some(bias));
        assert_close(&values(y), &expected, bound, &format!("a layer, {what}"));
        assert!(trace.products().is_empty() && trace.count("launch") > 0, "{:#?}", trace.lines());
    }
}
