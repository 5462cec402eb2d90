//! GPUs, and the libraries and drivers that a run on them needs.

/// Lines about this machine's GPUs, with one for each requirement, met or not.
#[cfg(feature = "cuda")]
pub(super) fn examine() -> Vec<String> {
    kiln_config::device::examine()
}

/// Lines about this program, and about the driver as the kernel reports it.
#[cfg(not(feature = "cuda"))]
pub(super) fn examine() -> Vec<String> {
    const DRIVER: &str = "/proc/driver/nvidia/version";
    let driver = match std::fs::read_to_string(DRIVER) {
        Ok(text) => text.lines().next().unwrap_or_default().to_owned(),
        Err(_) => format!("none: there is no {DRIVER}"),
    };
    vec![format!("program: {}", kiln_config::device::DeviceError::NotBuilt), format!("driver: {driver}")]
}
