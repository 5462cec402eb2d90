//! GPU activity recorded by NVIDIA's profiling library (CUPTI) on the host's monotonic clock, loaded only on request.
//!
//! Records are read at the offsets of `cupti_activity.h`, which have not changed since CUDA 9; newer fields follow.

use std::alloc::{Layout, alloc, dealloc};
use std::ffi::{CStr, c_char, c_int, c_void};
use std::ptr;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use kiln_observe::trace::GpuActivity;
use libloading::os::unix::{Library, RTLD_NOW};
use nix::time::{ClockId, clock_gettime};

use super::{cuda, toolkit};

const BUFFER: Layout = match Layout::from_size_align(1 << 20, 8) {
    Ok(layout) => layout,
    Err(_) => panic!("the size and the alignment of a buffer are powers of two"),
};

const MEMCPY: c_int = 1;
const MEMSET: c_int = 2;
const KERNEL: c_int = 10;

const KINDS: [c_int; 3] = [KERNEL, MEMCPY, MEMSET];

const COPIES: [&str; 11] = [
    "copy",
    "copy host to device",
    "copy device to host",
    "copy host to array",
    "copy array to host",
    "copy array to array",
    "copy array to device",
    "copy device to array",
    "copy device to device",
    "copy host to host",
    "copy device to device",
];

/// Maximum number of recorded kernels per process, enough for several thousand steps of a large model.
const MOST: usize = 1 << 22;

type Requested = unsafe extern "C" fn(*mut *mut u8, *mut usize, *mut usize);
type Completed = unsafe extern "C" fn(*mut c_void, u32, *mut u8, usize, usize);

/// CUPTI's functions. Each returns zero on success.
struct Cupti {
    enable: unsafe extern "C" fn(c_int) -> c_int,
    disable: unsafe extern "C" fn(c_int) -> c_int,
    flush: unsafe extern "C" fn(u32) -> c_int,
    next: unsafe extern "C" fn(*mut u8, usize, *mut *mut u8) -> c_int,
    describe: unsafe extern "C" fn(c_int, *mut *const c_char) -> c_int,
}

static CUPTI: OnceLock<Result<Cupti, String>> = OnceLock::new();

static RECORDED: Mutex<Vec<(u32, GpuActivity)>> = Mutex::new(Vec::new());

static GOING: Mutex<usize> = Mutex::new(0);

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

pub(super) struct GpuRecording {
    device: u32,
}

impl GpuRecording {
    /// Starts recording GPU `device` in this process. Fails if CUPTI is missing or refuses, as under another profiler.
    pub(super) fn start(device: usize) -> Result<Self, String> {
        let cupti = CUPTI.get_or_init(Cupti::load).as_ref().map_err(Clone::clone)?;
        let mut going = lock(&GOING);
        if *going == 0 {
            KINDS.into_iter().try_for_each(|kind| cupti.enable(kind)).inspect_err(|_| cupti.disable_all())?;
        }
        *going += 1;
        Ok(GpuRecording { device: u32::try_from(device).unwrap_or(u32::MAX) })
    }

    /// Returns the GPU's activity since the start, ordered by start time. Wait for the GPU first to get everything. If
    /// ranks share a GPU, the first rank gets the activity of all.
    pub(super) fn stop(self) -> Vec<GpuActivity> {
        if let Some(Ok(cupti)) = CUPTI.get() {
            // SAFETY: CUPTI is loaded; it calls `completed` from here.
            let _ = unsafe { (cupti.flush)(0) };
        }
        let mut recorded = lock(&RECORDED);
        let (mine, others) = recorded.drain(..).partition(|(device, _)| *device == self.device);
        *recorded = others;
        let mut mine: Vec<GpuActivity> = mine.into_iter().map(|(_, activity)| activity).collect();
        mine.sort_by(|a, b| a.start.total_cmp(&b.start));
        mine
    }
}

impl Drop for GpuRecording {
    fn drop(&mut self) {
        let mut going = lock(&GOING);
        *going = going.saturating_sub(1);
        if let (0, Some(Ok(cupti))) = (*going, CUPTI.get()) {
            cupti.disable_all();
        }
    }
}

impl Cupti {
    fn load() -> Result<Self, String> {
        let driver = cuda::driver().map_err(|error| error.to_string())?;
        let path = toolkit::cupti(driver).map_err(|error| error.to_string())?;
        // SAFETY: this runs the initialisers of a library by NVIDIA. The library stays loaded until the process
        // ends.
        let library = unsafe { Library::open(Some(&path), RTLD_NOW) }.map_err(|error| error.to_string())?;
        let library: &'static Library = Box::leak(Box::new(library));
        macro_rules! function {
            ($name:literal) => {
                // SAFETY: the type is that of the function in `cupti_activity.h` and `cupti_result.h`.
                *unsafe { library.get($name) }.map_err(|error| format!("{}: {error}", path.display()))?
            };
        }
        let cupti = Cupti {
            enable: function!(b"cuptiActivityEnable\0"),
            disable: function!(b"cuptiActivityDisable\0"),
            flush: function!(b"cuptiActivityFlushAll\0"),
            next: function!(b"cuptiActivityGetNextRecord\0"),
            describe: function!(b"cuptiGetResultString\0"),
        };
        let register: unsafe extern "C" fn(Requested, Completed) -> c_int =
            function!(b"cuptiActivityRegisterCallbacks\0");
        let register_clock: unsafe extern "C" fn(extern "C" fn() -> u64) -> c_int =
            function!(b"cuptiActivityRegisterTimestampCallback\0");
        // SAFETY: the functions have the types that CUPTI requires, and are never unloaded.
        cupti.check("give it a clock", unsafe { register_clock(now) })?;
        // SAFETY: as above.
        cupti.check("give it buffers", unsafe { register(requested, completed) })?;
        Ok(cupti)
    }

    fn enable(&self, kind: c_int) -> Result<(), String> {
        // SAFETY: CUPTI is loaded, and refuses kinds that it does not know.
        self.check("record a kind of activity", unsafe { (self.enable)(kind) })
    }

    fn disable_all(&self) {
        for kind in KINDS {
            // SAFETY: as for `enable`. Disabling a kind that is not enabled is a harmless error.
            let _ = unsafe { (self.disable)(kind) };
        }
    }

    fn check(&self, doing: &str, status: c_int) -> Result<(), String> {
        if status == 0 {
            return Ok(());
        }
        let mut text = ptr::null();
        // SAFETY: CUPTI writes a pointer to a static string, or nothing.
        unsafe { (self.describe)(status, &mut text) };
        // SAFETY: as above.
        let text = (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned());
        Err(format!("CUPTI could not {doing}: {}", text.unwrap_or_else(|| format!("error {status}"))))
    }
}

extern "C" fn now() -> u64 {
    clock_gettime(ClockId::CLOCK_MONOTONIC).map_or(0, |now| Duration::from(now).as_nanos() as u64)
}

unsafe extern "C" fn requested(buffer: *mut *mut u8, size: *mut usize, records: *mut usize) {
    // SAFETY: the layout's size is not zero. CUPTI accepts a null buffer as none.
    let memory = unsafe { alloc(BUFFER) };
    // SAFETY: CUPTI passes valid pointers, which it reads after this.
    unsafe {
        *buffer = memory;
        *size = if memory.is_null() { 0 } else { BUFFER.size() };
        // CUPTI writes as many records as fit.
        *records = 0;
    }
}

unsafe extern "C" fn completed(
    _context: *mut c_void,
    _stream: u32,
    buffer: *mut u8,
    _size: usize,
    filled: usize,
) {
    if buffer.is_null() {
        return;
    }
    if let Some(Ok(cupti)) = CUPTI.get() {
        let mut recorded = lock(&RECORDED);
        let mut record = ptr::null_mut();
        // SAFETY: the buffer comes from `requested`, and CUPTI has filled its first `filled` bytes.
        while recorded.len() < MOST && unsafe { (cupti.next)(buffer, filled, &mut record) } == 0 {
            // SAFETY: CUPTI has set the pointer to a record in the buffer.
            recorded.extend(unsafe { read(record) });
        }
    }
    // SAFETY: the buffer was allocated with this layout, and nothing else refers to it any more.
    unsafe { dealloc(buffer, BUFFER) };
}

/// Reads a record, with the number of its device; `None` if it is of another kind.
///
/// # Safety
///
/// `record` must point to a record of CUPTI.
unsafe fn read(record: *const u8) -> Option<(u32, GpuActivity)> {
    // SAFETY: every record begins with its kind, and records of a kind have these fields at these offsets.
    unsafe {
        let number = |at: usize| record.add(at).cast::<u32>().read_unaligned();
        let long = |at: usize| record.add(at).cast::<u64>().read_unaligned();
        let seconds = |at: usize| long(at) as f64 / 1e9;
        let (device, stream, name, bytes) = match c_int::try_from(number(0)).ok()? {
            KERNEL => {
                let name = record.add(104).cast::<*const c_char>().read_unaligned();
                let name = match name.is_null() {
                    true => "kernel".to_owned(),
                    false => CStr::from_ptr(name).to_string_lossy().into_owned(),
                };
                (number(40), number(48), name, None)
            }
            MEMCPY => {
                let name = COPIES.get(usize::from(record.add(4).read())).unwrap_or(&COPIES[0]);
                (number(32), number(40), (*name).to_owned(), Some(long(8)))
            }
            MEMSET => (number(32), number(40), "fill".to_owned(), Some(long(8))),
            _ => return None,
        };
        Some((device, GpuActivity { name, stream, bytes, start: seconds(16), end: seconds(24) }))
    }
}
