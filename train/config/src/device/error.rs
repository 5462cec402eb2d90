use kiln_sys::words::number_of;

/// Reasons why a run cannot use its device. The first sentence of each message names the problem.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// The program was built without GPU support.
    #[error(
        "this program was built without CUDA; build it with `cargo build --release --features cuda`, \
         which needs no CUDA, or set device.backend = \"cpu\""
    )]
    NotBuilt,
    /// There is no `libcuda.so.1`; `failures` lists the files found, and why they cannot be used.
    #[error(
        "there is no NVIDIA driver; looked for {names} in {places}{}. A machine with an NVIDIA GPU \
         needs its driver installed, and a container needs it passed in (as with `docker run --gpus \
         all`); or set device.backend = \"cpu\"", useless(.failures)
    )]
    NoDriver { names: String, places: String, failures: Vec<String> },
    /// The driver reports `error` for `call`.
    #[error(
        "the NVIDIA driver does not work ({call}: {error}); `nvidia-smi` may show more. After a driver \
         update, restart the machine"
    )]
    DriverFails { call: &'static str, error: String },
    /// The driver is older than `who` requires: `found` and `needed` are versions of CUDA.
    #[error(
        "the NVIDIA driver is too old: it is for CUDA {found}, and {who} need CUDA {needed}; update the \
         driver, or {instead}"
    )]
    DriverTooOld { found: Version, needed: Version, who: String, instead: String },
    /// The driver lists no GPU. `visible`: `CUDA_VISIBLE_DEVICES`, if it is set.
    #[error("there is no GPU; the driver works and lists none{}", hidden(.visible))]
    NoGpu { visible: Option<String> },
    /// The node has fewer GPUs than ranks that are processes.
    #[error(
        "there are fewer GPUs than ranks: {} on this node, and {}{}; start {} per node, or set \
         device.backend = \"cpu\"",
        number_of(*.ranks, "rank"), number_of(*.gpus, "GPU"), seen(.visible), number_of(*.gpus, "rank")
    )]
    FewerGpus { ranks: usize, gpus: usize, visible: Option<String> },
    /// Ranks that are processes use the same GPU.
    #[error(
        "ranks {ranks:?} have the same GPU; give each its own, through its local rank or \
         CUDA_VISIBLE_DEVICES"
    )]
    SharedGpu { ranks: Vec<usize> },
    /// Some ranks are on GPUs and some on CPUs. `gpu`: ranks with a GPU; `cpu`: ranks without one.
    #[error(
        "the ranks have different devices: ranks {gpu:?} use a GPU, and ranks {cpu:?} the CPU; set \
         device.backend = \"cuda\" to see why, or \"cpu\" for all"
    )]
    Mixed { gpu: Vec<usize>, cpu: Vec<usize> },
    /// Too little of the GPU's memory is free; `free`, `total` and `needed` are in bytes.
    #[error(
        "GPU {index} ({name}) has too little free memory: {} of {} GiB are free, and {} GiB are needed \
         for weights, moments and the driver; end the programs on the GPU (`nvidia-smi` lists it), or \
         train a smaller model or on more GPUs", gib(.free), gib(.total), gib(.needed)
    )]
    LowMemory { index: usize, name: String, free: u64, total: u64, needed: u64 },
    /// The GPU is older than `who` requires: `found` and `needed` are compute capabilities.
    #[error(
        "GPU {index} ({name}) is too old: it has compute capability {found}, and {who} needs {needed}; \
         {instead}"
    )]
    OldGpu { index: usize, name: String, found: Version, needed: Version, who: String, instead: &'static str },
    /// A library is missing, or cannot be loaded; `failures` lists the files found, and why they cannot be used.
    #[error(
        "{library} is not found; looked for {names} in {places}{}. `pip install {package}` installs it, \
         and so does {toolkit}", useless(.failures)
    )]
    NoLibrary {
        library: &'static str,
        names: String,
        places: String,
        failures: Vec<String>,
        package: &'static str,
        toolkit: &'static str,
    },
    /// A library is too old; the PyPI package `package` contains a newer one.
    #[error(
        "{library} is too old: {path} is version {found}, and {needed} is needed; `pip install --upgrade \
         {package}` installs a newer one"
    )]
    OldLibrary { library: &'static str, path: String, found: Version, needed: Version, package: &'static str },
    /// NVRTC cannot compile: `headers` is the folder of the included headers, `log` is NVRTC's log.
    #[error(
        "NVRTC {nvrtc} does not compile a small kernel{}: {log}. Install NVRTC and CUDA's headers of one version, \
         from one CUDA toolkit or with `pip install nvidia-cuda-nvrtc nvidia-cuda-runtime nvidia-cuda-crt \
         nvidia-cuda-cccl`", including(.headers)
    )]
    CompilerFails { nvrtc: String, headers: Option<String>, log: String },
    /// Headers that kernels include are missing; the PyPI packages `package` contain them.
    #[error(
        "CUDA's headers were not found; looked for {files} in {places}. `pip install {package}` \
         installs them, and so does the CUDA toolkit; CUDA_PATH names the folder above `include`"
    )]
    NoHeaders { files: String, places: String, package: &'static str },
    /// The GPU that the run would use is unusable, for this `reason`.
    #[error(
        "the GPU cannot be used: {reason}. To compute on the CPU instead, set \
         device.backend = \"cpu\""
    )]
    Unusable { reason: Box<DeviceError> },
    /// The program was built without wgpu.
    #[error(
        "this program was built without wgpu, which is for tests and for GPUs of vendors other than \
         NVIDIA; build it with `cargo build --release --features wgpu`, or set device.backend = \"cpu\""
    )]
    WgpuNotBuilt,
    /// wgpu finds no adapter.
    #[error(
        "wgpu finds no GPU; it looks for drivers of Vulkan (`vulkaninfo --summary` lists them). Any will \
         do, such as Mesa's, which compute on the CPU where there is no GPU; or set device.backend = \"cpu\""
    )]
    NoWgpu,
    /// Ranks that are processes cannot use wgpu.
    #[error(
        "ranks that are processes cannot communicate through wgpu; start one process without a \
         launcher, whose ranks are threads, or set device.backend = \"cpu\""
    )]
    WgpuProcesses,
    /// The ranks' transport supports only CPU memory.
    #[error("the ranks' transport moves only data in the memory of the CPU; set device.backend = \"cpu\"")]
    NoTransport,
}

impl DeviceError {
    /// Returns whether the error suggests that there is no GPU; `listed` if the kernel lists one.
    pub(super) fn means_none(&self, listed: bool) -> bool {
        match self {
            DeviceError::NotBuilt => true,
            DeviceError::NoDriver { .. } => !listed,
            DeviceError::NoGpu { .. } => true,
            _ => false,
        }
    }

    /// Returns the problem alone, without the places searched and the remedy.
    pub fn in_short(&self) -> String {
        let text = self.to_string();
        // Up to the first semicolon, or the full stop of the first sentence.
        let end = [text.find("; "), text.find(". ")].into_iter().flatten().min();
        text[..end.unwrap_or(text.len())].to_owned()
    }
}

/// A version of two numbers, such as a version of CUDA or a compute capability.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

impl std::fmt::Display for Version {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

fn useless(failures: &[String]) -> String {
    match failures {
        [] => String::new(),
        failures => format!(", and found files that cannot be loaded: {}", failures.join(", ")),
    }
}

fn including(headers: &Option<String>) -> String {
    headers.as_ref().map_or_else(String::new, |headers| format!(" that includes the headers in {headers}"))
}

fn hidden(visible: &Option<String>) -> String {
    match visible.as_deref() {
        Some("") => {
            ", because CUDA_VISIBLE_DEVICES is empty; unset it, or set device.backend = \"cpu\"".to_owned()
        }
        Some(value) => format!(
            ", perhaps because CUDA_VISIBLE_DEVICES={value}; unset it, or set \
             device.backend = \"cpu\""
        ),
        None => "; `nvidia-smi -L` lists the machine's GPUs, and a container sees only those passed to it"
            .to_owned(),
    }
}

fn seen(visible: &Option<String>) -> String {
    visible.as_ref().map_or_else(String::new, |value| format!(" (CUDA_VISIBLE_DEVICES={value})"))
}

fn gib(bytes: &u64) -> String {
    format!("{:.1}", *bytes as f64 / f64::from(1 << 30))
}
