//! GPUs through wgpu: those of any maker, and Vulkan drivers that compute on the CPU.

use burn::tensor::{Device, DeviceType};

use super::DeviceError;
use crate::place::RankEnv;

/// Fails unless wgpu finds something to compute on, for ranks that are threads.
pub(super) fn check(place: Option<&RankEnv>) -> Result<(), DeviceError> {
    if place.is_some() {
        return Err(DeviceError::WgpuProcesses);
    }
    if Device::enumerate(DeviceType::Wgpu).into_vec().is_empty() { Err(DeviceError::NoWgpu) } else { Ok(()) }
}

/// What decides to what kernels for `device` are compiled, as far as wgpu tells.
pub(super) fn fingerprint(device: &Device) -> String {
    match device.identity() {
        Some(identity) => format!("{}, {} (wgpu)", identity.name, identity.fingerprint),
        None => "wgpu".to_owned(),
    }
}
