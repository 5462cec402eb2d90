//! The flag `--device`, for commands that read no configuration.

use clap::Args;
use serde::Deserialize;
use serde::de::IntoDeserializer;

use super::error::DeviceError;
use super::request::DeviceRequest;
use super::resolved::ResolvedDevice;
use crate::{Backend, ConfigError};
use kiln_launch::place::RankEnv;

/// The flag.
#[derive(Args, Clone, Debug)]
pub struct DeviceFlag {
    /// Device to compute on: a usable GPU if there is one, the CPU, or an NVIDIA GPU.
    #[arg(long = "device", value_name = "auto|cpu|cuda", value_parser = parse_backend, default_value = "auto")]
    backend: Backend,
}

/// Returns the backend of this name.
pub fn parse_backend(text: &str) -> Result<Backend, String> {
    let backend: Result<_, serde::de::value::Error> = Backend::deserialize(text.into_deserializer());
    backend.map_err(|_| "use auto, cpu or cuda".to_owned())
}

impl DeviceFlag {
    /// Returns the selected backend.
    pub fn backend(&self) -> Backend {
        self.backend
    }

    /// Selects the device for `request`.
    ///
    /// # Errors
    ///
    /// As for [`ResolvedDevice::for_request`], in terms of the command line.
    pub fn select(request: &DeviceRequest, place: Option<&RankEnv>) -> Result<ResolvedDevice, ConfigError> {
        let resolved = ResolvedDevice::for_request(request, place).map_err(in_flags)?;
        tracing::info!("{}", resolved.describe());
        Ok(resolved)
    }
}

/// Replaces configuration keys in the message by the flag.
pub(super) fn in_flags(error: DeviceError) -> ConfigError {
    let text = error.to_string();
    let text = text.replace("set device.backend = \"cpu\"", "choose --device cpu");
    ConfigError::invalid(text.replace("device.backend = \"cuda\"", "--device cuda"))
}

#[cfg(test)]
mod tests {
    use super::{DeviceError, in_flags, parse_backend};

    #[test]
    fn devices_are_called_as_in_a_configuration() {
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
}
