//! The device of a run, and what it can do.

use std::io;
use std::path::Path;

use burn::tensor::Device;
#[cfg(feature = "wgpu")]
use burn::tensor::{DType, DeviceKind};
use kiln_model::Layers;
use kiln_observe::trace::GpuActivity;

#[cfg(feature = "wgpu")]
use super::cpu;
use super::cpu::{cpu_defaults, measure_peak_flops, peak_dtype};
#[cfg(feature = "cuda")]
use super::cuda;
#[cfg(feature = "cuda")]
use super::cupti::GpuRecording;
use super::data_sheet::DataSheet;
use super::error::DeviceError;
#[cfg(feature = "cuda")]
use super::gpu::Gpu;
use super::kept_peak::{self, Key, processor};
use super::kernel_counts::KernelCounts;
use super::memory::Memory;
use super::peak::Peak;
use super::request::DeviceRequest;
use super::tensors::plain;
#[cfg(feature = "wgpu")]
use super::wgpu;
use crate::config::{Backend, CommBackend, Config, DeviceDefaults, Precision};
use crate::place::RankEnv;
#[cfg(feature = "cuda")]
use kiln_nvidia::kernel_cache;

/// Tokens of a micro-batch that keep a GPU at work: products of matrices then have enough rows for all of its
/// multiprocessors, and what is done once per pass no longer counts.
#[cfg(any(feature = "cuda", feature = "wgpu"))]
const GPU_TOKENS: usize = DeviceDefaults::GPU_TOKENS;

/// Ends a recording of what a GPU does, and tells it. Whoever wants all of it waits for the GPU before.
pub(crate) type Recording = Box<dyn FnOnce() -> Vec<GpuActivity> + Send>;

/// The number of `ranks` ranks that are on this machine, and the number of such machines.
fn ranks_here(place: Option<&RankEnv>, ranks: usize) -> (usize, f64) {
    let here = place.map_or(ranks, |place| place.local_world_size.max(1));
    (here, ranks as f64 / here as f64)
}

/// The device of a run, as far as this process is concerned.
#[derive(Clone, Debug, PartialEq)]
pub struct ResolvedDevice {
    kind: Kind,
    /// Why this one and not the other.
    why: String,
}

#[derive(Clone, Debug, PartialEq)]
enum Kind {
    Cpu,
    #[cfg(feature = "cuda")]
    Cuda(Gpu),
    /// Whatever wgpu takes by default.
    #[cfg(feature = "wgpu")]
    Wgpu,
}

impl ResolvedDevice {
    /// The device of a run of a decoder that is made of `layers`.
    ///
    /// # Errors
    ///
    /// As for [`ResolvedDevice::for_request`].
    pub fn new(config: &Config, layers: &Layers, place: Option<&RankEnv>) -> Result<Self, DeviceError> {
        Self::for_request(&DeviceRequest::of_run(config, layers), place)
    }

    /// The device that `request` names or, if that is `auto`, an NVIDIA GPU if there is one, else the CPU.
    /// Ranks that are threads share GPU 0; ranks that are processes, which have a place, take one each.
    ///
    /// # Errors
    ///
    /// The first thing that is missing, if `request` insists on a GPU, or leaves the choice and there is one:
    /// days on a CPU beside an idle GPU are not what anyone meant. For an NVIDIA GPU, nothing is asked of
    /// burn or CubeCL.
    pub fn for_request(request: &DeviceRequest, place: Option<&RankEnv>) -> Result<Self, DeviceError> {
        let as_said = || format!("as {} says", request.said_by);
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

    /// A GPU if there is one, else the CPU.
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
            tracing::warn!("this machine has an NVIDIA GPU, and the CPU is used: {error}");
        }
        Ok(Self::cpu(format!("not a GPU: {}", error.in_short())))
    }

    /// The CPU, for ranks whose way to talk to each other reaches nothing else.
    ///
    /// # Errors
    ///
    /// If there is a GPU.
    fn without_gpu() -> Result<Self, DeviceError> {
        match gpu_is_there() {
            true => Err(unusable(DeviceError::NoTransport)),
            false => Ok(Self::cpu(format!("not a GPU: {}", DeviceError::NoTransport.in_short()))),
        }
    }

    /// The device of a run whose ranks have met already and move what is in the memory of the CPU.
    ///
    /// # Errors
    ///
    /// If the configuration insists on a GPU, or leaves the choice and there is one.
    pub(crate) fn for_joined(config: &Config) -> Result<Self, DeviceError> {
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
        wgpu::check(place)?;
        Ok(ResolvedDevice { kind: Kind::Wgpu, why })
    }

    #[cfg(not(feature = "wgpu"))]
    fn wgpu(_: Option<&RankEnv>, _: String) -> Result<Self, DeviceError> {
        Err(DeviceError::WgpuNotBuilt)
    }

    /// burn's device; `.autodiff()` makes it one for training.
    pub fn device(&self) -> Device {
        match &self.kind {
            Kind::Cpu => plain(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => Device::cuda(gpu.index),
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => Device::wgpu(DeviceKind::DefaultDevice),
        }
    }

    /// Whether it is a GPU.
    pub fn is_gpu(&self) -> bool {
        !matches!(self.kind, Kind::Cpu)
    }

    /// What a configuration that leaves it to the device gets.
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

    /// Fails unless it computes in `precision`, which another rank has settled for its own.
    ///
    /// # Errors
    ///
    /// If it is an NVIDIA GPU without bf16.
    pub(crate) fn check_precision(&self, precision: Precision) -> Result<(), DeviceError> {
        #[cfg(feature = "cuda")]
        if let Kind::Cuda(gpu) = &self.kind {
            return cuda::check_precision(gpu, precision);
        }
        #[cfg(not(feature = "cuda"))]
        let _ = precision;
        Ok(())
    }

    /// The memory of the GPU, if it is an NVIDIA GPU.
    pub(crate) fn gpu_memory(&self) -> Option<Memory> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => Some(Memory { total: gpu.memory, free: gpu.free }),
            _ => None,
        }
    }

    /// What its data sheet says, if it is an NVIDIA GPU of which there is one here.
    pub(crate) fn data_sheet(&self) -> Option<DataSheet> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => DataSheet::of_driver(&gpu.name).copied(),
            _ => None,
        }
    }

    /// Its number, if it is an NVIDIA GPU, among those that this process sees.
    #[cfg(feature = "cuda")]
    pub(crate) fn cuda_index(&self) -> Option<usize> {
        match &self.kind {
            Kind::Cuda(gpu) => Some(gpu.index),
            _ => None,
        }
    }

    /// Begins to record what it does, if it is an NVIDIA GPU; what is returned ends that, and tells.
    ///
    /// # Errors
    ///
    /// If that cannot be recorded; in words.
    pub(crate) fn record(&self) -> Result<Option<Recording>, String> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => {
                let recording = GpuRecording::start(gpu.index)?;
                Ok(Some(Box::new(move || recording.stop())))
            }
            _ => Ok(None),
        }
    }

    /// Warns of GPUs that stay idle, for work whose ranks are threads: these share one.
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

    /// The peak of `ranks` ranks, by a measurement that is made now. A CPU's peak is measured with `threads`
    /// threads for each rank of this node, and that of what wgpu finds in f32; an NVIDIA GPU's is that of its data
    /// sheet. The other nodes are taken to be like this one.
    ///
    /// # Errors
    ///
    /// If the system does not start the threads.
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

    /// [`ResolvedDevice::peak`] of a run. Measurements are kept for all starts on this machine, and only where two of
    /// them agree is the peak known; `None` before.
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
        // What no later start finds is not worth the time.
        let Some(file) = key.file() else { return Ok(None) };
        let measure = || self.peak(precision, place, ranks, threads).map(|peak| peak.flops() / machines);
        let flops = kept_peak::known(&file, &key, measure)?;
        Ok(flops.map(|flops| Peak::kept(flops * machines, file)))
    }

    /// What tells an NVIDIA GPU apart from those of other processes; nothing for others.
    pub(crate) fn id(&self) -> [u8; 16] {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => gpu.uuid,
            _ => [0; 16],
        }
    }

    /// Everything that decides how it computes, besides this program: its name, driver, compiler and libraries,
    /// in words.
    pub(crate) fn fingerprint(&self) -> String {
        match &self.kind {
            Kind::Cpu => "CPU".to_owned(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => cuda::fingerprint(gpu),
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => wgpu::fingerprint(&self.device()),
        }
    }

    /// The kernels that this process has compiled for it or found compiled so far, if it is an NVIDIA GPU.
    pub(crate) fn kernels(&self) -> Option<KernelCounts> {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => Some(kernel_cache::counts().into()),
            _ => None,
        }
    }

    /// How many kinds of matrix products use algorithms that were measured before (`kiln warmup --products`).
    pub(crate) fn measured_products(&self) -> usize {
        match &self.kind {
            #[cfg(feature = "cuda")]
            Kind::Cuda(_) => kiln_model::ops::cube::matmul::used_algorithms(),
            _ => 0,
        }
    }

    /// One line: which device, and why not the other.
    pub fn describe(&self) -> String {
        format!("device: {}, {}", self.name(), self.why)
    }

    /// What it is, in words.
    pub(crate) fn name(&self) -> String {
        match &self.kind {
            Kind::Cpu => "CPU".to_owned(),
            #[cfg(feature = "cuda")]
            Kind::Cuda(gpu) => format!("GPU {gpu}"),
            #[cfg(feature = "wgpu")]
            Kind::Wgpu => "what wgpu finds".to_owned(),
        }
    }
}

/// Says that all but one of `visible` GPUs have nothing to do.
fn idle(visible: usize) -> Option<String> {
    let idle = match visible {
        0 | 1 => return None,
        2 => "GPU 1 stays".to_owned(),
        visible => format!("GPUs 1 to {} stay", visible - 1),
    };
    Some(format!(
        "{idle} idle: ranks that are threads share GPU 0. `kiln launch --nproc-per-node gpu -- …` starts a \
         rank for each GPU; CUDA_VISIBLE_DEVICES hides those that are not meant"
    ))
}

/// GPUs that this process sees.
///
/// # Errors
///
/// Why there are none, or why they cannot be counted.
pub fn count_gpus() -> Result<usize, DeviceError> {
    #[cfg(feature = "cuda")]
    return cuda::count_visible();
    #[cfg(not(feature = "cuda"))]
    Err(DeviceError::NotBuilt)
}

fn unusable(error: DeviceError) -> DeviceError {
    DeviceError::Unusable { reason: Box::new(error) }
}

/// Whether this process could see a GPU of NVIDIA's.
fn gpu_is_there() -> bool {
    #[cfg(feature = "cuda")]
    return cuda::is_there();
    #[cfg(not(feature = "cuda"))]
    return false;
}

/// Whether the kernel of a system whose files are below `root` has GPUs of NVIDIA's, and
/// CUDA_VISIBLE_DEVICES, which is `visible`, does not hide them all.
fn kernel_lists_gpus(root: &Path, visible: Option<&str>) -> bool {
    let listed = std::fs::read_dir(root.join("proc/driver/nvidia/gpus"));
    !matches!(visible, Some("" | "-1")) && listed.is_ok_and(|mut gpus| gpus.next().is_some())
}

#[cfg(test)]
mod tests {
    use super::{DeviceError, idle, kernel_lists_gpus};

    #[test]
    fn gpus_that_threads_leave_idle_are_told() {
        assert_eq!((idle(0), idle(1)), (None, None));
        assert!(idle(2).is_some_and(|text| text.starts_with("GPU 1 stays idle: ")));
        let text = idle(8).unwrap_or_default();
        assert!(text.starts_with("GPUs 1 to 7 stay idle: "), "{text}");
        assert!(text.contains("kiln launch --nproc-per-node gpu"), "{text}");
    }

    #[test]
    fn the_kernel_knows_of_gpus_without_a_library() {
        let root = tempfile::tempdir().expect("a folder");
        assert!(!kernel_lists_gpus(root.path(), None));
        let folder = root.path().join("proc/driver/nvidia/gpus");
        std::fs::create_dir_all(&folder).expect("a folder");
        assert!(!kernel_lists_gpus(root.path(), None));
        std::fs::create_dir(folder.join("0000:01:00.0")).expect("a folder");
        assert!(kernel_lists_gpus(root.path(), None));
        assert!(kernel_lists_gpus(root.path(), Some("0")));
        assert!(!kernel_lists_gpus(root.path(), Some("")));

        // A driver's library that is missing where there is a GPU is not as good as no GPU.
        let none = String::new;
        let missing = DeviceError::NoDriver { names: none(), places: none(), failures: Vec::new() };
        assert!(missing.means_none(false) && !missing.means_none(true));
        assert!(DeviceError::NotBuilt.means_none(true));
        assert!(DeviceError::NoGpu { visible: None }.means_none(false));
        assert!(!DeviceError::NoTransport.means_none(false));
    }

    /// What a configuration gets that leaves precision and micro-batch to the device.
    #[cfg(feature = "cuda")]
    #[test]
    fn gpus_compute_in_bf16_if_they_have_it_and_else_in_f16() {
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
        // As for ranks that hear what another one has settled.
        assert_eq!(new.check_precision(Precision::Bf16), Ok(()));
        assert_eq!(old.check_precision(Precision::F16), Ok(()));
        assert!(matches!(old.check_precision(Precision::Bf16), Err(DeviceError::OldGpu { .. })));
    }
}
