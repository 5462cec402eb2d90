//! C functions for `benches/standins`, where `FAKE_CUDA_ASYNC` makes streams asynchronous. Also reads
//! `FAKE_CUDA_QUEUE` and `FAKE_CUDA_RACES`.

use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int, c_ulong, c_void};
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use crate::streams::{Access, Device, Event, Failed, Settings, Submitted, Use};

/// CUDA error codes.
const SUCCESS: c_int = 0;
const NOT_READY: c_int = 600;
const LAUNCH_FAILED: c_int = 719;

/// Number of operations that a stream accepts before the host waits; about as many as a real driver.
const QUEUE: usize = 1024;

/// Returns the streams of this process, if they are asynchronous.
pub fn device() -> Option<&'static Device> {
    static DEVICE: OnceLock<Option<Device>> = OnceLock::new();
    let number = |name: &str| std::env::var(name).ok()?.parse::<u64>().ok();
    let made = DEVICE.get_or_init(|| {
        let seed = number("FAKE_CUDA_ASYNC").filter(|&seed| seed > 0)?;
        let queue = number("FAKE_CUDA_QUEUE").map_or(QUEUE, |queue| queue as usize);
        let goes_on = std::env::var("FAKE_CUDA_RACES").is_ok_and(|value| value == "tell");
        Some(Device::new(Settings { seed, queue, goes_on }, |problem| eprintln!("{problem}")))
    });
    made.as_ref()
}

fn events() -> MutexGuard<'static, HashMap<c_ulong, Event>> {
    static EVENTS: OnceLock<Mutex<HashMap<c_ulong, Event>>> = OnceLock::new();
    EVENTS.get_or_init(Mutex::default).lock().unwrap_or_else(PoisonError::into_inner)
}

/// Returns the event with this number; an event that was never recorded is empty.
fn event(number: c_ulong) -> Event {
    events().get(&number).cloned().unwrap_or_default()
}

/// Returns the CUDA error code of a result.
pub fn code(result: Result<(), Failed>) -> c_int {
    if result.is_ok() { SUCCESS } else { LAUNCH_FAILED }
}

fn on_device(f: impl FnOnce(&Device) -> Result<(), Failed>) -> c_int {
    code(device().map_or(Ok(()), f))
}

fn query(event: &Event) -> c_int {
    match device().map_or(Ok(true), |device| device.query(event)) {
        Ok(true) => SUCCESS,
        Ok(false) => NOT_READY,
        Err(Failed) => LAUNCH_FAILED,
    }
}

/// Returns 1 if streams are asynchronous.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_is_async() -> c_int {
    c_int::from(device().is_some())
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_stream_create(stream: c_ulong, blocking: c_int) {
    if let Some(device) = device() {
        device.create(stream as usize, blocking != 0);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_stream_destroy(stream: c_ulong) {
    if let Some(device) = device() {
        device.destroy(stream as usize);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_stream_query(stream: c_ulong) -> c_int {
    query(&device().map(|device| device.record(stream as usize)).unwrap_or_default())
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_stream_synchronize(stream: c_ulong) -> c_int {
    on_device(|device| device.wait_on_host(&device.record(stream as usize)))
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_synchronize() -> c_int {
    on_device(Device::synchronize)
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_event_record(event: c_ulong, stream: c_ulong) -> c_int {
    on_device(|device| {
        events().insert(event, device.record(stream as usize));
        if device.has_failed() { Err(Failed) } else { Ok(()) }
    })
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_event_destroy(event: c_ulong) {
    events().remove(&event);
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_event_query(number: c_ulong) -> c_int {
    query(&event(number))
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_event_synchronize(number: c_ulong) -> c_int {
    on_device(|device| device.wait_on_host(&event(number)))
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_stream_wait(stream: c_ulong, number: c_ulong) -> c_int {
    on_device(|device| device.wait(stream as usize, &event(number)))
}

/// `struct span` of `ptx.h`: `count` pieces of `bytes` bytes, `stride` apart.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct Span {
    start: u64,
    bytes: u64,
    count: u64,
    stride: u64,
    writes: c_int,
}

impl Span {
    fn accesses(self) -> Vec<Access> {
        let how = if self.writes != 0 { Use::Write } else { Use::Read };
        if self.stride == self.bytes {
            return vec![Access::new(self.start, self.bytes * self.count, how)];
        }
        (0..self.count).map(|row| Access::new(self.start + row * self.stride, self.bytes, how)).collect()
    }
}

/// Queues a function on `stream` with a copy of `size` bytes of `data`. The function uses `count` spans.
///
/// # Safety
/// `what` must be a C string, `spans` and `data` must have the given lengths, and `run` must be safe on any
/// thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn kiln_ptx_submit(
    stream: c_ulong,
    what: *const c_char,
    spans: *const Span,
    count: usize,
    run: extern "C" fn(*mut c_void) -> c_int,
    data: *const c_void,
    size: usize,
) -> c_int {
    // SAFETY: as above.
    let (what, spans, data) = unsafe {
        (
            CStr::from_ptr(what).to_string_lossy().into_owned(),
            std::slice::from_raw_parts(spans, count),
            std::slice::from_raw_parts(data.cast::<u8>(), size),
        )
    };
    // In words, so that the copy is aligned.
    let mut copy = vec![0_u64; size.div_ceil(8)];
    for (word, bytes) in copy.iter_mut().zip(data.chunks(8)) {
        let mut all = [0; 8];
        all[..bytes.len()].copy_from_slice(bytes);
        *word = u64::from_ne_bytes(all);
    }
    let accesses = spans.iter().flat_map(|span| span.accesses()).collect();
    let call = move || match run(copy.as_mut_ptr().cast()) {
        SUCCESS => Ok(()),
        error => Err(format!("error {error}")),
    };
    on_device(|device| device.submit(stream as usize, Submitted::call(what, accesses, call)))
}

/// A C pointer that is passed to another thread.
struct Opaque(*mut c_void);

// SAFETY: the caller that queues a host function permits a call with this pointer on another thread.
unsafe impl Send for Opaque {}

impl Opaque {
    fn pointer(&self) -> *mut c_void {
        self.0
    }
}

/// Calls `function` when `stream` reaches it.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_host_function(
    stream: c_ulong,
    function: extern "C" fn(*mut c_void),
    data: *mut c_void,
) -> c_int {
    let data = Opaque(data);
    let call = move || function(data.pointer());
    on_device(|device| device.submit(stream as usize, Submitted::host_function(call)))
}

/// Returns the stream on which memory is allocated or freed; `None` for the host.
fn stream_of(number: i64) -> Option<usize> {
    usize::try_from(number).ok()
}

/// Registers memory for streams: from the next operation of `stream` on, or immediately if `stream` is
/// negative.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_stream_allocated(start: u64, bytes: u64, stream: i64) -> c_int {
    on_device(|device| device.allocated(start, bytes, stream_of(stream)))
}

/// Frees memory when `stream` reaches this operation or, if `stream` is negative, when all streams have
/// finished their current operations. Calls `release` once the addresses may be reused.
#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_stream_free(start: u64, stream: i64, release: extern "C" fn(u64)) -> c_int {
    on_device(|device| device.free(start, stream_of(stream), Box::new(move || release(start))))
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_pinned(start: u64, bytes: u64) {
    if let Some(device) = device() {
        device.pinned(start, bytes);
    }
}

#[unsafe(no_mangle)]
pub extern "C" fn kiln_ptx_unpinned(start: u64, release: extern "C" fn(u64)) {
    if let Some(device) = device() {
        device.unpinned(start, Box::new(move || release(start)));
    }
}
