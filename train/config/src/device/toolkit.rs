//! NVIDIA's libraries and headers that GPU computation needs, besides the driver.

use std::ffi::c_int;
use std::fmt;
use std::path::{Path, PathBuf};

use kiln_nvidia::libraries::{self, HEADERS, Missing, Wanted};
use kiln_nvidia::{Places, environment, nvrtc};

use super::DeviceError;
use super::error::Version;

#[derive(Debug)]
pub(super) struct Tool {
    path: PathBuf,
    pub(super) version: Option<Version>,
}

impl fmt::Display for Tool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.version {
            Some(version) => write!(f, "{version} ({})", self.path.display()),
            None => write!(f, "{}", self.path.display()),
        }
    }
}

const TOOLKIT: &str = "the CUDA toolkit";

/// Minimum NCCL version: the first with `ncclCommSplit`.
const NCCL: Version = Version(2, 18);

/// Returns the `files`, for CUDA 13 and 12, that a driver for CUDA `driver` can load.
fn fitting(driver: Version, files: [&'static str; 2]) -> Vec<&'static str> {
    match driver {
        Version(..13, _) => vec![files[1]],
        _ => files.to_vec(),
    }
}

fn not_found(
    library: &'static str,
    package: &'static str,
    toolkit: &'static str,
) -> impl FnOnce(Missing) -> DeviceError {
    move |Missing { names, places, failures }| DeviceError::NoLibrary {
        library,
        names,
        places,
        failures,
        package,
        toolkit,
    }
}

fn find(
    library: &'static str,
    wanted: &Wanted,
    places: &Places,
    package: &'static str,
    toolkit: &'static str,
) -> Result<PathBuf, DeviceError> {
    libraries::load(wanted, places).map_err(not_found(library, package, toolkit))
}

pub(super) fn nvrtc(driver: Version) -> Result<Tool, DeviceError> {
    let files = fitting(driver, ["libnvrtc.so.13", "libnvrtc.so.12"]);
    let package = if files.len() > 1 { "nvidia-cuda-nvrtc" } else { "nvidia-cuda-nvrtc-cu12" };
    let found = nvrtc::load(files);
    let found = found.map_err(not_found("NVRTC, which compiles kernels,", package, TOOLKIT))?;
    Ok(Tool { path: found.path, version: found.version.map(|(major, minor)| Version(major, minor)) })
}

/// Compiles a small kernel with NVRTC, which must be loaded, and the headers below `root`.
pub(super) fn try_compiling(nvrtc: &Tool, root: Option<&Path>) -> Result<(), DeviceError> {
    let headers = root.map(|root| root.join("include"));
    nvrtc::try_compiling(headers.as_deref()).map_err(|log| DeviceError::CompilerFails {
        nvrtc: nvrtc.to_string(),
        headers: headers.map(|headers| headers.display().to_string()),
        log,
    })
}

pub(super) fn lowest_capability() -> Option<Version> {
    use cudarc::nvrtc::sys::{nvrtcGetNumSupportedArchs, nvrtcGetSupportedArchs};
    let mut count: c_int = 0;
    // SAFETY: NVRTC is loaded, and writes one number.
    unsafe { nvrtcGetNumSupportedArchs(&mut count) }.result().ok()?;
    let mut all = vec![0 as c_int; usize::try_from(count).ok()?];
    // SAFETY: NVRTC writes as many numbers as it has reported.
    unsafe { nvrtcGetSupportedArchs(all.as_mut_ptr()) }.result().ok()?;
    let lowest = u32::try_from(all.into_iter().min()?).ok()?;
    Some(Version(lowest / 10, lowest % 10))
}

pub(super) fn cublas_lt(driver: Version) -> Result<Tool, DeviceError> {
    let files = fitting(driver, ["libcublasLt.so.13", "libcublasLt.so.12"]);
    let package = if files.len() > 1 { "nvidia-cublas" } else { "nvidia-cublas-cu12" };
    let wanted = Wanted { stem: "cublasLt", files, instead: None };
    let places = Places::for_libraries(&environment);
    let found = find("cuBLASLt, which multiplies matrices,", &wanted, &places, package, TOOLKIT)?;
    Ok(Tool { path: found, version: None })
}

pub(super) fn cublas_lt_version(driver: Version) -> Option<usize> {
    cublas_lt(driver).ok()?;
    // SAFETY: the library is loaded, and the call has no arguments.
    Some(unsafe { cudarc::cublaslt::sys::cublasLtGetVersion() })
}

pub(super) fn cupti(driver: Version) -> Result<PathBuf, DeviceError> {
    let files = fitting(driver, ["libcupti.so.13", "libcupti.so.12"]);
    let package = if files.len() > 1 { "nvidia-cuda-cupti" } else { "nvidia-cuda-cupti-cu12" };
    let wanted = Wanted { stem: "cupti", files, instead: None };
    let places = Places::for_libraries(&environment);
    find("CUPTI, which records a GPU's activity,", &wanted, &places, package, TOOLKIT)
}

pub(super) fn nccl(driver: Version) -> Result<Tool, DeviceError> {
    let package = if driver.0 < 13 { "nvidia-nccl-cu12" } else { "nvidia-nccl-cu13" };
    let wanted = Wanted { stem: "nccl", files: vec!["libnccl.so.2"], instead: None };
    let toolkit = "the package libnccl2 of NVIDIA's repositories";
    let places = Places::for_nccl(&environment);
    let found = find("NCCL, which connects GPUs,", &wanted, &places, package, toolkit)?;
    let mut number: c_int = 0;
    // SAFETY: the library is loaded, and the number outlives the call.
    let status = unsafe { cudarc::nccl::sys::ncclGetVersion(&mut number) };
    let number = if status.result().is_ok() { number as u32 } else { 0 };
    // Since NCCL 2.9; earlier versions are too old anyway.
    let version = Version(number / 10_000, number / 100 % 100);
    if version < NCCL {
        return Err(DeviceError::OldLibrary {
            library: "NCCL",
            path: found.display().to_string(),
            found: version,
            needed: NCCL,
            package,
        });
    }
    Ok(Tool { path: found, version: Some(version) })
}

/// Finds the folder above CUDA's `include`. Sets `CUDA_PATH` if CubeCL would not find the headers.
pub(super) fn headers() -> Result<PathBuf, DeviceError> {
    let places = Places::for_headers(&environment);
    let missing = |root: &Path| {
        let include = root.join("include");
        let has = |file: &&str| include.join(file).exists() || include.join("cccl").join(file).exists();
        HEADERS.into_iter().filter(|file| !has(file)).collect::<Vec<_>>()
    };
    let Some(root) = places.folders().find(|root| missing(root).is_empty()) else {
        return Err(DeviceError::NoHeaders {
            files: HEADERS.join(", "),
            places: places.names(),
            package: "nvidia-cuda-runtime nvidia-cuda-crt nvidia-cuda-cccl",
        });
    };
    if cubecl_cuda::install::cuda_path().as_deref() != Some(root) {
        // SAFETY: a device is chosen before ranks start; no other thread of this program changes or
        // reads variables through C at that time.
        unsafe { std::env::set_var("CUDA_PATH", root) };
    }
    Ok(root.to_owned())
}
