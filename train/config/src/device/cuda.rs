use cudarc::driver::result::{self, DriverError};
use cudarc::driver::sys::{self, CUdevice_attribute as Attribute};
use kiln_nvidia::libraries::{self, Wanted};
use kiln_nvidia::{Places, kernel_cache};

use super::error::DeviceError;
use super::error::Version;
use super::gpu::Gpu;
use super::request::{DeviceRequest, share_gpu};
use super::{products, toolkit};
use crate::{Choice, Precision};
use kiln_launch::place::RankEnv;

/// Minimum driver version: cudarc's bindings for CUDA 13.0 call `cuEventElapsedTime_v2`, which came with 12.8;
/// all other called functions are older.
const DRIVER: Version = Version(12, 8);

const BF16: Version = Version(8, 0);

/// Bytes for the driver's context, kernels and libraries.
const OVERHEAD: u64 = 768 << 20;

/// Selects and checks a GPU for the rank at `place`; without `place`, for all ranks, which are threads.
pub(super) fn select(request: &DeviceRequest, place: Option<&RankEnv>) -> Result<Gpu, DeviceError> {
    let driver = driver()?;
    let gpus = count()?;
    let index = match place {
        None => 0,
        Some(place) => index(place.local_rank, place.local_world_size, gpus)?,
    };
    let mut gpu = describe(index)?;
    compiler(driver, &gpu)?;
    toolkit::cublas_lt(driver)?;
    products::load();
    if place.is_some() {
        toolkit::nccl(driver)?;
    }
    // Last, since it may set `CUDA_PATH`.
    toolkit::headers()?;
    if let Choice::Is(precision) = request.precision {
        check_precision(&gpu, precision)?;
    }
    gpu.visible = gpus;
    // Retained until the process ends. Otherwise, the driver would destroy the context, and CubeCL would spend tenths
    // of a second creating it again.
    gpu.free = retain(index)?;
    let needed = OVERHEAD + request.bytes(place.is_some());
    if gpu.free < needed {
        let Gpu { name, free, memory: total, .. } = gpu;
        return Err(DeviceError::LowMemory { index, name, free, total, needed });
    }
    Ok(gpu)
}

pub(super) fn check_precision(gpu: &Gpu, precision: Precision) -> Result<(), DeviceError> {
    if precision != Precision::Bf16 || has_bf16(gpu) {
        return Ok(());
    }
    Err(DeviceError::OldGpu {
        index: gpu.index,
        name: gpu.name.clone(),
        found: gpu.capability,
        needed: BF16,
        who: "precision.compute = \"bf16\"".to_owned(),
        instead: "use \"f32\"",
    })
}

pub(super) fn has_bf16(gpu: &Gpu) -> bool {
    gpu.capability >= BF16
}

pub(super) fn fingerprint(gpu: &Gpu) -> String {
    let version =
        |version: Option<Version>| version.map_or("unknown".to_owned(), |version| version.to_string());
    let cuda = driver().ok();
    let nvrtc = cuda.and_then(|cuda| toolkit::nvrtc(cuda).ok()).and_then(|nvrtc| nvrtc.version);
    let cublas_lt = cuda.and_then(toolkit::cublas_lt_version);
    let cublas_lt = cublas_lt.map_or("unknown".to_owned(), |version| version.to_string());
    // The version of the driver itself; CUDA's version stays the same over several drivers.
    let module = std::fs::read_to_string("/proc/driver/nvidia/version").unwrap_or_default();
    let module = module.lines().next().unwrap_or("unknown").to_owned();
    format!(
        "{}, compute capability {}, driver for CUDA {} ({module}), NVRTC {}, cuBLASLt {cublas_lt}{}",
        gpu.name,
        gpu.capability,
        version(cuda),
        version(nvrtc),
        products::fingerprint()
    )
}

pub(super) fn is_there() -> bool {
    driver().and_then(|_| count()).map_or_else(|error| !error.means_none(false), |_| true)
}

/// Returns the GPU index of one of `ranks` processes of a node. If each sees one GPU, the ranks compare GPUs later.
fn index(local_rank: usize, ranks: usize, gpus: usize) -> Result<usize, DeviceError> {
    if gpus == 1 || share_gpu() {
        return Ok(local_rank % gpus);
    }
    match local_rank < gpus && ranks <= gpus {
        true => Ok(local_rank),
        false => Err(DeviceError::FewerGpus { ranks, gpus, visible: visible() }),
    }
}

/// Returns lines for `kiln doctor` about every component that a GPU needs.
pub fn examine() -> Vec<String> {
    let (driver, mut lines) = match driver() {
        Ok(driver) => (Some(driver), vec![format!("driver: for CUDA {driver}")]),
        Err(error) => (None, vec![format!("driver: {error}")]),
    };
    let line = |name: &str, result: Result<String, DeviceError>| match result {
        Ok(found) => format!("{name}: {found}"),
        Err(error) => format!("{name}: {error}"),
    };
    if driver.is_some() {
        match count() {
            Err(error) => lines.push(format!("GPU: {error}")),
            Ok(gpus) => lines.extend((0..gpus).map(|index| {
                let gpu = describe(index).and_then(|gpu| Ok(Gpu { free: free(index)?, ..gpu }));
                line("GPU", gpu.map(|gpu| gpu.to_string()))
            })),
        }
    }
    // Without a driver, accepts libraries of any version.
    let for_driver = driver.unwrap_or(Version(13, 0));
    lines.push(line(
        "NVRTC",
        toolkit::nvrtc(for_driver).and_then(|nvrtc| {
            if driver.is_some() {
                fits(for_driver, &nvrtc)?;
            }
            toolkit::try_compiling(&nvrtc, None)?;
            Ok(nvrtc.to_string())
        }),
    ));
    lines.push(line("cuBLASLt", toolkit::cublas_lt(for_driver).map(|tool| tool.to_string())));
    lines.push(line("NCCL", toolkit::nccl(for_driver).map(|tool| tool.to_string())));
    // Last, because the search may set `CUDA_PATH`.
    lines.push(line(
        "headers",
        toolkit::headers().and_then(|root| {
            // A compiler that is missing or fails is reported on its own line.
            if let Ok(nvrtc) = toolkit::nvrtc(for_driver)
                && toolkit::try_compiling(&nvrtc, None).is_ok()
            {
                toolkit::try_compiling(&nvrtc, Some(&root))?;
            }
            Ok(root.join("include").display().to_string())
        }),
    ));
    lines.push(format!("kernels: {}", kernel_cache::describe()));
    lines.push(format!("products: {}", products::describe()));
    lines
}

/// Loads and initializes the driver, and returns its version of CUDA.
pub(super) fn driver() -> Result<Version, DeviceError> {
    let wanted = Wanted { stem: "cuda", files: vec!["libcuda.so.1"], instead: None };
    libraries::load(&wanted, &Places::for_driver()).map_err(|missing| DeviceError::NoDriver {
        names: missing.names,
        places: missing.places,
        failures: missing.failures,
    })?;
    let mut number = 0;
    // SAFETY: the library is loaded, and the number outlives the call.
    let status = unsafe { sys::cuDriverGetVersion(&mut number) };
    status.result().map_err(failed("cuDriverGetVersion"))?;
    let number = number.unsigned_abs();
    let version = Version(number / 1000, number / 10 % 100);
    // The driver's version only matters if there is a GPU.
    match result::init() {
        Err(DriverError(sys::CUresult::CUDA_ERROR_NO_DEVICE)) => {
            return Err(DeviceError::NoGpu { visible: visible() });
        }
        result => result.map_err(failed("cuInit"))?,
    }
    if version < DRIVER {
        return Err(DeviceError::DriverTooOld {
            found: version,
            needed: DRIVER,
            who: "the calls that Kiln makes".to_owned(),
            instead: "set device.backend = \"cpu\"".to_owned(),
        });
    }
    Ok(version)
}

pub(super) fn count_visible() -> Result<usize, DeviceError> {
    driver()?;
    count()
}

fn count() -> Result<usize, DeviceError> {
    let count = result::device::get_count().map_err(failed("cuDeviceGetCount"))?;
    match usize::try_from(count) {
        Ok(count) if count > 0 => Ok(count),
        _ => Err(DeviceError::NoGpu { visible: visible() }),
    }
}

fn describe(index: usize) -> Result<Gpu, DeviceError> {
    let device = result::device::get(index as i32).map_err(failed("cuDeviceGet"))?;
    let attribute = |attribute| {
        // SAFETY: `device` comes from the driver.
        let value = unsafe { result::device::get_attribute(device, attribute) };
        value.map(i32::unsigned_abs).map_err(failed("cuDeviceGetAttribute"))
    };
    let uuid = result::device::get_uuid(device).map_err(failed("cuDeviceGetUuid"))?;
    Ok(Gpu {
        index,
        name: result::device::get_name(device).map_err(failed("cuDeviceGetName"))?,
        capability: Version(
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        // SAFETY: as above.
        memory: unsafe { result::device::total_mem(device) }.map_err(failed("cuDeviceTotalMem"))? as u64,
        free: 0,
        multiprocessors: attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?,
        clock: f64::from(attribute(Attribute::CU_DEVICE_ATTRIBUTE_CLOCK_RATE)?) * 1e3,
        uuid: uuid.bytes.map(|byte| byte as u8),
        visible: 1,
    })
}

/// Retains a GPU's primary context, and returns the bytes that are free on the GPU.
fn retain(index: usize) -> Result<u64, DeviceError> {
    let device = result::device::get(index as i32).map_err(failed("cuDeviceGet"))?;
    // SAFETY: `device` comes from the driver, and the context is retained while it is current.
    unsafe {
        let context = result::primary_ctx::retain(device).map_err(failed("cuDevicePrimaryCtxRetain"))?;
        let info = result::ctx::set_current(context).and_then(|()| result::mem_get_info());
        let unset = sys::cuCtxSetCurrent(std::ptr::null_mut()).result();
        let (free, _) = info.map_err(failed("cuMemGetInfo"))?;
        unset.map_err(failed("cuCtxSetCurrent"))?;
        Ok(free as u64)
    }
}

/// Returns the free bytes on a GPU, without retaining its context, which takes memory.
fn free(index: usize) -> Result<u64, DeviceError> {
    let free = retain(index)?;
    let device = result::device::get(index as i32).map_err(failed("cuDeviceGet"))?;
    // SAFETY: `retain` has retained the context once, and this call does not use it.
    unsafe { result::primary_ctx::release(device) }.map_err(failed("cuDevicePrimaryCtxRelease"))?;
    Ok(free)
}

/// Checks that a compiler for `gpu` is available whose output `driver` can load.
fn compiler(driver: Version, gpu: &Gpu) -> Result<(), DeviceError> {
    let nvrtc = toolkit::nvrtc(driver)?;
    fits(driver, &nvrtc)?;
    match toolkit::lowest_capability() {
        Some(needed) if gpu.capability < needed => Err(DeviceError::OldGpu {
            index: gpu.index,
            name: gpu.name.clone(),
            found: gpu.capability,
            needed,
            who: format!("NVRTC {nvrtc}"),
            instead: "set device.backend = \"cpu\"",
        }),
        _ => Ok(()),
    }
}

/// Checks that the driver can load NVRTC's PTX, which needs a driver of NVRTC's CUDA version or later.
fn fits(driver: Version, nvrtc: &toolkit::Tool) -> Result<(), DeviceError> {
    match nvrtc.version {
        Some(needed) if needed > driver => Err(DeviceError::DriverTooOld {
            found: driver,
            needed,
            who: format!("kernels that NVRTC {nvrtc} compiles"),
            instead: format!(
                "let an NVRTC of CUDA {driver} be found first (`pip install \
                 'nvidia-cuda-nvrtc{}=={driver}.*'`)",
                if driver.0 < 13 { "-cu12" } else { "" }
            ),
        }),
        _ => Ok(()),
    }
}

fn visible() -> Option<String> {
    std::env::var("CUDA_VISIBLE_DEVICES").ok()
}

fn failed(call: &'static str) -> impl Fn(DriverError) -> DeviceError {
    move |error| {
        let name = error.error_name().ok().map(|name| name.to_string_lossy().into_owned());
        let error = name.unwrap_or_else(|| format!("error {}", error.0 as u32));
        DeviceError::DriverFails { call, error }
    }
}

#[cfg(test)]
mod tests {
    use super::{DeviceError, index};

    #[test]
    fn every_rank_gets_its_own_gpu() {
        let indices: Result<Vec<_>, _> = (0..4).map(|rank| index(rank, 4, 8)).collect();
        assert_eq!(indices, Ok(vec![0, 1, 2, 3]));
        assert_eq!(index(3, 4, 1), Ok(0));
        assert!(matches!(index(1, 3, 2), Err(DeviceError::FewerGpus { ranks: 3, gpus: 2, .. })));
    }
}
