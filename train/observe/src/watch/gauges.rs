//! Load of processes and NVIDIA GPUs on this machine.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsStr;
use std::fs;
use std::path::Path;
use std::time::Instant;

use kiln_sys::ProcessId;
use nvml_wrapper::Nvml;
use nvml_wrapper::enum_wrappers::device::TemperatureSensor;

use crate::status::Look;

const DRIVER: &str = "/dev/nvidiactl";

/// Drivers install the first name, and their development files the second.
const LIBRARIES: [&str; 2] = ["libnvidia-ml.so.1", "libnvidia-ml.so"];

/// Load of a rank's process and GPU. Unknown values are `None`.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub(super) struct Gauges {
    /// CPU time as a share of one core: 2 means two cores.
    pub cpu: Option<f64>,
    pub gpu: Option<f64>,
    pub celsius: Option<f64>,
}

pub(super) fn gauges(look: &Look, cpu: &mut CpuMeter, gpus: &GpuMeter) -> BTreeMap<usize, Gauges> {
    let (here, now) = (ProcessId::this().host, Instant::now());
    let gpus = if look.processes.is_empty() { Vec::new() } else { gpus.gpus() };
    let mut gauges = BTreeMap::new();
    for process in look.processes.iter().filter(|process| process.host == here) {
        let cpu = cpu.share(process.process, now);
        let opened = if gpus.is_empty() { Vec::new() } else { opened_by(process.process) };
        let gpu = used_by(&gpus, process.process, &opened);
        let load =
            Gauges { cpu, gpu: gpu.and_then(|gpu| gpu.load), celsius: gpu.and_then(|gpu| gpu.celsius) };
        gauges.extend(process.ranks.iter().map(|rank| (*rank, load)));
    }
    gauges
}

#[derive(Debug, Default)]
pub(super) struct CpuMeter {
    before: HashMap<i32, (Instant, u64)>,
}

impl CpuMeter {
    /// Returns the share of one core that process `pid` has used since the last call, or `None` at the first call.
    fn share(&mut self, pid: i32, now: Instant) -> Option<f64> {
        let ticks = ticks(&fs::read_to_string(format!("/proc/{pid}/stat")).ok()?)?;
        let (then, before) = self.before.insert(pid, (now, ticks))?;
        let seconds = now.checked_duration_since(then)?.as_secs_f64();
        let taken = ticks.checked_sub(before)? as f64 / rustix::param::clock_ticks_per_second() as f64;
        (seconds > 0.0).then(|| taken / seconds)
    }
}

fn ticks(stat: &str) -> Option<u64> {
    // The program's name in brackets may contain anything.
    let mut fields = stat.rsplit_once(')')?.1.split_whitespace().skip(11);
    let mut next = || fields.next()?.parse::<u64>().ok();
    Some(next()? + next()?)
}

#[derive(Clone, Debug, Default, PartialEq)]
struct Gpu {
    /// Number of the device file, `/dev/nvidia<minor>`.
    minor: Option<u32>,
    processes: Vec<u32>,
    load: Option<f64>,
    celsius: Option<f64>,
}

pub(super) struct GpuMeter(Option<Nvml>);

impl GpuMeter {
    pub(super) fn new() -> Self {
        let load =
            || LIBRARIES.iter().find_map(|name| Nvml::builder().lib_path(OsStr::new(name)).init().ok());
        GpuMeter(Path::new(DRIVER).exists().then(load).flatten())
    }

    fn gpus(&self) -> Vec<Gpu> {
        let Some(library) = &self.0 else { return Vec::new() };
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

/// Returns the GPU of process `pid`: the only one on which the driver lists it or, in a container with its own process
/// ids, the only one whose device file it has open.
fn used_by<'a>(gpus: &'a [Gpu], pid: i32, opened: &[u32]) -> Option<&'a Gpu> {
    let is_listed = |gpu: &&Gpu| gpu.processes.iter().any(|process| i64::from(*process) == i64::from(pid));
    let is_open = |gpu: &&Gpu| gpu.minor.is_some_and(|minor| opened.contains(&minor));
    only(gpus.iter().filter(is_listed)).or_else(|| only(gpus.iter().filter(is_open)))
}

fn only<T>(mut all: impl Iterator<Item = T>) -> Option<T> {
    let first = all.next()?;
    all.next().is_none().then_some(first)
}

fn opened_by(pid: i32) -> Vec<u32> {
    let files = fs::read_dir(format!("/proc/{pid}/fd")).into_iter().flatten().flatten();
    let minor = |path: &Path| path.to_str()?.strip_prefix("/dev/nvidia")?.parse().ok();
    files.filter_map(|file| minor(&fs::read_link(file.path()).ok()?)).collect()
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn cpu_time_is_measured_between_two_calls() {
        let stat = "7 (a ) b) S 1 7 7 0 -1 4194304 100 0 0 0 250 50 0 0 20 0 1 0 500 0 0";
        assert_eq!((ticks(stat), ticks("7 (a"), ticks("7 (a) S 1")), (Some(300), None, None));
        let mut meter = CpuMeter::default();
        let pid = std::process::id().cast_signed();
        let now = Instant::now();
        assert_eq!((meter.share(pid, now), meter.share(-1, now)), (None, None));
        let share = meter.share(pid, now + Duration::from_secs(3600)).unwrap();
        assert!((0.0..1.0).contains(&share), "{share}");
    }

    #[test]
    fn gpu_belongs_to_a_process_if_certain() {
        let gpu = |minor, processes: &[u32]| Gpu {
            minor: Some(minor),
            processes: processes.to_vec(),
            ..Gpu::default()
        };
        let gpus = [gpu(0, &[100]), gpu(1, &[200, 300]), gpu(2, &[300])];
        let minor = |pid, opened: &[u32]| used_by(&gpus, pid, opened).and_then(|gpu| gpu.minor);
        assert_eq!((minor(100, &[]), minor(200, &[0, 1, 2])), (Some(0), Some(1)));
        // On two GPUs; on none; in a container; in a container with two open GPUs.
        assert_eq!(
            (minor(300, &[]), minor(7, &[]), minor(7, &[2]), minor(7, &[0, 1])),
            (None, None, Some(2), None)
        );
        assert_eq!((used_by(&[], 7, &[0]), opened_by(-1)), (None, Vec::new()));
        GpuMeter::new().gpus();
    }
}
