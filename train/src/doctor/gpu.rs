//! GPUs, and what a run on them needs.

/// Lines on this machine's GPUs; one on each thing that is looked for, whether it is there or not.
#[cfg(feature = "cuda")]
pub(super) fn examine() -> Vec<String> {
    crate::device::examine()
}

/// Lines on this program, and on the driver as the kernel knows it.
#[cfg(not(feature = "cuda"))]
pub(super) fn examine() -> Vec<String> {
    const DRIVER: &str = "/proc/driver/nvidia/version";
    let driver = match std::fs::read_to_string(DRIVER) {
        Ok(text) => text.lines().next().unwrap_or_default().to_owned(),
        Err(_) => format!("none: there is no {DRIVER}"),
    };
    vec![format!("program: {}", crate::device::DeviceError::NotBuilt), format!("driver: {driver}")]
}
