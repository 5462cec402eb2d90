//! Kernels on CUDA with a stand-in for the driver, so that NVRTC compiles them and they are captured.
//! `benches/kernels.sh` sets this up and examines the captured kernels.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use burn::tensor::{DType, Device, Int, Tensor, TensorData};
use kiln::config::{MUON, OptimSection};
use kiln::optimizers::Optimizers;
use kiln::sharded::ShardedDecoder;
use kiln_collectives::DType as BufferDType;
use kiln_model::config::{AttentionBias, MOE, MoeConfig, PARALLEL_RESIDUAL};
use kiln_model::decoder::{self, Decoder};
use kiln_model::ops::{HeadLayout, LogitOptions};
use kiln_model::{Context, Key, Layers, ModelConfig, ops};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Policy, ShardError};

fn variable(name: &str) -> PathBuf {
    let value = std::env::var_os(name);
    value.unwrap_or_else(|| panic!("{name} is not set: benches/kernels.sh runs this")).into()
}

/// Returns the kernels launched so far, in order.
fn launched() -> Vec<String> {
    let text = fs::read_to_string(variable("FAKE_CUDA_TRACE")).unwrap_or_default();
    let launches = text.lines().filter(|line| line.starts_with("launch "));
    let kernel = |line: &str| {
        let field = line.split(' ').find_map(|field| field.strip_prefix("kernel="));
        field.expect("a launch names its kernel").to_owned()
    };
    launches.map(kernel).collect()
}

#[test]
#[ignore = "needs stand-ins for the driver: benches/kernels.sh"]
fn operations_of_burn() {
    let folder = variable("FAKE_CUDA_PTX_DIR");
    let files = || fs::read_dir(&folder).expect("the folder").count();
    let before = (launched().len(), files());

    // The stand-in copies memory, but its kernels do nothing.
    let device = Device::cuda(0);
    let values: Vec<f32> = (0..64).map(|i| i as f32).collect();
    let sent = Tensor::<1>::from_floats(&values[..], &device);
    assert_eq!(sent.clone().into_data().try_to_vec::<f32>().expect("f32"), values);
    let x = Tensor::<2>::ones([256, 256], &device).cast(DType::BF16);
    let product = x.clone().matmul(x.transpose()).cast(DType::F32);
    let sum = (product.sum() + sent.sum()).into_data();
    assert_eq!(sum.shape().as_slice(), [1]);

    // At least the product, two casts and two sums.
    assert!(launched().len() - before.0 >= 5, "{} launches", launched().len());
    assert!(files() - before.1 >= 4, "{} modules", files());
}

/// Returns a decoder with every optional part of a layer.
fn model(head_dim: usize) -> ModelConfig {
    ModelConfig {
        vocab_size: 96,
        d_model: 64,
        layers: 1,
        heads: 2,
        kv_heads: 1,
        head_dim: Some(head_dim),
        d_ff: 96,
        attention_bias: AttentionBias::All,
        feed_forward_bias: true,
        qk_norm: true,
        dropout: 0.1,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

/// Returns a decoder with experts that are balanced by biases, which have their own update rule.
fn experts() -> ModelConfig {
    ModelConfig {
        feed_forward: MOE.to_owned(),
        feed_forward_bias: false,
        moe: Some(MoeConfig {
            experts: 4,
            experts_per_token: 2,
            expert_d_ff: 32,
            expert_bias: true,
            ..MoeConfig::default()
        }),
        ..model(64)
    }
}

fn ids(shift: i32, [rows, seq]: [usize; 2], device: &Device) -> Tensor<2, Int> {
    let ids: Vec<i32> = (0..(rows * seq) as i32).map(|i| (7 * i + shift) % 96).collect();
    Tensor::from_data(TensorData::new(ids, [rows, seq]), device)
}

/// Trains one step on two ranks that share a GPU.
fn step(model: &ModelConfig, compute_dtype: BufferDType, reduce_dtype: BufferDType) {
    let policy = Policy { compute_dtype, reduce_dtype, ..Policy::default() };
    let device = Device::cuda(0);
    // Covers the kernels of AdamW and of Muon.
    let section = OptimSection { kind: MUON.to_owned(), ..OptimSection::default() };
    let optimizer = Optimizers::default().make(&section).expect("a built-in optimizer");
    run_ranks(2, 1, |world| {
        let decoder = Decoder::new(&Layers::default(), model, Key::new(1), &device).expect("built-in layers");
        let builder = EngineBuilder::new(world, policy.clone(), None)?.optimizer(optimizer.clone());
        let sharded = ShardedDecoder::new(decoder, builder)?;
        let (engine, training) = (sharded.engine(), device.clone().autodiff());
        engine.begin_step();
        for last in [false, true] {
            let shape = [2, 64];
            let context = Context::training(Key::new(2), 0, model.dropout);
            let (inputs, targets) = (ids(0, shape, &training), ids(1, shape, &training));
            let pass = sharded.pass(&training);
            let loss = decoder::loss(&pass, inputs, targets, 1.0 / 256.0, &context);
            engine.check()?;
            engine.backward(loss, last)?;
        }
        let update = engine.update(1e-3, 1.0)?;
        // Values that no kernel has computed may be NaN.
        engine.outcome(update).map(drop)
    })
    .unwrap_or_else(|error: kiln_shard::ranks::RanksError<ShardError>| panic!("{error}"));
}

/// Patterns for the names under which our kernels are launched: a function's name, the values of its
/// generics, and a hash. `*` matches any text.
fn kernels() -> BTreeSet<String> {
    fn look(path: &Path, names: &mut BTreeSet<String>) {
        if path.is_dir() {
            let entries = fs::read_dir(path).expect("a folder");
            entries.for_each(|entry| look(&entry.expect("an entry").path(), names));
            return;
        }
        let text = fs::read_to_string(path).expect("a source");
        for kernel in text.split("#[cube(launch").skip(1) {
            let signature = kernel.split("fn ").nth(1).and_then(|rest| rest.split('(').next());
            let (name, generics) = match signature.expect("a function").split_once('<') {
                Some((name, generics)) => (name, generics.trim_end_matches('>')),
                None => (signature.expect("a function"), ""),
            };
            let generics = generics.split(", ").filter_map(|generic| generic.split_once(':'));
            let generics = generics.map(|(letter, _)| format!("_{}_*", letter.to_lowercase()));
            names.insert(format!("{name}{}_*", generics.collect::<String>()));
        }
    }
    let mut names = BTreeSet::new();
    for sources in ["model/src/ops/cube", "shard/src", "collectives/src/kernels.rs"] {
        look(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../..").join(sources), &mut names);
    }
    names
}

/// Returns `true` if `name` matches `pattern`, in which `*` matches any text. The pattern does not start with
/// `*`.
fn fits(pattern: &str, name: &str) -> bool {
    let mut parts = pattern.split('*');
    let Some(mut rest) = parts.next().and_then(|start| name.strip_prefix(start)) else {
        return false;
    };
    parts.all(|part| match rest.find(part) {
        Some(at) => {
            rest = &rest[at + part.len()..];
            true
        }
        None => false,
    })
}

/// Kernels that no run on CUDA launches, since cuBLASLt scales and adds its products itself.
const ELSEWHERE: [&str; 2] = ["add_scaled_kernel_s_*_f_*_n_*_*", "scale_kernel_f_*_n_*_*"];

/// Launches every kernel of Kiln, in both precisions, in a training step.
#[test]
#[ignore = "needs stand-ins for the driver: benches/kernels.sh"]
fn operations_of_ours() {
    let (f32, bf16) = (BufferDType::F32, BufferDType::BF16);
    for [compute, reduce] in [[f32, f32], [bf16, f32], [bf16, bf16]] {
        step(&model(64), compute, reduce);
    }
    for dtype in [f32, bf16] {
        step(&model(128), dtype, f32);
        // Each query head has a key head of its own: no key head is shared.
        for head_dim in [64, 128] {
            step(&ModelConfig { kv_heads: 2, ..model(head_dim) }, dtype, f32);
        }
        // Heads of a width without a fitting tile use the whole matrix of scores.
        step(&model(12), dtype, f32);
    }
    step(&experts(), f32, f32);
    for dtype in [f32, bf16] {
        let feed_forward = |name: &str| ModelConfig { feed_forward: name.to_owned(), ..model(64) };
        step(&ModelConfig { block: Some(PARALLEL_RESIDUAL.to_owned()), ..feed_forward("geglu") }, dtype, f32);
        step(&feed_forward("squared_relu"), dtype, f32);
    }
    // A bias whose dtype differs from the product's is added by a kernel.
    let device = Device::cuda(0);
    let zeros = |shape: [usize; 2]| Tensor::<2>::zeros(shape, (&device, DType::BF16));
    ops::linear(zeros([8, 16]), zeros([16, 8]), Some(Tensor::zeros([8], (&device, DType::F32))));
    // Weights of rows are those of data with masked targets.
    for dtype in [DType::F32, DType::BF16] {
        let hidden = Tensor::<2>::zeros([8, 16], (&device.clone().autodiff(), dtype)).require_grad();
        let (weight, targets) =
            (Tensor::zeros([32, 16], (&hidden.device(), dtype)), Tensor::zeros([8], &device));
        let (weights, options) = (Tensor::ones([8], &hidden.device()), LogitOptions::default());
        let layout = HeadLayout::VocabRows;
        ops::linear_cross_entropy_with(hidden, weight, layout, targets, Some(weights), 1.0, options);
    }
    device.sync().expect("a device that works");

    let (ours, launched) = (kernels(), launched());
    assert!(ours.len() >= 30, "{ours:?}");
    for kernel in &ours {
        let seen = launched.iter().any(|name| fits(kernel, name));
        let elsewhere = ELSEWHERE.contains(&kernel.as_str());
        assert!(seen != elsewhere, "{kernel}: launched {seen}");
    }
    for kernel in ELSEWHERE {
        assert!(ours.contains(kernel), "{kernel} is not in {ours:?}");
    }
}
