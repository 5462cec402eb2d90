//! Experts of a mixture, and their selection, on the device of [`crate::cube`].

use burn::tensor::{DType, Device, FloatDType, Tensor};
use kiln_model::ops::{experts, experts_reference, router_load, top_k};
use kiln_model::{MOE, ModelConfig, MoeConfig};

use crate::cube::{F32_BOUND, assert_decoder_on_wgpu, assert_on_wgpu, device, dtypes, poison, tiny};
use crate::layers::{operation, sizes as sizes_of_layer};
use crate::moe;
use crate::ops_experts::{Sizes, chosen, over, over_choices};
use crate::ops_router::{SIZES as SIZES_OF_ROUTERS, chosen as chosen_by_routers, routed};
use crate::ops_support::*;

/// Seven tokens, each with two of four experts.
const ODD: Sizes = Sizes { tokens: 7, per_token: 2, experts: 4, d_model: 5, d_ff: 3 };

/// Expert 1 has no token. In the last sizes, the matrices of experts begin where a device allows a buffer to begin.
#[test]
fn experts_on_wgpu() {
    let one = Sizes { tokens: 1, per_token: 1, experts: 3, d_model: 1, d_ff: 1 };
    let wide = Sizes { tokens: 33, per_token: 3, experts: 6, d_model: 20, d_ff: 17 };
    let aligned = Sizes { tokens: 70, per_token: 2, experts: 4, d_model: 32, d_ff: 16 };
    for sizes in [one, ODD, wide, aligned] {
        assert_on_wgpu(over(experts, sizes), over(experts_reference, sizes), &sizes.flat());
    }
}

#[test]
fn all_tokens_on_one_expert_on_wgpu() {
    let sizes = Sizes { per_token: 1, ..ODD };
    for expert in [0, 3] {
        let choices = || vec![expert; sizes.tokens];
        let reference = over_choices(experts_reference, sizes, choices());
        assert_on_wgpu(over_choices(experts, sizes, choices()), reference, &sizes.flat());
    }
}

#[test]
fn an_idle_expert_has_zero_gradient_on_wgpu() {
    let device = device();
    poison(&device);
    let inputs = inputs(&ODD.flat());
    let run = run_tracked(&over(experts, ODD), &inputs, FloatDType::F32, &device.autodiff(), &[true; 5]);
    for gradient in &run.gradients[2..] {
        for (expert, values) in gradient.as_ref().expect("a gradient").chunks(5 * 3).enumerate() {
            assert_eq!(values.iter().all(|value| *value == 0.0), expert == 1, "expert {expert}");
        }
    }
}

/// Asserts that values are NaN exactly where the expected ones are, and that the others are close.
#[track_caller]
fn assert_close_or_nan(actual: &[f64], expected: &[f64], bound: f64, what: &str) {
    let nans = |values: &[f64]| (0..values.len()).filter(|&i| values[i].is_nan()).collect::<Vec<_>>();
    assert_eq!(nans(actual), nans(expected), "{what}: which values are NaN");
    let numbers = |values: &[f64]| values.iter().copied().filter(|value| !value.is_nan()).collect::<Vec<_>>();
    assert_close(&numbers(actual), &numbers(expected), bound, what);
}

/// Asserts that `op` in `dtype` on the device gives the values of a run in f32 on flex, including NaN.
#[track_caller]
fn assert_runs_as_on_flex(op: impl Operation, inputs: &[Vec<f64>], (dtype, bound): (FloatDType, f64)) {
    let rounded: Vec<_> = inputs.iter().map(|v| values(flat(v, dtype, &Device::flex()))).collect();
    let expected = run(&op, &rounded, FloatDType::F32);
    let (device, all) = (device(), vec![true; inputs.len()]);
    poison(&device);
    let actual = run_tracked(&op, &rounded, dtype, &device.autodiff(), &all);
    assert_close_or_nan(&actual.output, &expected.output, bound, &format!("{dtype:?} output"));
    for (i, pair) in actual.gradients.iter().zip(&expected.gradients).enumerate() {
        match pair {
            (Some(a), Some(e)) => assert_close_or_nan(a, e, bound, &format!("{dtype:?} gradient {i}")),
            (a, e) => assert_eq!(a, e, "{dtype:?} gradient {i}"),
        }
    }
}

/// Tokens 0 and 1 choose expert 0, tokens 2 and 3 expert 1. Expert 1's result for token 0 overflows, and so does the
/// gradient of token 1 after its last matrix. Expert 1's results for tokens 2 and 3 do not come close to overflowing.
#[test]
fn an_unchosen_overflow_does_not_count_on_wgpu() {
    let sizes = Sizes { tokens: 4, per_token: 1, experts: 2, d_model: 4, d_ff: 3 };
    let device = device();
    for (dtype, bound) in dtypes() {
        if !device.supports_dtype(DType::from(dtype)) {
            eprintln!("SKIPPED: this device has no {dtype:?}");
            continue;
        }
        // Its square overflows.
        let large = if dtype == FloatDType::F16 { 300.0 } else { 1e20 };
        let mut inputs = inputs(&sizes.flat());
        let [x, weights, gate, up, down] = &mut inputs[..] else { panic!("five operands") };
        for (token, factor) in [large, 1.0, 0.0, 0.0].into_iter().enumerate() {
            x[token * sizes.d_model] = factor;
        }
        weights[2..].fill(1.0 / large);
        for projection in [gate, up] {
            let (first, second) = projection.split_at_mut(sizes.d_model * sizes.d_ff);
            first[..sizes.d_ff].fill(1.0 / large);
            second[..sizes.d_ff].fill(large);
        }
        down[sizes.d_model * sizes.d_ff..].fill(large);
        let of_experts = over_choices(experts, sizes, vec![0, 0, 1, 1]);
        let op = |t: &[Tensor<1>]| {
            // The gradient of token 1 is large; the output is unchanged.
            let factors = [1.0, large, 1.0, 1.0].map(|factor| [factor; 4]).concat();
            let y = of_experts(t);
            let factors = flat(&factors, FloatDType::from(y.dtype()), &y.device());
            let scaled = y.clone() * factors;
            scaled.clone() - scaled.detach() + y.detach()
        };
        assert_runs_as_on_flex(op, &inputs, (dtype, bound));
    }
}

/// A token that is NaN only affects the gradients of its own experts.
#[test]
fn a_nan_token_spares_other_experts_on_wgpu() {
    let mut inputs = inputs(&ODD.flat());
    inputs[0][..ODD.d_model].fill(f64::NAN);
    assert_runs_as_on_flex(over(experts, ODD), &inputs, (FloatDType::F32, F32_BOUND));
}

#[test]
fn routing_on_wgpu() {
    for sizes @ [tokens, experts, _] in SIZES_OF_ROUTERS {
        for normalized in [true, false] {
            let plain = routed(sizes, true, normalized);
            assert_on_wgpu(routed(sizes, false, normalized), plain, &[tokens * experts]);
        }
        let load = |device: &Device| {
            let probabilities = Tensor::ones([tokens, experts], device);
            values(router_load(probabilities, chosen_by_routers(sizes, &device.clone().inner())))
        };
        assert_eq!(load(&device().autodiff()), load(&Device::flex()));
    }
}

#[test]
fn top_k_on_wgpu() {
    let device = device();
    for (dtype, _) in dtypes().into_iter().filter(|(dtype, _)| device.supports_dtype(DType::from(*dtype))) {
        for (rows, width, k) in [(1, 1, 1), (5, 4, 4), (100, 128, 8), (3000, 7, 3), (33, 301, 5)] {
            // Equal values occur only by chance, or often.
            let equal = (0..rows * width).map(|i| (i * i % 5) as f64 - 2.0).collect();
            for values in [normal(rows * width, 3), equal] {
                let on =
                    |device: &Device| chosen(top_k(flat(&values, dtype, device).reshape([rows, width]), k));
                poison(&device);
                assert_eq!(on(&device), on(&Device::flex()), "{dtype:?} {rows} {width} {k}");
            }
        }
    }
}

/// With NaN, and with values below all finite ones, the selected indices are valid and distinct.
#[test]
fn top_k_of_what_is_no_number_on_wgpu() {
    const K: usize = 3;
    let device = device();
    for (dtype, _) in dtypes().into_iter().filter(|(dtype, _)| device.supports_dtype(DType::from(*dtype))) {
        for width in [3, 4, 7, 64, 301] {
            let (nan, low, high) = (f64::NAN, f64::NEG_INFINITY, f64::INFINITY);
            let row = |f: &dyn Fn(usize) -> f64| (0..width).map(f).collect::<Vec<_>>();
            let rows = [
                row(&|_| nan),
                row(&|i| if i % 2 == 1 { nan } else { i as f64 }),
                row(&|i| if i == width - 1 { 1.0 } else { nan }),
                row(&|i| if i % 2 == 0 { nan } else { low }),
                row(&|i| i as f64),
                row(&|_| low),
                row(&|i| if i == 1 { -1.0 } else { low }),
                row(&|i| if i == 2 { high } else { -(i as f64) }),
            ];
            let on = |device: &Device| {
                chosen(top_k(flat(&rows.concat(), dtype, device).reshape([rows.len(), width]), K))
            };
            poison(&device);
            let (found, expected) = (on(&device), on(&Device::flex()));
            for (index, (found, expected)) in found.chunks(K).zip(expected.chunks(K)).enumerate() {
                let mut distinct = found.to_vec();
                distinct.sort_unstable();
                distinct.dedup();
                let are_there = found.iter().all(|index| (0..width as i64).contains(index));
                assert!(are_there && distinct.len() == K, "{dtype:?} {width}, row {index}: {found:?}");
                // With NaN, their choice is unspecified.
                assert!(index < 4 || found == expected, "{dtype:?} {width}, row {index}: {found:?}");
            }
        }
    }
}

#[test]
fn a_mixture_on_wgpu() {
    for expert_bias in [false, true] {
        let moe = MoeConfig {
            experts: 4,
            experts_per_token: 2,
            expert_d_ff: 12,
            shared_expert_d_ff: Some(7),
            expert_bias,
            ..MoeConfig::default()
        };
        let config = ModelConfig { feed_forward: MOE.to_owned(), moe: Some(moe), ..tiny(true) };
        assert_decoder_on_wgpu(&config);
    }
}

/// A token that is NaN makes its own output NaN, and a bias that is NaN still selects valid experts.
#[test]
fn a_mixture_of_what_is_no_number_on_wgpu() {
    let precision = (FloatDType::F32, F32_BOUND);
    for expert_bias in [false, true] {
        let config = moe::config(MoeConfig { expert_bias, ..moe::experts() });
        let (layer, d) = (moe::layer(&config), config.d_model);
        let inputs = inputs(&sizes_of_layer(&layer, d));
        let mut with_nan = inputs.clone();
        with_nan[0][d..2 * d].fill(f64::NAN);
        assert_runs_as_on_flex(operation(&layer, d), &with_nan, precision);
        if expert_bias {
            for nan in [2..3, 0..4] {
                // The third input, after `x` and the router.
                let mut with_nan = inputs.clone();
                with_nan[2][nan].fill(f64::NAN);
                assert_runs_as_on_flex(operation(&layer, d), &with_nan, precision);
            }
        }
    }
}
