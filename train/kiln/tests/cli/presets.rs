//! The configurations of this repository.

use std::path::{Path, PathBuf};

use burn::module::Module;
use kiln::config::{self, Choice, Config, DeviceDefaults, Precision};
use kiln::device;
use kiln::planner::{Gathers, RankShape, Speed};
use kiln::sharded::ShardedDecoder;
use kiln_model::{Decoder, Key, Layers, ModelConfig, PRESETS};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Optimizer, Policy, Recompute, ShardError, Strategy};

use crate::support::names;

pub fn folder() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../../configs")
}

fn load(name: &str) -> Config {
    config::load(&folder().join(format!("{name}.toml")), &[])
        .unwrap_or_else(|error| panic!("{name}: {error}"))
}

fn decoder(model: &ModelConfig) -> Decoder {
    Decoder::new(&Layers::default(), model, Key::new(0), &device::plain()).expect("built-in layers")
}

#[test]
fn every_configuration_loads_and_fits_together() {
    let mut files: Vec<_> = PRESETS.iter().map(|preset| format!("{preset}.toml")).collect();
    files.extend(["debug", "moe", "quickstart", "sft"].map(|name| format!("{name}.toml")));
    files.sort();
    // The folder also contains subfolders with scripts, and the schema.
    let found: Vec<_> = names(&folder()).into_iter().filter(|name| name.ends_with(".toml")).collect();
    assert_eq!(found, files);
    for file in files {
        let config = load(file.trim_end_matches(".toml"));
        for ranks in [1, 2] {
            let mut config = config.clone();
            config.train.ranks = ranks;
            config.validate().unwrap_or_else(|error| panic!("{file} on {ranks} ranks: {error}"));
        }
        assert!(config.data.path.starts_with("runs/data"), "{file}");
        assert_eq!(config.shard.strategy, Strategy::FullShard, "{file}");
    }
}

#[test]
fn presets_have_their_sizes() {
    for (name, parameters, vocab_size, seq_len, recompute) in [
        ("10m", 8_959_232, 4_096, 256, Recompute::None.into()),
        ("90m", 89_884_800, 32_000, 512, Recompute::None.into()),
        ("300m", 302_558_208, 32_000, 1_024, Recompute::None.into()),
        ("1b", 1_100_048_384, 32_000, 2_048, Recompute::None.into()),
        ("7b", 6_738_415_616, 32_000, 4_096, Choice::Auto),
    ] {
        let config = load(name);
        assert_eq!(config.model.preset.as_deref(), Some(name));
        assert_eq!(config.model.vocab_size, Some(vocab_size));
        // The file determines the vocabulary, not the data.
        let model = config.resolve_model(None, Some(77)).expect("a model");
        assert_eq!(Some(&model), ModelConfig::preset(name).as_ref(), "{name}");
        assert_eq!(decoder(&model).num_params(), parameters, "{name}");
        assert_eq!((config.data.seq_len, config.shard.recompute), (seq_len, recompute), "{name}");
    }
}

/// On a GPU, presets use bf16 and 16,384 tokens at a time, which fits into 80 GB by our own count; on the CPU,
/// presets stay as they are.
#[test]
fn presets_go_by_the_device() {
    const GIB: f64 = (1_u64 << 30) as f64;
    // `kiln::device` returns this for GPUs with bf16.
    let gpu = DeviceDefaults { precision: Precision::Bf16, tokens: 16_384 };
    for (name, on_cpu, on_gpu, ranks, offload) in [
        ("10m", 4, 4, 1, false),
        ("90m", 4, 32, 1, false),
        ("300m", 2, 16, 1, false),
        ("1b", 1, 8, 1, false),
        ("7b", 1, 4, 2, false),
        ("7b", 1, 4, 1, true),
    ] {
        let mut config = load(name);
        config.train.ranks = ranks;
        config.shard.offload = offload;
        let mut cpu = config.clone();
        cpu.settle(DeviceDefaults::CPU);
        assert_eq!((cpu.micro_batch(), cpu.precision.compute()), (on_cpu, Precision::F32), "{name}");
        config.settle(gpu);
        let precision = if name == "10m" { Precision::F32 } else { Precision::Bf16 };
        assert_eq!((config.micro_batch(), config.precision.compute()), (on_gpu, precision), "{name}");
        config.validate().unwrap_or_else(|error| panic!("{name}: {error}"));

        let model = config.resolve_model(None, None).expect("a model");
        let needed = |config: &Config| {
            let (decoder, optimizer) = (decoder(&model), Optimizer::default());
            let shape = RankShape::from_config(config, &model, &decoder, &optimizer, Gathers::Pooled, false);
            shape.expect("a mesh").step(&Speed::INSTANT).peak.bytes as f64
        };
        let most = if config.shard.recompute == Choice::Auto { Recompute::Block } else { Recompute::None };
        config.shard.recompute = most.into();
        let takes = needed(&config);
        println!("{name} on {ranks}: {:.1} GiB", takes / GIB);
        assert!(takes < 0.95 * 80.0 * GIB, "{name}: {:.1} GiB", takes / GIB);
    }
}

/// The predicted number of parameters equals the actual number.
#[test]
fn the_sharded_10m_has_as_many_parameters_as_its_preset() {
    let model = ModelConfig::preset("10m").expect("a preset");
    let counts = run_ranks(2, 1, |world| -> Result<_, ShardError> {
        let builder = EngineBuilder::new(world, Policy::default(), None)?;
        let sharded = ShardedDecoder::new(decoder(&model), builder)?;
        Ok(sharded.engine().layout().num_parameters())
    });
    assert_eq!(counts.expect("two ranks"), [8_959_232; 2]);
}
