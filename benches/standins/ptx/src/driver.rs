//! C functions for `benches/standins`: its modules, functions, memory and launches. Reads `FAKE_CUDA_CHECK`,
//! `FAKE_CUDA_THREADS` and `FAKE_CUDA_PLANT`.

use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use crate::decode::module;
use crate::error::LaunchError;
use crate::footprint::Footprint;
use crate::grid::{Checks, Launch, Options};
use crate::memory::DeviceMemory;
use crate::plant::Plant;
use crate::program::{Kernel, Module};
use crate::stream_driver::{self, device};
use crate::streams::Submitted;

/// CUDA error codes.
const SUCCESS: c_int = 0;
const INVALID_VALUE: c_int = 1;
const LAUNCH_FAILED: c_int = 719;

/// Returns the device memory of this process.
fn memory() -> &'static DeviceMemory {
    static MEMORY: OnceLock<DeviceMemory> = OnceLock::new();
    MEMORY.get_or_init(DeviceMemory::default)
}

fn number(name: &str) -> Option<usize> {
    std::env::var(name).ok()?.parse().ok()
}

fn options() -> Options {
    static OPTIONS: OnceLock<Options> = OnceLock::new();
    *OPTIONS.get_or_init(|| {
        let otherwise = Options::default();
        Options {
            checks: match number("FAKE_CUDA_CHECK") {
                None => otherwise.checks,
                Some(0) => Checks::Off,
                Some(1) => Checks::On,
                Some(_) => Checks::Strict,
            },
            threads: number("FAKE_CUDA_THREADS").unwrap_or(otherwise.threads),
        }
    })
}

/// Returns the text of a module with the bug of `FAKE_CUDA_PLANT`, which is also reported.
fn planted(text: &str) -> Option<String> {
    static PLANT: OnceLock<Option<Plant>> = OnceLock::new();
    let plant = PLANT.get_or_init(|| {
        let plant = Plant::parse(&std::env::var("FAKE_CUDA_PLANT").ok()?);
        plant.inspect_err(|reason| eprintln!("FAKE_CUDA_PLANT: {reason}")).ok()
    });
    let (text, places) = plant.as_ref()?.apply(text);
    for place in places {
        let [before, after] = [&place.before, &place.after].map(|line| line.trim());
        eprintln!("planted in kernel {}, line {}: {after:?} for {before:?}", place.kernel, place.line);
    }
    Some(text)
}

/// A kernel, and the limit of shared memory that its launches may request.
pub struct Function {
    kernel: Arc<Kernel>,
    dynamic_shared_limit: AtomicU32,
}

/// Registers `bytes` bytes at `start` as device memory.
///
/// # Safety
/// They must be memory of this process until `kiln_ptx_freed`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_ptx_allocated(start: u64, bytes: u64) {
    // SAFETY: as above.
    unsafe { memory().add(start, bytes, options().checks > Checks::Off) };
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_freed(start: u64) {
    memory().remove(start);
}

/// Records that the host or a library has written `bytes` bytes at `to`.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_wrote(to: u64, bytes: u64) {
    memory().wrote(to, bytes);
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_copied(to: u64, from: u64, bytes: u64) {
    memory().copied(to, from, bytes);
}

/// Loads a module. Reports an error and returns null if the text cannot be read.
///
/// # Safety
/// `text` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_ptx_module(text: *const c_char) -> *mut Module {
    // SAFETY: as above.
    let text = unsafe { CStr::from_ptr(text) }.to_string_lossy();
    let text = planted(&text).unwrap_or_else(|| text.into_owned());
    match module(&text) {
        Ok(module) => Box::into_raw(Box::new(module)),
        Err(error) => {
            let line = text.lines().nth(error.line.saturating_sub(1) as usize).unwrap_or_default();
            eprintln!("PTX cannot be executed: {error}: {}", line.trim());
            std::ptr::null_mut()
        }
    }
}

/// # Safety
/// `module` must come from `kiln_ptx_module`, and must not be used afterwards.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_ptx_unload(module: *mut Module) {
    // SAFETY: as above. Functions keep their kernels.
    drop(unsafe { Box::from_raw(module) });
}

/// Returns a function of a module, or null. The function lives as long as the process.
///
/// # Safety
/// `module` must come from `kiln_ptx_module`, and `name` must be a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_ptx_function(module: *const Module, name: *const c_char) -> *mut Function {
    // SAFETY: as above.
    let (module, name) = unsafe { (&*module, CStr::from_ptr(name)) };
    match module.kernel(&name.to_string_lossy()) {
        Some(kernel) => Box::into_raw(Box::new(Function {
            kernel: kernel.clone(),
            dynamic_shared_limit: AtomicU32::new(0),
        })),
        None => std::ptr::null_mut(),
    }
}

/// Allows launches of `function` to request `bytes` of shared memory.
///
/// # Safety
/// `function` must come from `kiln_ptx_function`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_ptx_allow_shared(function: *const Function, bytes: u32) {
    // SAFETY: as above.
    let function = unsafe { &*function };
    function.dynamic_shared_limit.store(bytes, Ordering::Relaxed);
}

/// Executes a launch to its end, or queues it on `stream` if streams are asynchronous. Reports a fault and
/// returns its CUDA error code.
///
/// # Safety
/// `function` must come from `kiln_ptx_function`, `grid` and `block` must have three numbers each, and
/// `arguments` a pointer to each argument, as for `cuLaunchKernel`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_ptx_launch(
    function: *const Function,
    grid: *const u32,
    block: *const u32,
    shared: u32,
    arguments: *const *const c_void,
    stream: c_ulong,
) -> c_int {
    // SAFETY: as above.
    let (function, grid, block) =
        unsafe { (&*function, *grid.cast::<[u32; 3]>(), *block.cast::<[u32; 3]>()) };
    let kernel = &function.kernel;
    let values: Vec<&[u8]> = kernel
        .parameters
        .iter()
        .enumerate()
        .map(|(number, (variable, _))| {
            // SAFETY: there is a pointer for each parameter, to as many bytes as the kernel reads.
            unsafe {
                std::slice::from_raw_parts((*arguments.add(number)).cast::<u8>(), variable.bytes as usize)
            }
        })
        .collect();
    let sizes = format!("grid {grid:?}, block {block:?}, {shared} bytes of shared memory");
    let result = Launch::new(kernel, grid, block, &values).and_then(|mut launch| {
        launch.dynamic_shared = shared;
        launch.dynamic_shared_limit = function.dynamic_shared_limit.load(Ordering::Relaxed);
        match device() {
            None => launch.run(memory(), options()).map(|_| SUCCESS),
            Some(device) => match launch.refused() {
                None => {
                    Ok(stream_driver::code(device.submit(stream as usize, queued(launch, sizes.clone()))))
                }
                Some(reason) => Err(LaunchError::Refused(reason)),
            },
        }
    });
    result.unwrap_or_else(|error| {
        eprintln!("{error}\n  {sizes}");
        if matches!(error, LaunchError::Failed(_)) { LAUNCH_FAILED } else { INVALID_VALUE }
    })
}

/// Converts a launch to the form that a stream queues.
fn queued(launch: Launch, sizes: String) -> Submitted {
    Submitted::kernel(format!("launch of {}", launch.kernel.name), move || {
        let footprint = Mutex::new(Footprint::default());
        let result = launch.run_noting(memory(), options(), Some(&footprint));
        let footprint = footprint.into_inner().unwrap_or_else(PoisonError::into_inner);
        (footprint.accesses(), result.map(drop).map_err(|error| format!("{error}\n  {sizes}")))
    })
}
