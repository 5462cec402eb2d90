//! GPUs of any vendor through wgpu, and Vulkan drivers that compute on the CPU.

use burn::tensor::{Device, DeviceType};

use super::DeviceError;
use kiln_launch::place::RankEnv;

/// Fails unless wgpu finds an adapter, for ranks that are threads.
pub(super) fn check(place: Option<&RankEnv>) -> Result<(), DeviceError> {
    if place.is_some() {
        return Err(DeviceError::WgpuProcesses);
    }
    if Device::enumerate(DeviceType::Wgpu).into_vec().is_empty() { Err(DeviceError::NoWgpu) } else { Ok(()) }
}

/// Returns the compiler settings for `device`'s kernels, as reported by wgpu.
pub(super) fn fingerprint(device: &Device) -> String {
    match device.identity() {
        Some(identity) => format!("{}, {} (wgpu)", identity.name, identity.fingerprint),
        None => "wgpu".to_owned(),
    }
}
