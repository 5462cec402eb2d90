//! Bugs planted into Kiln's kernels, in the form in which NVRTC compiles them. Each bug must be reported by name,
//! with the line, or found by the test that compares with a reference. The stand-in for NVIDIA's driver plants the
//! bugs and executes the kernels: `benches/standins/execute.sh planted`.

use std::env;
use std::process::{Command, Output};

use burn::tensor::{DType, Device, FloatDType, Tensor};
use kiln_model::ops;

use crate::cube_attention::executed::check_attention;
use crate::ops_residual::{sizes_of_two_layers, two_layers, two_layers_reference};
use crate::ops_support::{assert_close, inputs, is_executed, run, run_tracked, with_exact_bounds};

/// Fails unless kernels are executed.
fn executed() {
    assert!(is_executed(), "kernels are not executed: benches/standins/execute.sh runs this");
    with_exact_bounds();
}

#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/execute.sh planted"]
fn attention() {
    executed();
    check_attention([1, 130, 2, 1, 64], DType::BF16);
}

/// Tests the kernels for an A100, which has no warpgroup instructions.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/execute.sh planted"]
fn attention_on_sm_80() {
    attention();
}

/// Tests the kernels without tensor cores.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/execute.sh planted"]
fn attention_in_f32() {
    executed();
    check_attention([1, 130, 2, 1, 64], DType::F32);
}

/// Compares an operation in f32 with its reference, forward and backward.
fn check(
    name: &str,
    op: impl Fn(&[Tensor<1>]) -> Tensor<1>,
    reference: impl Fn(&[Tensor<1>]) -> Tensor<1>,
    sizes: &[usize],
) {
    executed();
    let inputs = inputs(sizes);
    let expected = run(&reference, &inputs, FloatDType::F64);
    let device = Device::cuda(0).autodiff();
    let actual = run_tracked(&op, &inputs, FloatDType::F32, &device, &vec![true; sizes.len()]);
    assert_close(&actual.output, &expected.output, 1e-5, &format!("{name}: output"));
    for (i, (a, e)) in actual.gradients.iter().zip(&expected.gradients).enumerate() {
        let (a, e) = (a.as_ref().expect("a gradient"), e.as_ref().expect("a gradient"));
        assert_close(a, e, 1e-5, &format!("{name}: gradient {i}"));
    }
}

/// Uses rows for two cubes of two warps, whose bytes fill whole allocations.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/execute.sh planted"]
fn norm() {
    type Norm = fn(Tensor<3>, Tensor<1>, f64) -> Tensor<3>;
    let shape = [1, 18, 256];
    let op = |f: Norm| {
        move |t: &[Tensor<1>]| f(t[0].clone().reshape(shape), t[1].clone(), 1e-5).reshape([18 * 256])
    };
    check("norm", op(ops::rms_norm), op(ops::rms_norm_reference), &[18 * 256, 256]);
}

/// Tests the norm of a stream to which a layer has been added, and the norm's gradient, which includes the gradient
/// of the stream.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/execute.sh planted"]
fn residual() {
    let shape = [18, 256];
    let op = |t: &[Tensor<1>]| two_layers(t, shape);
    let reference = |t: &[Tensor<1>]| two_layers_reference(t, shape);
    check("residual", op, reference, &sizes_of_two_layers(shape));
}

/// Uses more elements than whole cubes have units for.
#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/execute.sh planted"]
fn swiglu() {
    let op = |t: &[Tensor<1>]| ops::swiglu(t[0].clone(), t[1].clone());
    let reference = |t: &[Tensor<1>]| ops::swiglu_reference(t[0].clone(), t[1].clone());
    check("swiglu", op, reference, &[4224, 4224]);
}

/// A bug: an edit of a line of a kernel, a test that launches the kernel, and the expected report.
struct Bug {
    name: &'static str,
    test: &'static str,
    /// Prefix of the kernel's name.
    kernel: &'static str,
    /// Selects one of the lines that contain the text: see `Plant` in `benches/standins/ptx/src/plant.rs`.
    which: &'static str,
    find: &'static str,
    put: &'static str,
    told: Told,
}

enum Told {
    /// The interpreter reports the bug. Contains the start of the message, which names the kernel and the line.
    Fault(&'static str),
    /// A comparison with the reference fails. Contains the name of the comparison.
    Result(&'static str),
}

const FORWARD: &str = "forward_kernel_e_bf16_n_8";
const KEYS: &str = "keys_kernel_e_bf16";
const QUERIES: &str = "queries_kernel_e_bf16_n_8";
const FMA: &str = "forward_kernel_e_f32";
const NORM: &str = "forward_kernel_f_f32_w_f32";
const NORM_BACKWARD: &str = "backward_kernel_f_f32_w_f32";
const STREAM: &str = "residual_norm_kernel_f_f32_w_f32";
const STREAM_BACKWARD: &str = "residual_backward_kernel_f_f32_w_f32";
const SUMS: &str = "block_sums_kernel";
const SWIGLU: &str = "forward_kernel_g_f32_u_f32";

const BUGS: &[Bug] = &[
    Bug {
        name: "a missing bar.sync",
        test: "attention",
        kernel: FORWARD,
        which: "1",
        find: "bar.sync 0;",
        put: "",
        told: Told::Fault("race: shared memory"),
    },
    Bug {
        name: "a wait for cp.async one group short",
        test: "attention",
        kernel: FORWARD,
        which: "1",
        find: "cp.async.wait_all;",
        put: "cp.async.wait_group 1;",
        told: Told::Fault("not waited for: cp.async"),
    },
    Bug {
        name: "no wait for cp.async",
        test: "attention",
        kernel: QUERIES,
        which: "1",
        find: "cp.async.wait_all;",
        put: "",
        told: Told::Fault("not waited for: cp.async"),
    },
    Bug {
        name: "a row past the last key",
        test: "attention",
        kernel: FORWARD,
        which: "13",
        find: "setp.lt.u32",
        put: "setp.le.u32",
        told: Told::Fault("uninitialised: nothing has written global memory"),
    },
    Bug {
        name: "a fragment that is not transposed",
        test: "attention_on_sm_80",
        kernel: FORWARD,
        which: "1",
        find: ".x4.trans.shared",
        put: ".x4.shared",
        told: Told::Result("out of [1, 130, 2, 1, 64] in BF16"),
    },
    Bug {
        name: "a transposed fragment",
        test: "attention_on_sm_80",
        kernel: FORWARD,
        which: "1",
        find: ".x4.shared",
        put: ".x4.trans.shared",
        told: Told::Result("out of [1, 130, 2, 1, 64] in BF16"),
    },
    Bug {
        name: "a mask off by one",
        test: "attention",
        kernel: FORWARD,
        which: "1",
        find: "setp.gt.s32 *, 8;",
        put: "setp.ge.s32 *, 8;",
        told: Told::Result("out of [1, 130, 2, 1, 64] in BF16"),
    },
    Bug {
        name: "a shuffle from a wrong lane",
        test: "attention",
        kernel: FORWARD,
        which: "1",
        find: "shfl.sync.bfly",
        put: "shfl.sync.up",
        told: Told::Result("out of [1, 130, 2, 1, 64] in BF16"),
    },
    Bug {
        name: "an accumulator without its zeros",
        test: "attention",
        kernel: FORWARD,
        which: "1",
        find: "mov.f32 *, 0f00000000;",
        put: "",
        told: Told::Fault("uninitialised: the thread has not written a register"),
    },
    Bug {
        name: "a stage that is read while it is copied to",
        test: "attention_on_sm_80",
        kernel: KEYS,
        which: "1",
        find: "and.b32 *, 32;",
        put: "and.b32 *, 0;",
        told: Told::Fault("not waited for: cp.async"),
    },
    Bug {
        name: "a fence of registers forgotten before wgmma",
        test: "attention",
        kernel: QUERIES,
        which: "last",
        find: "wgmma.fence.sync.aligned;",
        put: "",
        told: Told::Fault("not fenced: line "),
    },
    Bug {
        name: "a wait for wgmma one group short",
        test: "attention",
        kernel: QUERIES,
        which: "1",
        find: "wgmma.wait_group.sync.aligned 0;",
        put: "wgmma.wait_group.sync.aligned 1;",
        told: Told::Fault("not waited for: wgmma.mma_async in line "),
    },
    Bug {
        name: "a product that is not committed",
        test: "attention",
        kernel: FORWARD,
        which: "1",
        find: "wgmma.commit_group.sync.aligned;",
        put: "",
        told: Told::Fault("not waited for: wgmma.mma_async in line "),
    },
    Bug {
        name: "copies that are not fenced for wgmma",
        test: "attention",
        kernel: KEYS,
        which: "1",
        find: "fence.proxy.async.shared::cta;",
        put: "",
        told: Told::Fault("read by the async proxy without a fence.proxy.async"),
    },
    Bug {
        name: "an operand that is not transposed",
        test: "attention",
        kernel: FORWARD,
        which: "last",
        find: "always, 1, 1, 1;",
        put: "always, 1, 1, 0;",
        told: Told::Fault("out of bounds: 16 bytes of shared memory"),
    },
    Bug {
        name: "sums of an earlier product",
        test: "attention",
        kernel: KEYS,
        which: "1",
        find: "setp.ne.b32 first, zero, 0;",
        put: "setp.eq.b32 first, zero, 0;",
        told: Told::Fault("uninitialised: the thread has not written a register"),
    },
    Bug {
        name: "rows of a descriptor half as far apart",
        test: "attention",
        kernel: KEYS,
        which: "1",
        find: "or.b64 columns, columns, 0x40000040",
        put: "or.b64 columns, columns, 0x40000020",
        told: Told::Result("dk of [1, 130, 2, 1, 64] in BF16"),
    },
    Bug {
        name: "a barrier missing before shared memory is used again",
        test: "attention_in_f32",
        kernel: FMA,
        which: "1",
        find: "bar.sync 0;",
        put: "",
        told: Told::Fault("race: shared memory"),
    },
    Bug {
        name: "a block's number along the wrong axis",
        test: "norm",
        kernel: NORM,
        which: "1",
        find: "%ctaid.x;",
        put: "%ctaid.y;",
        told: Told::Fault("race: global memory"),
    },
    Bug {
        name: "a sum of two blocks into one place",
        test: "norm",
        kernel: NORM_BACKWARD,
        which: "1",
        find: "%ctaid.x;",
        put: "%ctaid.y;",
        told: Told::Fault("race: global memory"),
    },
    Bug {
        name: "a vector of four from an odd place",
        test: "norm",
        kernel: NORM,
        which: "1",
        find: "ld.global.nc.v4.f32 *];",
        put: "ld.global.nc.v4.f32 *+4];",
        told: Told::Fault("misaligned: 16 bytes of global memory"),
    },
    Bug {
        name: "a barrier that some threads do not come to",
        test: "norm",
        kernel: NORM,
        which: "3",
        find: "bar.sync 0;",
        put: "@%p5 bar.sync 0;",
        told: Told::Fault("divergent: lanes"),
    },
    Bug {
        name: "an index of shared memory off by one",
        test: "norm",
        kernel: NORM,
        which: "1",
        find: "setp.gt.u32 *, 31;",
        put: "setp.gt.u32 *, 32;",
        told: Told::Fault("out of bounds: 4 bytes of shared memory"),
    },
    Bug {
        name: "a layer taken from the stream",
        test: "residual",
        kernel: STREAM,
        which: "1",
        find: "add.f32",
        put: "sub.f32",
        told: Told::Result("residual: output"),
    },
    Bug {
        name: "the gradient of the stream at the next place",
        test: "residual",
        kernel: STREAM_BACKWARD,
        which: "last",
        find: "ld.global.nc.v4.f32 *];",
        put: "ld.global.nc.v4.f32 *+16];",
        told: Told::Fault("out of bounds: 16 bytes of global memory"),
    },
    Bug {
        name: "a sum read before others have written it",
        test: "norm",
        kernel: SUMS,
        which: "1",
        find: "bar.sync 0;",
        put: "",
        told: Told::Fault("uninitialised: nothing has written shared memory"),
    },
    Bug {
        name: "an index of device memory off by one",
        test: "swiglu",
        kernel: SWIGLU,
        which: "all",
        find: "setp.ge",
        put: "setp.gt",
        told: Told::Fault("out of bounds: 16 bytes of global memory"),
    },
];

/// Runs a test of this module in a separate process, with a bug.
fn run_with(bug: Option<&Bug>, test: &str) -> Output {
    let mut command = Command::new(env::current_exe().expect("this program"));
    command.args(["--exact", &format!("planted::{test}"), "--ignored", "--nocapture"]);
    if test == "attention_on_sm_80" {
        command.env("FAKE_CUDA_CAPABILITY", "8.0");
    }
    if let Some(Bug { kernel, which, find, put, .. }) = bug {
        command.env("FAKE_CUDA_PLANT", [*kernel, which, find, put].join("\n"));
    }
    command.output().expect("this program starts")
}

/// Returns the reason why `bug` was not found, or `None` if it was.
fn missed(bug: &Bug) -> Option<String> {
    let Output { status, stderr, .. } = run_with(Some(bug), bug.test);
    let said = String::from_utf8_lossy(&stderr);
    let Some(planted) = said.lines().find_map(|line| line.strip_prefix("planted in kernel ")) else {
        return Some("the kernel has no such line".to_owned());
    };
    let kernel = planted.split(',').next().unwrap_or_default();
    let told = match bug.told {
        Told::Fault(start) => said.lines().zip(said.lines().skip(1)).any(|(fault, place)| {
            fault.starts_with(start) && place.contains(&format!("kernel {kernel}, line "))
        }),
        Told::Result(name) => {
            said.lines().any(|line| line.starts_with(name) && line.contains(" instead of "))
        }
    };
    (status.success() || !told).then(|| format!("{status}:\n{said}"))
}

#[test]
#[ignore = "needs stand-ins for the driver: benches/standins/execute.sh planted"]
fn every_planted_bug_is_found() {
    for test in ["attention", "attention_on_sm_80", "attention_in_f32", "norm", "residual", "swiglu"] {
        let Output { status, stderr, .. } = run_with(None, test);
        assert!(status.success(), "{test} without a bug: {}", String::from_utf8_lossy(&stderr));
    }
    let mut found = Vec::new();
    let missed: Vec<_> = BUGS
        .iter()
        .filter_map(|bug| {
            let missed = missed(bug);
            found.extend(missed.is_none().then_some(bug.name));
            missed.map(|why| format!("{}: {why}", bug.name))
        })
        .collect();
    println!("found: {}", found.join("; "));
    assert!(missed.is_empty(), "not found:\n{}", missed.join("\n"));
}
