//! The parts of CUDA's driver that NCCL needs and CubeCL lacks: a separate stream, and events.

#![allow(unsafe_code)]

use super::error::NcclError;
use cudarc::driver::result::{DriverError, ctx, device, event, primary_ctx, stream};
use cudarc::driver::sys::{CUcontext, CUdevice, CUevent, CUevent_flags, CUevent_wait_flags};
use cudarc::driver::sys::{CUresult, CUstream};

pub(crate) struct Context {
    device: CUdevice,
    context: CUcontext,
}

// SAFETY: a context may be made current on any number of threads.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// Retains the primary context of GPU `index`. The driver must be loaded.
    pub(crate) fn of(index: usize) -> Result<Context, NcclError> {
        let driver = |call| move |error| NcclError::driver(call, error);
        cudarc::driver::result::init().map_err(driver("cuInit"))?;
        let device = device::get(i32::try_from(index).unwrap_or(i32::MAX));
        let device = device.map_err(driver("cuDeviceGet"))?;
        // SAFETY: the driver has just returned this device.
        let context = unsafe { primary_ctx::retain(device) };
        let context = context.map_err(driver("cuDevicePrimaryCtxRetain"))?;
        Ok(Context { device, context })
    }

    pub(crate) fn enter(&self) -> Result<(), DriverError> {
        // SAFETY: the context is retained as long as `self` lives.
        unsafe { ctx::set_current(self.context) }
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        // SAFETY: retained once. An error cannot be handled here.
        let _ = unsafe { primary_ctx::release(self.device) };
    }
}

pub(crate) struct Stream(CUstream);

// SAFETY: streams may be used from any thread.
unsafe impl Send for Stream {}
// SAFETY: as above.
unsafe impl Sync for Stream {}

impl Stream {
    /// Creates a stream of the highest priority, so that transfers get GPU cores while compute runs, without
    /// synchronization with the default stream. Needs a current context.
    pub(crate) fn new() -> Result<Stream, DriverError> {
        let (_, greatest) = stream::get_priority_range()?;
        stream::create_with_priority(stream::StreamKind::NonBlocking, greatest).map(Stream)
    }

    pub(crate) fn raw(&self) -> CUstream {
        self.0
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and this is its last use. The driver completes pending work first.
        let _ = unsafe { stream::destroy(self.0) };
    }
}

pub(crate) struct Event(CUevent);

// SAFETY: events may be used from any thread.
unsafe impl Send for Event {}

impl Event {
    /// Needs a current context.
    pub(crate) fn new() -> Result<Event, DriverError> {
        event::create(CUevent_flags::CU_EVENT_DISABLE_TIMING).map(Event)
    }

    /// Records the event behind all work queued on `stream` so far.
    ///
    /// # Safety
    ///
    /// The stream must be alive.
    pub(crate) unsafe fn record(&self, stream: CUstream) -> Result<(), DriverError> {
        // SAFETY: the event is alive, and the caller guarantees that the stream is.
        unsafe { event::record(self.0, stream) }
    }

    /// Like [`Event::record`], but safe, because the stream is borrowed.
    pub(crate) fn record_on(&self, stream: &Stream) -> Result<(), DriverError> {
        // SAFETY: the stream is alive while it is borrowed.
        unsafe { self.record(stream.raw()) }
    }

    /// Makes all later work of `stream` wait for the event.
    ///
    /// # Safety
    ///
    /// The stream must be alive.
    pub(crate) unsafe fn make_wait(&self, stream: CUstream) -> Result<(), DriverError> {
        let flags = CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: the event is alive, and the caller guarantees that the stream is.
        unsafe { stream::wait_event(stream, self.0, flags) }
    }

    pub(crate) fn has_passed(&self) -> Result<bool, DriverError> {
        // SAFETY: the event is alive.
        match unsafe { event::query(self.0) } {
            Ok(()) => Ok(true),
            Err(DriverError(CUresult::CUDA_ERROR_NOT_READY)) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by `new`, and this is its last use.
        let _ = unsafe { event::destroy(self.0) };
    }
}

/// The events of one operation: `ready` when its buffers may be used, `done` when it has completed.
pub(crate) struct Events {
    pub(crate) ready: Event,
    pub(crate) done: Event,
}

impl Events {
    /// Needs a current context.
    pub(crate) fn new() -> Result<Events, DriverError> {
        Ok(Events { ready: Event::new()?, done: Event::new()? })
    }
}
