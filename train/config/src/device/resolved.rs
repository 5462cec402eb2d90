use std::ops::Sub;
use std::path::Path;
use std::time::Duration;
use std::{fmt, io};

use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::{DType, DeviceKind, DeviceType};
use kiln_model::Layers;
use kiln_observe::trace::GpuActivity;

#[cfg(feature = "wgpu")]
use super::cpu;
use super::cpu::{cpu_defaults, measure_peak_flops, peak_dtype, plain};
#[cfg(feature = "cuda")]
use super::cuda;
#[cfg(feature = "cuda")]
use super::cupti::GpuRecording;
use super::error::DeviceError;
use super::gpu::DataSheet;
#[cfg(feature = "cuda")]
use super::gpu::Gpu;
use super::memory::Memory;
use super::peak::{self, Key, Peak, processor};
use super::request::{DeviceFlag, DeviceRequest, in_flags};
use crate::{Backend, CommBackend, Config, ConfigError, DeviceDefaults, Precision};
use kiln_launch::place::RankEnv;
#[cfg(feature = "cuda")]
use kiln_nvidia::kernel_cache;
use kiln_sys::words::{duration, number_of};

/// Tokens per micro-batch with enough rows for all multiprocessors, and negligible fixed costs of a pass.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
const GPU_TOKENS: usize = DeviceDefaults::GPU_TOKENS;

/// Ends a recording and returns the GPU's activity. Wait for the GPU first to get all of it.
pub type Recording = Box<dyn FnOnce() -> Vec<GpuActivity> + Send>;

/// Returns the number of ranks on this machine, and how many equal machines `ranks` ranks need.
fn ranks_here(place: Option<&RankEnv>, ranks: usize) -> (usize, f64) {
    let here = place.map_or(ranks, |place| place.local_world_size.max(1));
    (here, ranks as f64 / here as f64)
}

/// The device of a run, as seen by this process.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedDevice {
    kind: Kind,
    why: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Gpu),
    #[cfg(feature = "wgpu")]
    Wgpu,
}

impl ResolvedDevice {
    /// Chooses the device for a run of a decoder built from `layers`.
    ///
    /// # Errors
    ///
    /// As for [`ResolvedDevice::for_request`].
    pub fn new(config: &Config, layers: &Layers, place: Option<&RankEnv>) -> Result<Self, DeviceError> {
        Self::for_request(&DeviceRequest::for_run(config, layers), place)
    }

    /// Chooses the device that `request` names; for `auto`, an NVIDIA GPU if there is one, else the CPU. Ranks
    /// that are threads share GPU 0; ranks that are processes, which have a `place`, use one GPU each.
    ///
    /// # Errors
    ///
    /// The first missing component, if `request` demands a GPU, or if `auto` finds an unusable GPU: a run must not
    /// spend days on a CPU next to an idle GPU.
    pub fn for_request(request: &DeviceRequest, place: Option<&RankEnv>) -> Result<Self, DeviceError> {
        let as_said = || format!("as {} says", request.setting);
        match request.backend {
            Backend::Cpu => Ok(Self::cpu(as_said())),
            Backend::Cuda => Self::cuda(request, place, as_said()),
            Backend::Wgpu => Self::wgpu(place, as_said()),
            Backend::Auto if matches!(request.comm, CommBackend::Tcp | CommBackend::Mpi) => {
                Self::without_gpu()
            }
            Backend::Auto => Self::automatic(request, place),
        }
    }

    fn automatic(request: &DeviceRequest, place: Option<&RankEnv>) -> Result<Self, DeviceError> {
        let why = "not the CPU, since this GPU can be used".to_owned();
        let error = match Self::cuda(request, place, why) {
            Ok(resolved) => return Ok(resolved),
            Err(error) => error,
        };
        let visible = std::env::var("CUDA_VISIBLE_DEVICES").ok();
        let listed = kernel_lists_gpus(Path::new("/"), visible.as_deref());
        if !error.means_none(listed) {
            return Err(unusable(error));
        }
        if listed {
            tracing::warn!("this machine has an NVIDIA GPU, but the CPU is used: {error}");
        }
        Ok(Self::cpu(format!("not a GPU: {}", error.in_short())))
    }

    /// Chooses the CPU for ranks whose transport moves only CPU memory; fails if there is a GPU.
    fn without_gpu() -> Result<Self, DeviceError> {
        match gpu_is_there() {
            true => Err(unusable(DeviceError::NoTransport)),
            false => Ok(Self::cpu(format!("not a GPU: {}", DeviceError::NoTransport.in_short()))),
        }
    }

    /// Chooses the device of a run whose ranks are connected by a transport that moves only CPU memory.
    ///
    /// # Errors
    ///
    /// If the configuration demands a GPU, or leaves the choice and there is one.
    pub fn for_joined(config: &Config) -> Result<Self, DeviceError> {
        match config.device.backend {
            Backend::Cpu => Ok(Self::cpu("as device.backend says".to_owned())),
            Backend::Auto => Self::without_gpu(),
            Backend::Cuda | Backend::Wgpu => Err(DeviceError::NoTransport),
        }
    }

    fn cpu(why: String) -> Self {
        ResolvedDevice { kind: Kind::Cpu, why }
    }

    #[cfg(feature = "cuda")]
    fn cuda(request: &DeviceRequest, place: Option<&RankEnv>, why: String) -> Result<Self, DeviceError> {
        Ok(ResolvedDevice { kind: Kind::Cuda(cuda::select(request, place)?), why })
    }

    #[cfg(not(feature = "cuda"))]
    fn cuda(_: &DeviceRequest, _: Option<&RankEnv>, _: String) -> Result<Self, DeviceError> {
        Err(DeviceError::NotBuilt)
    }

    #[cfg(feature = "wgpu")]
    fn wgpu(place: Option<&RankEnv>, why: String) -> Result<Self, DeviceError> {
        if place.is_some() {
            return Err(DeviceError::WgpuProcesses);
        }
        if Device::enumerate(DeviceType::Wgpu).into_vec().is_empty() {
            return Err(DeviceError::NoWgpu);
        }
        Ok(ResolvedDevice { kind: Kind::Wgpu, why })
    }

    #[cfg(not(feature = "wgpu"))]
    fn wgpu(_: Option<&RankEnv>, _: String) -> Result<Self, DeviceError> {
        Err(DeviceError::WgpuNotBuilt)
    }

    /// Returns burn's device; `.autodiff()` makes it one for training.
    pub fn device(&self) -> Device {
        match &self.kind {
            Kind::Cpu => plain(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => Device::cuda(gpu.index),
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => Device::wgpu(DeviceKind::DefaultDevice),
        }
    }

    /// Returns whether the device is a GPU.
    pub fn is_gpu(&self) -> bool {
        !matches!(self.kind, Kind::Cpu)
    }

    /// Returns the defaults for values that a configuration leaves to the device.
    pub fn defaults(&self) -> DeviceDefaults {
        match &self.kind {
            Kind::Cpu => cpu_defaults(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) if cuda::has_bf16(gpu) => {
                DeviceDefaults { precision: Precision::Bf16, tokens: GPU_TOKENS }
            }
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => DeviceDefaults { precision: Precision::F16, tokens: GPU_TOKENS },
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => DeviceDefaults { precision: Precision::F32, tokens: GPU_TOKENS },
        }
    }

    /// Fails unless the device computes in `precision`, which another rank has settled for its own device.
    ///
    /// # Errors
    ///
    /// If the device is an NVIDIA GPU without bf16.
    pub fn check_precision(&self, precision: Precision) -> Result<(), DeviceError> {
        #[cfg(feature = "cuda")]
        if let Kind::Cuda(gpu) = &self.kind {
            return cuda::check_precision(gpu, precision);
        }
        #[cfg(not(feature = "cuda"))]
        let _ = precision;
        Ok(())
    }

    /// Returns the memory of the GPU, if the device is an NVIDIA GPU.
    pub fn gpu_memory(&self) -> Option<Memory> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => Some(Memory { total: gpu.memory, free: gpu.free }),
            _ => None,
        }
    }

    /// Returns the data sheet of the GPU, if the device is an NVIDIA GPU with a known one.
    pub fn data_sheet(&self) -> Option<DataSheet> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => DataSheet::from_driver_name(&gpu.name).copied(),
            _ => None,
        }
    }

    /// Returns the GPU's number among those that this process sees, if the device is an NVIDIA GPU.
    #[cfg(feature = "cuda")]
    pub fn cuda_index(&self) -> Option<usize> {
        match &self.kind {
            Kind::Cuda(gpu) => Some(gpu.index),
            _ => None,
        }
    }

    /// Starts recording the device, if it is an NVIDIA GPU; the returned function ends the recording.
    ///
    /// # Errors
    ///
    /// If the activity cannot be recorded; the error is a message.
    pub fn record(&self) -> Result<Option<Recording>, String> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => {
                let recording = GpuRecording::start(gpu.index)?;
                Ok(Some(Box::new(move || recording.stop())))
            }
            _ => Ok(None),
        }
    }

    /// Warns about idle GPUs, for work whose ranks are threads, which share one GPU.
    pub fn warn_of_idle_gpus(&self) {
        let visible = match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => gpu.visible,
            _ => 0,
        };
        if let Some(warning) = idle(visible) {
            tracing::warn!("{warning}");
        }
    }

    /// Returns the peak of `ranks` ranks on equal nodes: measured on a CPU, with `threads` threads per rank, or on
    /// wgpu's adapter, in f32; from the data sheet for an NVIDIA GPU.
    ///
    /// # Errors
    ///
    /// If the system cannot start the threads.
    pub fn peak(
        &self,
        precision: Precision,
        place: Option<&RankEnv>,
        ranks: usize,
        threads: usize,
    ) -> io::Result<Peak> {
        let (here, machines) = ranks_here(place, ranks);
        match &self.kind {
            Kind::Cpu => Ok(Peak::given(measure_peak_flops(precision, threads * here)? * machines)),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => {
                let gpus = if place.is_some() { ranks } else { 1 };
                Ok(Peak::given(gpu.peak_flops(precision) * gpus as f64))
            }
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => Ok(Peak::given(cpu::measure_flops_of(&self.device(), DType::F32))),
        }
    }

    /// Like [`ResolvedDevice::peak`], but stores measurements for later runs; `None` until two of them agree.
    ///
    /// # Errors
    ///
    /// As for [`ResolvedDevice::peak`].
    pub fn known_peak(
        &self,
        precision: Precision,
        place: Option<&RankEnv>,
        ranks: usize,
        threads: usize,
    ) -> io::Result<Option<Peak>> {
        let (here, machines) = ranks_here(place, ranks);
        let key = match &self.kind {
            Kind::Cpu => Key::new(processor(), threads * here, &format!("{:?}", peak_dtype(precision))),
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => return self.peak(precision, place, ranks, threads).map(Some),
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => Key::new(self.fingerprint(), 1, "f32"),
        };
        let Some(file) = key.file() else { return Ok(None) };
        let measure = || self.peak(precision, place, ranks, threads).map(|peak| peak.flops() / machines);
        let flops = peak::known(&file, &key, measure)?;
        Ok(flops.map(|flops| Peak::kept(flops * machines, file)))
    }

    /// Returns the unique id of an NVIDIA GPU; zeros for other devices.
    pub fn id(&self) -> [u8; 16] {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => gpu.uuid,
            _ => [0; 16],
        }
    }

    /// Describes everything besides this program that determines results: name, driver, compiler and libraries.
    pub fn fingerprint(&self) -> String {
        match &self.kind {
            Kind::Cpu => "CPU".to_owned(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => cuda::fingerprint(gpu),
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => match self.device().identity() {
                Some(identity) => format!("{}, {} (wgpu)", identity.name, identity.fingerprint),
                None => "wgpu".to_owned(),
            },
        }
    }

    /// Returns the counts of compiled and cached kernels of this process, on an NVIDIA GPU.
    pub fn kernels(&self) -> Option<KernelCounts> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => Some(kernel_cache::counts().into()),
            _ => None,
        }
    }

    /// Returns the number of matrix products that use algorithms measured earlier (`kiln warmup --products`).
    pub fn measured_products(&self) -> usize {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => kiln_model::ops::cube::matmul::used_algorithms(),
            _ => 0,
        }
    }

    /// Returns one line with the device and the reason for the choice.
    pub fn describe(&self) -> String {
        format!("device: {}, {}", self.name(), self.why)
    }

    /// Returns a description of the device.
    pub fn name(&self) -> String {
        match &self.kind {
            Kind::Cpu => "CPU".to_owned(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => format!("GPU {gpu}"),
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => "the adapter that wgpu finds".to_owned(),
        }
    }
}

fn idle(visible: usize) -> Option<String> {
    let idle = match visible {
        0 | 1 => return None,
        2 => "GPU 1 stays".to_owned(),
        visible => format!("GPUs 1 to {} stay", visible - 1),
    };
    Some(format!(
        "{idle} idle: ranks that are threads share GPU 0. `kiln launch --nproc-per-node gpu -- …` starts a \
         rank for each GPU; CUDA_VISIBLE_DEVICES hides GPUs that should stay idle"
    ))
}

/// Returns the number of GPUs that this process sees.
///
/// # Errors
///
/// If there are none, or if they cannot be counted.
pub fn count_gpus() -> Result<usize, DeviceError> {
    #[cfg(feature = "cuda")]
    return cuda::count_visible();
    #[cfg(not(feature = "cuda"))]
    Err(DeviceError::NotBuilt)
}

fn unusable(error: DeviceError) -> DeviceError {
    DeviceError::Unusable { reason: Box::new(error) }
}

fn gpu_is_there() -> bool {
    #[cfg(feature = "cuda")]
    return cuda::is_there();
    #[cfg(not(feature = "cuda"))]
    return false;
}

/// Returns whether the kernel lists NVIDIA GPUs, and `visible` (`CUDA_VISIBLE_DEVICES`) does not hide them all.
fn kernel_lists_gpus(root: &Path, visible: Option<&str>) -> bool {
    let listed = std::fs::read_dir(root.join("proc/driver/nvidia/gpus"));
    !matches!(visible, Some("" | "-1")) && listed.is_ok_and(|mut gpus| gpus.next().is_some())
}

/// Kernel counts of a process.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KernelCounts {
    /// Kernels taken from the cache.
    pub taken: u64,
    /// Kernels compiled by NVRTC.
    pub compiled: u64,
    /// Total compile time of all threads.
    pub compiling: Duration,
}

#[cfg(feature = "cuda")]
impl From<kiln_nvidia::kernel_cache::Counts> for KernelCounts {
    fn from(counts: kiln_nvidia::kernel_cache::Counts) -> Self {
        let kiln_nvidia::kernel_cache::Counts { taken, compiled, compiling } = counts;
        KernelCounts { taken, compiled, compiling }
    }
}

impl Sub for KernelCounts {
    type Output = Self;

    fn sub(self, earlier: Self) -> Self {
        KernelCounts {
            taken: self.taken.saturating_sub(earlier.taken),
            compiled: self.compiled.saturating_sub(earlier.compiled),
            compiling: self.compiling.saturating_sub(earlier.compiling),
        }
    }
}

impl fmt::Display for KernelCounts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let KernelCounts { taken, compiled, compiling } = *self;
        write!(f, "{} from the cache, {compiled} compiled", number_of(taken, "kernel"))?;
        if compiled > 0 { write!(f, " in {}", duration(compiling)) } else { Ok(()) }
    }
}

impl DeviceFlag {
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

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::{DeviceError, KernelCounts, idle, kernel_lists_gpus};

    #[test]
    fn idle_gpus_are_reported() {
        assert_eq!((idle(0), idle(1)), (None, None));
        assert!(idle(2).is_some_and(|text| text.starts_with("GPU 1 stays idle: ")));
        let text = idle(8).unwrap_or_default();
        assert!(text.starts_with("GPUs 1 to 7 stay idle: "), "{text}");
        assert!(text.contains("kiln launch --nproc-per-node gpu"), "{text}");
    }

    #[test]
    fn kernel_lists_gpus_without_a_library() {
        let root = tempfile::tempdir().expect("a folder");
        assert!(!kernel_lists_gpus(root.path(), None));
        let folder = root.path().join("proc/driver/nvidia/gpus");
        std::fs::create_dir_all(&folder).expect("a folder");
        assert!(!kernel_lists_gpus(root.path(), None));
        std::fs::create_dir(folder.join("0000:01:00.0")).expect("a folder");
        assert!(kernel_lists_gpus(root.path(), None));
        assert!(kernel_lists_gpus(root.path(), Some("0")));
        assert!(!kernel_lists_gpus(root.path(), Some("")));

        // A machine with a GPU but without the driver library is not a machine without a GPU.
        let none = String::new;
        let missing = DeviceError::NoDriver { names: none(), places: none(), failures: Vec::new() };
        assert!(missing.means_none(false) && !missing.means_none(true));
        assert!(DeviceError::NotBuilt.means_none(true));
        assert!(DeviceError::NoGpu { visible: None }.means_none(false));
        assert!(!DeviceError::NoTransport.means_none(false));
    }

    #[cfg(feature = "cuda")]
    #[test]
    fn gpus_prefer_bf16_over_f16() {
        use super::{DeviceDefaults, Gpu, Kind, Precision, ResolvedDevice};
        use crate::device::error::Version;
        let on = |capability| {
            let (index, visible, memory, free, multiprocessors, clock) = (0, 1, 0, 0, 1, 1.0);
            let (name, uuid) = ("a GPU".to_owned(), [0; 16]);
            let gpu = Gpu { index, visible, name, capability, memory, free, multiprocessors, clock, uuid };
            ResolvedDevice { kind: Kind::Cuda(gpu), why: String::new() }
        };
        let (new, old) = (on(Version(8, 0)), on(Version(7, 5)));
        assert_eq!(new.defaults(), DeviceDefaults { precision: Precision::Bf16, tokens: 16_384 });
        assert_eq!(old.defaults(), DeviceDefaults { precision: Precision::F16, tokens: 16_384 });
        assert_eq!(new.check_precision(Precision::Bf16), Ok(()));
        assert_eq!(old.check_precision(Precision::F16), Ok(()));
        assert!(matches!(old.check_precision(Precision::Bf16), Err(DeviceError::OldGpu { .. })));
    }

    #[test]
    fn kernel_counts_are_described() {
        let none = KernelCounts { taken: 41, ..KernelCounts::default() };
        assert_eq!(none.to_string(), "41 kernels from the cache, 0 compiled");
        let some = KernelCounts { taken: 42, compiled: 2, compiling: Duration::from_millis(1500) };
        assert_eq!((some - none).to_string(), "1 kernel from the cache, 2 compiled in 1.5 s");
    }
}
