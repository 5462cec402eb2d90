//! The operations on wgpu, with a driver that runs on the CPU, compared with the references on flex; or, if
//! `KILN_TEST_DEVICE` is `cuda`, on an NVIDIA GPU instead of wgpu.

mod residual;

use std::panic::catch_unwind;
use std::sync::OnceLock;

use burn::module::Module;
use burn::module::{ModuleVisitor, Param};
use burn::tensor::{DType, Device, DeviceKind, FloatDType, Gradients, Int, Tensor, TensorData};
use kiln_model::config::{AttentionBias, RopeScaling};
use kiln_model::decoder;
use kiln_model::ops::{self, HeadLayout, RotaryFrequencies};
use kiln_model::{Context, Key, KeyValueCache, ModelConfig};

use crate::ops_linear::{one_by_one, sizes_of_three, three};
use crate::ops_support::*;

/// Error bound for f32, relative to the largest value of a result.
pub const F32_BOUND: f64 = 1e-5;
const F16_BOUND: f64 = 2e-2;

const CUDA_BF16_BOUND: f64 = 1e-2;

/// Returns the dtypes to test, with their bounds.
pub fn dtypes() -> Vec<(FloatDType, f64)> {
    let mut dtypes = vec![(FloatDType::F32, F32_BOUND), (FloatDType::F16, F16_BOUND)];
    if on_cuda() {
        dtypes.push((FloatDType::BF16, CUDA_BF16_BOUND));
    }
    dtypes
}

#[cfg(feature = "cuda")]
fn cuda() -> Device {
    Device::cuda(0)
}

#[cfg(not(feature = "cuda"))]
fn cuda() -> Device {
    unreachable!("invariant: on_cuda checks the build")
}

/// Returns Mesa's llvmpipe through wgpu, or GPU 0.
pub fn device() -> Device {
    if on_cuda() {
        with_exact_bounds();
    }
    static DEVICE: OnceLock<Device> = OnceLock::new();
    let device = DEVICE.get_or_init(|| {
        if on_cuda() {
            let device = cuda();
            let identity = catch_unwind(|| device.identity());
            assert!(matches!(identity, Ok(Some(_))), "there is no NVIDIA GPU");
            return device;
        }
        let device = Device::wgpu(DeviceKind::Cpu);
        let Ok(Some(identity)) = catch_unwind(|| device.identity()) else {
            panic!("no Vulkan driver on the CPU: install Debian's package mesa-vulkan-drivers");
        };
        let name = identity.name;
        assert!(name.contains("llvmpipe"), "wgpu runs on {name}, not on Mesa's llvmpipe");
        device
    });
    device.clone()
}

/// Writes NaN to the memory that the next results will use. If kernels are executed and checked, new memory already
/// contains NaN, and reads of it are reported.
pub fn poison(device: &Device) {
    if is_executed() {
        return;
    }
    for len in [64, 1 << 10, 1 << 14, 1 << 18] {
        let poisoned: Vec<_> = (0..3).map(|_| Tensor::<1>::full([len], f32::NAN, device)).collect();
        device.sync().expect("a device that works");
        drop(poisoned);
        let fresh = values(Tensor::<1>::empty([len], device));
        assert!(fresh.iter().all(|x| x.is_nan()), "new tensors of {len} values are not poisoned");
    }
}

/// Asserts that `op` on wgpu agrees with `reference` on flex, forward and backward, with the same bits in every run,
/// no matter which parents are tracked.
#[track_caller]
pub fn assert_on_wgpu(op: impl Operation, reference: impl Operation, sizes: &[usize]) {
    let (device, all) = (device(), vec![true; sizes.len()]);
    let mut checked = 0;
    for (dtype, bound) in dtypes() {
        if !device.supports_dtype(DType::from(dtype)) {
            eprintln!("SKIPPED: this device has no {dtype:?}");
            continue;
        }
        let flex = Device::flex();
        let inputs: Vec<_> = inputs(sizes).iter().map(|v| values(flat(v, dtype, &flex))).collect();
        let expected = run(&reference, &inputs, FloatDType::F64);
        let autodiff = device.clone().autodiff();
        let on_wgpu = |tracked: &[bool]| {
            poison(&device);
            run_tracked(&op, &inputs, dtype, &autodiff, tracked)
        };
        let actual = on_wgpu(&all);
        assert_close(&actual.output, &expected.output, bound, &format!("{dtype:?} output"));
        let largest = expected.gradients.iter().flatten().flatten().fold(0.0f64, |max, v| max.max(v.abs()));
        for (i, (a, e)) in actual.gradients.iter().zip(&expected.gradients).enumerate() {
            let (a, e) = (a.as_ref().expect("a gradient"), e.as_ref().expect("a gradient"));
            let what = format!("{dtype:?} gradient {i}");
            if e.iter().all(|v| *v == 0.0) {
                // A gradient of zeros has no largest value: a single score has no slope, and two rounded sums
                // cancel each other.
                assert!(a.iter().all(|v| v.abs() <= bound * largest), "{what}: {a:?} instead of zeros");
            } else {
                assert_close(a, e, bound, &what);
            }
        }
        // The tracked parents determine kernels, not dtypes.
        let subsets = if dtype == FloatDType::F32 { 1usize << sizes.len() } else { 0 };
        for subset in 0..subsets {
            let tracked: Vec<_> = (0..sizes.len()).map(|i| subset >> i & 1 == 1).collect();
            let again = on_wgpu(&tracked);
            assert!(again.output == actual.output, "{dtype:?} output with {tracked:?} tracked");
            for (i, &tracked) in tracked.iter().enumerate() {
                let first = actual.gradients[i].as_ref().filter(|_| tracked);
                assert!(again.gradients[i].as_ref() == first, "{dtype:?} gradient {i}");
            }
        }
        checked += 1;
    }
    assert!(checked > 0, "every dtype was skipped");
}

fn product(shape: &[usize]) -> usize {
    shape.iter().product()
}

#[test]
fn linear_on_wgpu() {
    type Linear = fn(Tensor<3>, Tensor<2>, Option<Tensor<1>>) -> Tensor<3>;
    let op = |f: Linear, rows: usize, d_in: usize, d_out: usize, transposed: bool| {
        move |t: &[Tensor<1>]| {
            let weight = match transposed {
                true => t[1].clone().reshape([d_out, d_in]).transpose(),
                false => t[1].clone().reshape([d_in, d_out]),
            };
            let y = f(t[0].clone().reshape([1, rows, d_in]), weight, t.get(2).cloned());
            y.reshape([rows * d_out])
        }
    };
    for (rows, d_in, d_out) in [(1, 1, 1), (3, 5, 7), (33, 20, 17), (64, 32, 48), (300, 70, 130)] {
        for (transposed, count) in [(false, 3), (true, 2)] {
            let sizes = [rows * d_in, d_in * d_out, d_out];
            assert_on_wgpu(
                op(ops::linear, rows, d_in, d_out, transposed),
                op(ops::linear_reference, rows, d_in, d_out, transposed),
                &sizes[..count],
            );
        }
    }
}

#[test]
fn linears_on_wgpu() {
    for shape in [[3, 5, 7], [64, 32, 48]] {
        let op = three(ops::linears, shape, [true; 3]);
        assert_on_wgpu(op, three(one_by_one, shape, [true; 3]), &sizes_of_three(shape));
    }
}

#[test]
fn rms_norm_on_wgpu() {
    type RmsNorm = fn(Tensor<3>, Tensor<1>, f64) -> Tensor<3>;
    let op = |f: RmsNorm, shape: [usize; 3]| {
        move |t: &[Tensor<1>]| f(t[0].clone().reshape(shape), t[1].clone(), 1e-5).reshape([product(&shape)])
    };
    // Not of width 1, where the gradient of `x` is a difference of equal numbers.
    for shape in [[1, 1, 3], [2, 33, 10], [1, 257, 64], [1, 3, 700], [1, 17, 1031]] {
        let sizes = [product(&shape), shape[2]];
        assert_on_wgpu(op(ops::rms_norm, shape), op(ops::rms_norm_reference, shape), &sizes);
    }
}

#[test]
fn swiglu_on_wgpu() {
    for len in [1, 2, 257, 4096] {
        let op = |t: &[Tensor<1>]| ops::swiglu(t[0].clone(), t[1].clone());
        let reference = |t: &[Tensor<1>]| ops::swiglu_reference(t[0].clone(), t[1].clone());
        assert_on_wgpu(op, reference, &[len, len]);
    }
}

#[test]
fn geglu_on_wgpu() {
    for len in [1, 2, 257, 4096] {
        let op = |t: &[Tensor<1>]| ops::geglu(t[0].clone(), t[1].clone());
        let reference = |t: &[Tensor<1>]| ops::geglu_reference(t[0].clone(), t[1].clone());
        assert_on_wgpu(op, reference, &[len, len]);
    }
}

#[test]
fn squared_relu_on_wgpu() {
    for len in [1, 2, 257, 4096] {
        let op = |t: &[Tensor<1>]| ops::squared_relu(t[0].clone());
        let reference = |t: &[Tensor<1>]| ops::squared_relu_reference(t[0].clone());
        assert_on_wgpu(op, reference, &[len]);
    }
}

#[test]
fn rotary_on_wgpu() {
    type Rotary = fn(Tensor<4>, RotaryFrequencies, usize) -> Tensor<4>;
    let llama3 = RopeScaling::Llama3 {
        factor: 8.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 64,
    };
    for scaling in [None, Some(llama3)] {
        let frequencies = RotaryFrequencies { theta: 10_000.0, scaling };
        let op = |f: Rotary, shape: [usize; 4], offset: usize| {
            move |t: &[Tensor<1>]| {
                f(t[0].clone().reshape(shape), frequencies, offset).reshape([product(&shape)])
            }
        };
        for (shape, offset) in [([1, 1, 1, 2], 0), ([2, 33, 3, 10], 5), ([1, 7, 4, 64], 100_000)] {
            let reference = op(ops::rotary_reference, shape, offset);
            assert_on_wgpu(op(ops::rotary, shape, offset), reference, &[product(&shape)]);
        }
    }
}

fn ints<const D: usize>(values: Vec<i64>, shape: [usize; D], device: &Device) -> Tensor<D, Int> {
    Tensor::from_data(TensorData::new(values, shape), device)
}

#[test]
fn embedding_on_wgpu() {
    type Embedding = fn(Tensor<2>, Tensor<2, Int>) -> Tensor<3>;
    // Ids that occur never, once and often.
    let op = |f: Embedding, [vocab, d_model]: [usize; 2], [batch, seq]: [usize; 2]| {
        move |t: &[Tensor<1>]| {
            let ids = (0..batch * seq).map(|i| (i * i * 7 % vocab) as i64).collect();
            let ids = ints(ids, [batch, seq], &t[0].device().inner());
            let y = f(t[0].clone().reshape([vocab, d_model]), ids);
            y.reshape([batch * seq * d_model])
        }
    };
    for (table, ids) in [([1, 1], [1, 1]), ([7, 5], [1, 3]), ([23, 20], [3, 31]), ([5, 64], [2, 301])] {
        let reference = op(ops::embedding_reference, table, ids);
        assert_on_wgpu(op(ops::embedding, table, ids), reference, &[product(&table)]);
    }
}

#[test]
fn ids_outside_the_vocabulary_are_nan_on_wgpu() {
    let device = device();
    let weight = Tensor::<2>::ones([5, 3], &device);
    for id in [-1, 5, 1 << 30] {
        let y = values(ops::embedding(weight.clone(), ints(vec![2, id], [1, 2], &device)));
        assert!(y[..3].iter().all(|&y| y == 1.0), "{y:?}");
        assert!(y[3..].iter().all(|y| y.is_nan()), "{id}: {y:?}");
    }
}

#[test]
fn attention_on_wgpu() {
    type Attention = fn(Tensor<4>, Tensor<4>, Tensor<4>, Option<usize>) -> Tensor<4>;
    let op = |f: Attention, [batch, seq, heads, kv_heads, head_dim]: [usize; 5], window: Option<usize>| {
        move |t: &[Tensor<1>]| {
            let kv = |t: &Tensor<1>| t.clone().reshape([batch, seq, kv_heads, head_dim]);
            let q = t[0].clone().reshape([batch, seq, heads, head_dim]);
            f(q, kv(&t[1]), kv(&t[2]), window).reshape([batch * seq * heads * head_dim])
        }
    };
    for shape @ [batch, seq, heads, kv_heads, head_dim] in
        [[1, 1, 1, 1, 2], [2, 7, 4, 2, 6], [1, 67, 3, 1, 20], [1, 130, 2, 2, 64]]
    {
        let (q, kv) = (batch * seq * heads * head_dim, batch * seq * kv_heads * head_dim);
        for window in [None, Some(3), Some(64)] {
            let reference = op(ops::causal_attention_reference, shape, window);
            assert_on_wgpu(op(ops::causal_attention, shape, window), reference, &[q, kv, kv]);
        }
    }
}

#[test]
fn cached_attention_on_wgpu() {
    let (heads, kv_heads, head_dim, capacity) = (4, 2, 10, 40);
    for (seq, filled, window) in
        [(1, 1, None), (1, 33, None), (5, 17, None), (40, 40, None), (5, 17, Some(4)), (1, 33, Some(9))]
    {
        let on = |device: &Device| {
            let tensor = |rows: usize, heads: usize, seed| {
                let x = flat(&normal(rows * heads * head_dim, seed), FloatDType::F32, device);
                x.reshape([1, rows, heads, head_dim])
            };
            let (k, v) = (tensor(capacity, kv_heads, 2), tensor(capacity, kv_heads, 3));
            values(ops::cached_attention(tensor(seq, heads, 1), k, v, filled, window))
        };
        poison(&device());
        assert_close(&on(&device()), &on(&Device::flex()), F32_BOUND, "cached attention");
    }
}

/// A weight of 0.5, 1.5 or 2.5 for each target.
fn weights(targets: &Tensor<1, Int>) -> Option<Tensor<1>> {
    Some(targets.clone().remainder_scalar(3).float().add_scalar(0.5))
}

#[test]
fn cross_entropy_on_wgpu() {
    type Loss = fn(Tensor<2>, Tensor<2>, HeadLayout, Tensor<1, Int>, f64) -> Tensor<1>;
    // Every fifth target is ignored, unless there is only one.
    let op = |f: Loss, layout: HeadLayout, [rows, d_model, vocab]: [usize; 3]| {
        move |t: &[Tensor<1>]| {
            let weight = match layout {
                HeadLayout::VocabRows => t[1].clone().reshape([vocab, d_model]),
                HeadLayout::VocabColumns => t[1].clone().reshape([d_model, vocab]),
            };
            let target = |i: usize| if i % 5 == 3 { -100 } else { (i * 7 % vocab) as i64 };
            let targets = ints((0..rows).map(target).collect(), [rows], &t[0].device().inner());
            f(t[0].clone().reshape([rows, d_model]), weight, layout, targets, 0.37)
        }
    };
    for layout in [HeadLayout::VocabRows, HeadLayout::VocabColumns] {
        // The last shape has more rows than a block.
        for shape @ [rows, d_model, vocab] in
            [[1, 1, 1], [1, 20, 17], [33, 20, 301], [257, 64, 1000], [4100, 8, 11]]
        {
            let reference = op(ops::linear_cross_entropy_reference, layout, shape);
            let sizes = [rows * d_model, d_model * vocab];
            assert_on_wgpu(op(ops::linear_cross_entropy, layout, shape), reference, &sizes);
        }
        const BOTH: ops::LogitOptions = ops::LogitOptions { softcap: Some(1.5), z_loss: Some(0.03) };
        const Z_LOSS: ops::LogitOptions = ops::LogitOptions { softcap: None, ..BOTH };
        const NONE: ops::LogitOptions = ops::LogitOptions { softcap: None, z_loss: None };
        let pairs: [[Loss; 2]; 4] = [
            [
                |h, w, l, t, s| ops::linear_cross_entropy_with(h, w, l, t, None, s, BOTH).total,
                |h, w, l, t, s| ops::linear_cross_entropy_with_reference(h, w, l, t, None, s, BOTH).total,
            ],
            [
                |h, w, l, t, s| ops::linear_cross_entropy_with(h, w, l, t, None, s, Z_LOSS).total,
                |h, w, l, t, s| ops::linear_cross_entropy_with_reference(h, w, l, t, None, s, Z_LOSS).total,
            ],
            [
                |h, w, l, t, s| {
                    ops::linear_cross_entropy_with(h, w, l, t.clone(), weights(&t), s, NONE).total
                },
                |h, w, l, t, s| {
                    ops::linear_cross_entropy_with_reference(h, w, l, t.clone(), weights(&t), s, NONE).total
                },
            ],
            [
                |h, w, l, t, s| {
                    ops::linear_cross_entropy_with(h, w, l, t.clone(), weights(&t), s, BOTH).total
                },
                |h, w, l, t, s| {
                    ops::linear_cross_entropy_with_reference(h, w, l, t.clone(), weights(&t), s, BOTH).total
                },
            ],
        ];
        for [fused, reference] in pairs {
            for shape @ [rows, d_model, vocab] in [[33, 20, 301], [257, 64, 1000], [4100, 8, 11]] {
                let sizes = [rows * d_model, d_model * vocab];
                assert_on_wgpu(op(fused, layout, shape), op(reference, layout, shape), &sizes);
            }
        }
    }
}

#[test]
fn an_invalid_target_gives_nan_loss_on_wgpu() {
    let device = device();
    let loss = |target: i64| {
        let (hidden, weight) = (Tensor::ones([2, 3], &device), Tensor::ones([5, 3], &device));
        let targets = ints(vec![1, target], [2], &device);
        values(ops::linear_cross_entropy(hidden, weight, HeadLayout::VocabRows, targets, 1.0))[0]
    };
    assert!((loss(4) - 2.0 * 5f64.ln()).abs() < 1e-5);
    assert!((loss(-1) - 5f64.ln()).abs() < 1e-5);
    assert!(loss(5).is_nan() && loss(1 << 30).is_nan());
}

/// The mask is the same as on the CPU, even if sums of counters carry into the upper 32 bits.
#[test]
fn dropout_on_wgpu() {
    for len in [1, 257, 40_000] {
        let op = |t: &[Tensor<1>]| ops::dropout(t[0].clone(), 0.3, 5, 11);
        let reference = |t: &[Tensor<1>]| ops::dropout_reference(t[0].clone(), 0.3, 5, 11);
        assert_on_wgpu(op, reference, &[len]);
    }
    for (p, key, offset) in [(0.5, u64::MAX, u64::MAX - 7), (0.1, 1 << 40, 3 << 33), (0.9, 0, 0)] {
        let on = |device: &Device| values(ops::dropout(Tensor::<1>::ones([100_003], device), p, key, offset));
        assert!(on(&device()) == on(&Device::flex()), "{p} {key} {offset}");
    }
}

pub fn tiny(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 50,
        d_model: 16,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        d_ff: 24,
        tie_embeddings: tied,
        qk_norm: !tied,
        window: (!tied).then_some(5),
        window_pattern: (!tied).then(|| "wf".to_owned()),
        attention_bias: if tied { AttentionBias::None } else { AttentionBias::All },
        feed_forward_bias: !tied,
        init_std: 0.2,
        dropout: 0.1,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

/// The gradients of all parameters, in the order of the module.
struct AllGradients(Gradients, Vec<Vec<f64>>);

impl ModuleVisitor for AllGradients {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.1.push(values(param.val().grad(&self.0).expect("a gradient")));
    }
}

/// Asserts that the loss and all gradients of a decoder on wgpu agree with those on flex.
#[track_caller]
pub fn assert_decoder_on_wgpu(config: &ModelConfig) {
    let on = |device: &Device| {
        let model = decoder(config, 3, &device.clone().autodiff());
        let ids = |from: i64| ints((0..38).map(|i| (from + 7 * i) % 50).collect(), [2, 19], device);
        let context = Context::training(Key::new(5), 7, 0.1);
        let loss = decoder::loss(&model, ids(0), ids(1), 1.0 / 38.0, &context);
        let mut gradients = AllGradients(loss.backward(), Vec::new());
        model.visit(&mut gradients);
        (values(loss), gradients.1)
    };
    poison(&device());
    let ((loss, gradients), (expected_loss, expected)) = (on(&device()), on(&Device::flex()));
    assert_close(&loss, &expected_loss, F32_BOUND, "loss");
    assert_eq!(gradients.len(), expected.len());
    assert!(expected.iter().flatten().any(|&g| g != 0.0));
    for (i, (gradient, expected)) in gradients.iter().zip(&expected).enumerate() {
        let bound = 1e-4;
        assert_close(gradient, expected, bound, &format!("gradient of parameter {i}"));
    }
}

#[test]
fn a_decoder_on_wgpu() {
    for tied in [true, false] {
        assert_decoder_on_wgpu(&tiny(tied));
    }
}

#[test]
fn generating_on_wgpu() {
    let on = |device: &Device, tied: bool| {
        let model = decoder(&tiny(tied), 3, device);
        let cache = KeyValueCache::new(12);
        let ids = |ids: &[i64]| ints(ids.to_vec(), [1, ids.len()], device);
        let next = |new: &[i64]| values(decoder::next_logits(&model, ids(new), &cache).expect("room"));
        [next(&[3, 1, 4]), next(&[1]), next(&[5, 9]), next(&[2, 6])].concat()
    };
    let bound = 1e-4;
    for tied in [true, false] {
        assert_close(&on(&device(), tied), &on(&Device::flex(), tied), bound, "logits");
    }
}
