//! Load and temperature of this machine's NVIDIA GPUs, and which process uses which.

use std::ffi::OsStr;
use std::fs;
use std::path::Path;

use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;

/// The file that is there where NVIDIA's driver is.
const DRIVER: &str = "/dev/nvidiactl";

/// Names of NVIDIA's management library: drivers install the first, and their development files the second.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// A GPU at one moment.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Gpu {
    /// The number in the name of its file, `/dev/nvidia<minor>`.
    pub minor: Option<u32>,
    /// Processes that compute on it, as the driver numbers them.
    pub processes: Vec<u32>,
    /// Share of the time in which it had work.
    pub load: Option<f64>,
    /// In degrees.
    pub celsius: Option<f64>,
}

/// NVIDIA's management library, if this machine has it.
pub(super) struct GpuMeter {
    library: Option<Nvml>,
}

impl GpuMeter {
    /// Loads the library where there is a driver.
    pub(super) fn new() -> Self {
        let load =
            || LIBRARIES.iter().find_map(|name| Nvml::builder().lib_path(OsStr::new(name)).init().ok());
        GpuMeter { library: Path::new(DRIVER).exists().then(load).flatten() }
    }

    /// All GPUs. What the driver does not tell of one is left out.
    pub(super) fn gpus(&self) -> Vec<Gpu> {
        let Some(library) = &self.library else { return Vec::new() };
        let devices =
            (0..library.device_count().unwrap_or(0)).filter_map(|at| library.device_by_index(at).ok());
        let gpu = |device: nvml_wrapper::Device<'_>| Gpu {
            minor: device.minor_number().ok(),
            processes: device
                .running_compute_processes()
                .map(|all| all.iter().map(|process| process.pid).collect())
                .unwrap_or_default(),
            load: device.utilization_rates().ok().map(|rates| f64::from(rates.gpu) / 100.0),
            celsius: device.temperature(TemperatureSensor::Gpu).ok().map(f64::from),
        };
        devices.map(gpu).collect()
    }
}

/// The GPU that process `pid` uses, if that is certain: the only one on which the driver sees it, or in a container,
/// where the driver numbers processes otherwise, the only one whose file it has open.
pub(super) fn used_by<'a>(gpus: &'a [Gpu], pid: i32, opened: &[u32]) -> Option<&'a Gpu> {
    let seen = |gpu: &&Gpu| gpu.processes.iter().any(|process| i64::from(*process) == i64::from(pid));
    let has_open = |gpu: &&Gpu| gpu.minor.is_some_and(|minor| opened.contains(&minor));
    only(gpus.iter().filter(seen)).or_else(|| only(gpus.iter().filter(has_open)))
}

fn only<T>(mut all: impl Iterator<Item = T>) -> Option<T> {
    let first = all.next()?;
    all.next().is_none().then_some(first)
}

/// The GPUs whose files process `pid` has open, by their number.
pub(super) fn opened_by(pid: i32) -> Vec<u32> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let minor = |path: &Path| path.to_str()?.strip_prefix("/dev/nvidia")?.parse().ok();
    let mut minors: Vec<u32> =
        files.filter_map(|file| fs::read_link(file.path()).ok()).filter_map(|path| minor(&path)).collect();
    minors.sort_unstable();
    minors.dedup();
    minors
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_gpu_belongs_to_a_process_where_that_is_certain() {
        let gpu = |minor, processes: &[u32]| Gpu {
            minor: Some(minor),
            processes: processes.to_vec(),
            ..Gpu::default()
        };
        let gpus = [gpu(0, &[100]), gpu(1, &[200, 300]), gpu(2, &[300])];
        let minor = |pid, opened: &[u32]| used_by(&gpus, pid, opened).and_then(|gpu| gpu.minor);
        assert_eq!((minor(100, &[]), minor(200, &[0, 1, 2])), (Some(0), Some(1)));
        // On two; not seen; in a container; of several in a container.
        assert_eq!(
            (minor(300, &[]), minor(7, &[]), minor(7, &[2]), minor(7, &[0, 1])),
            (None, None, Some(2), None)
        );
        assert_eq!((used_by(&[], 7, &[0]), opened_by(-1)), (None, Vec::new()));
        // With a driver or without one.
        GpuMeter::new().gpus();
    }
}
