use clap::Args;
use kiln_model::{Decoder, Layers};
use kiln_shard::{Mesh, Strategy};
use serde::Deserialize;
use serde::de::IntoDeserializer;

use super::error::DeviceError;
use crate::{ADAMW, Backend, Choice, CommBackend, Config, ConfigError, Precision};

/// Bytes that training keeps per parameter: the master weight and two moments of AdamW, in f32.
const TRAINING: u64 = 12;

const READING: u64 = 4;

const HALF: u64 = 2;

/// The device requested for a command, and the memory and dtype that the command needs.
#[derive(Clone, Debug)]
pub struct DeviceRequest {
    pub(super) backend: Backend,
    /// Name of the setting that requests the device, for messages.
    pub(super) setting: &'static str,
    pub(super) comm: CommBackend,
    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    pub(super) precision: Choice<Precision>,
    ranks: u64,
    /// Minimum number of bytes that a rank keeps on the device.
    state: u64,
}

impl DeviceRequest {
    /// Returns what training as `config` describes it needs from its device.
    pub fn for_run(config: &Config, layers: &Layers) -> Self {
        let parameters = config.resolve_model(None, Some(config.data.vocab_size));
        let parameters = parameters.ok().and_then(|model| Decoder::count_parameters(layers, &model).ok());
        let parameters = parameters.unwrap_or_default();
        let ranks = config.train.ranks.max(1);
        let shards = shards(config.shard.strategy, ranks, config.shard.shard_size);
        let per_parameter = match config.precision.compute {
            // Master weights and moments are on the host. The GPU holds the weights to gather from.
            Choice::Is(Precision::F32) if config.shard.offload => READING,
            _ if config.shard.offload => HALF,
            // Frozen parameters have no moments, and some optimizers keep less than AdamW: this is the minimum.
            _ if config.train.freezes() || config.optim.kind != ADAMW => READING,
            _ => TRAINING,
        };
        DeviceRequest {
            backend: config.device.backend,
            setting: "device.backend",
            comm: config.comm.backend,
            precision: config.precision.compute,
            ranks: ranks as u64,
            state: per_parameter * parameters as u64 / shards,
        }
    }

    /// Returns the requirements of a command with `--device` that reads a model's weights, sharded over `ranks`.
    pub fn for_weights(
        backend: Backend,
        parameters: usize,
        ranks: usize,
        strategy: Strategy,
        shard_size: Option<usize>,
    ) -> Self {
        let ranks = ranks.max(1);
        DeviceRequest {
            backend,
            setting: "--device",
            comm: CommBackend::Auto,
            precision: Choice::Is(Precision::F32),
            ranks: ranks as u64,
            state: READING * parameters as u64 / shards(strategy, ranks, shard_size),
        }
    }

    #[cfg_attr(not(feature = "cuda"), expect(dead_code))]
    pub(super) fn bytes(&self, processes: bool) -> u64 {
        if processes { self.state } else { self.state * self.ranks }
    }
}

fn shards(strategy: Strategy, ranks: usize, shard_size: Option<usize>) -> u64 {
    // With unknown hybrid groups, `ranks` gives a lower bound of each rank's bytes.
    Mesh::new(strategy, ranks, shard_size).map_or(ranks, |mesh| mesh.shard_size()) as u64
}

/// The flag `--device`, for commands that read no configuration.
#[derive(Args, Clone, Debug)]
pub struct DeviceFlag {
    /// The device: a usable GPU if there is one, else the CPU (auto); the CPU; or an NVIDIA GPU.
    #[arg(long = "device", value_name = "auto|cpu|cuda", value_parser = parse_backend, default_value = "auto")]
    backend: Backend,
}

/// Returns the backend of this name.
pub fn parse_backend(text: &str) -> Result<Backend, String> {
    let backend: Result<_, serde::de::value::Error> = Backend::deserialize(text.into_deserializer());
    backend.map_err(|_| "use auto, cpu, cuda or wgpu".to_owned())
}

impl DeviceFlag {
    /// Returns the selected backend.
    pub fn backend(&self) -> Backend {
        self.backend
    }
}

/// Replaces configuration keys in the message by the flag.
pub(super) fn in_flags(error: DeviceError) -> ConfigError {
    let text = error.to_string();
    let text = text.replace("set device.backend = \"cpu\"", "choose --device cpu");
    ConfigError::invalid(text.replace("device.backend = \"cuda\"", "--device cuda"))
}

/// Environment variable that lets NCCL 2.30 and newer place several ranks on one GPU.
const SHARE_GPU: &str = "NCCL_MULTI_RANK_GPU_ENABLE";

/// Returns whether several processes may use the same GPU.
pub fn share_gpu() -> bool {
    std::env::var(SHARE_GPU).is_ok_and(|value| value == "1")
}

#[cfg(test)]
mod tests {
    use super::{DeviceError, in_flags, parse_backend};

    #[test]
    fn device_names_match_the_configuration() {
        for name in ["auto", "cpu", "cuda", "wgpu"] {
            let backend = toml::Value::String(name.to_owned()).try_into();
            assert_eq!(parse_backend(name), Ok(backend.expect("a backend")));
        }
        assert!(parse_backend("gpu").is_err());
    }

    #[test]
    fn errors_name_the_flag() {
        let text = in_flags(DeviceError::NotBuilt).to_string();
        assert!(text.ends_with("or choose --device cpu") && !text.contains("device.backend"), "{text}");
        let mixed = DeviceError::Mixed { gpu: vec![1], cpu: vec![0] };
        let text = in_flags(mixed).to_string();
        assert!(text.contains("--device cuda") && !text.contains("device.backend"), "{text}");
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn shards_share_the_state() {
        use super::*;
        let text = "[model]\npreset = '10m'\n[train]\nranks = 4";
        let request = |text: &str| {
            let config = toml::from_str(text).expect("a configuration");
            DeviceRequest::for_run(&config, &Default::default())
        };
        let whole = request(text).bytes(false);
        assert!((100e6..400e6).contains(&(whole as f64)), "{whole}");
        assert!((request(text).bytes(true) * 4).abs_diff(whole) < 64);
        let replicated = request(&format!("{text}\n[shard]\nstrategy = 'NO_SHARD'"));
        assert!(replicated.bytes(true).abs_diff(whole) < 64);
        assert_eq!(replicated.bytes(false), 4 * replicated.bytes(true));
        let offload = |more: &str| request(&format!("{text}\n[shard]\noffload = true{more}")).bytes(false);
        assert!((offload("") * 3).abs_diff(whole) < 64);
        for half in ["bf16", "auto"] {
            let half = offload(&format!("\n[precision]\ncompute = '{half}'"));
            assert!((half * 6).abs_diff(whole) < 64);
        }
        let frozen = request(&format!("{text}\nfreeze = ['layers.']"));
        assert!((frozen.bytes(false) * 3).abs_diff(whole) < 64);
        let config: Config = toml::from_str(text).expect("a configuration");
        let model = config.resolve_model(None, Some(config.data.vocab_size)).expect("a model");
        let parameters = Decoder::count_parameters(&Layers::default(), &model).expect("built-in layers");
        let read = |strategy| DeviceRequest::for_weights(Backend::Auto, parameters, 4, strategy, None);
        assert!((read(Strategy::NoShard).bytes(true) * 3).abs_diff(whole) < 64);
        assert!((read(Strategy::FullShard).bytes(true) * 12).abs_diff(whole) < 64);
    }
}
