//! A rank's NCCL communicator, and the operations queued on it.

#![allow(unsafe_code)]

use super::cuda::{Events, Stream};
use super::error::NcclError;
use super::gpu::{Gpu, Server, wait_for_nccl};
use super::library::{Comm, Launch};
use crate::backend::GroupControl;
use crate::call::CallSite;
use crate::recorder::RecordId;
use crate::sync::{Monitor, lock};
use cubecl_environment::stream::StreamId;
use cubecl_runtime::server::{BufferBinding, ServerError};
use cubecl_server::stream::{FailureStore, WriteScoped};
use std::collections::VecDeque;
use std::sync::{Arc, Mutex, Weak};
use std::time::{Duration, Instant};

pub(crate) struct Plan {
    pub(crate) launch: Launch,
    pub(crate) input: BufferBinding,
    pub(crate) output: BufferBinding,
}

/// One communicator, shared by callers, CubeCL's thread and the watcher thread.
pub(crate) struct Channel {
    pub(crate) gpu: Arc<Gpu>,
    /// `None` once aborted. Locked for each use, because NCCL's handles are not thread-safe.
    pub(crate) comm: Mutex<Option<Comm>>,
    pub(crate) stream: Stream,
    pub(crate) spare: Arc<Mutex<Vec<Events>>>,
    pub(crate) in_flight: Monitor<InFlight>,
    pub(crate) control: Arc<dyn GroupControl>,
}

impl Channel {
    pub(crate) fn state(&self) -> Result<i32, NcclError> {
        let library = &self.gpu.library;
        let state = match &*lock(&self.comm) {
            Some(comm) => library.state(comm),
            None => return Err(NcclError::aborted()),
        };
        library.check("an operation", state)?;
        Ok(state)
    }

    /// Frees the communicator of a leaving rank, without running operations. Finalizes it first, unless `is_sound`
    /// returns false (the group has failed) or `timeout` passes.
    pub(crate) fn finish(&self, timeout: Duration, is_sound: impl Fn() -> bool) -> Result<(), NcclError> {
        let library = &self.gpu.library;
        match &*lock(&self.comm) {
            Some(comm) => library.finalize(comm)?,
            None => return Ok(()),
        }
        wait_for_nccl(timeout, "leaving NCCL", || {
            if is_sound() { self.state() } else { Err(NcclError::aborted()) }
        })?;
        if let Some(comm) = lock(&self.comm).take() {
            library.destroy(comm);
        }
        Ok(())
    }

    pub(crate) fn abort(&self) {
        let comm = lock(&self.comm).take();
        if let Some(comm) = comm {
            self.gpu.library.abort(comm);
        }
    }

    /// Queues an operation behind all earlier work of stream `caller`. Runs on CubeCL's thread.
    pub(crate) fn launch(
        &self,
        server: &mut Server,
        caller: StreamId,
        plan: &Plan,
    ) -> Result<Events, NcclError> {
        let (gpu, Plan { launch, input, output }) = (&*self.gpu, plan);
        gpu.enter()?;
        let events = match lock(&self.spare).pop() {
            Some(events) => events,
            None => Events::new().map_err(|error| NcclError::driver("cuEventCreate", error))?,
        };
        let streams = server.write_streams();
        // Bytes that a failed kernel did not write must not be sent.
        streams.ensure_written([input].into_iter()).map_err(server_error)?;
        let mut resolved = streams.resolve(caller, [input, output].into_iter()).map_err(server_error)?;
        let compute = resolved.current().sys;
        let mut pointer = |binding: &BufferBinding| {
            let memory = &mut resolved.get(&binding.stream).memory_management_gpu;
            let (start, end) = (binding.offset_start, binding.offset_end);
            let resource = memory.get_resource(binding.memory.clone(), start, end);
            resource.map(|resource| resource.ptr).map_err(|error| server_error(error.into()))
        };
        let (from, to) = (pointer(input)?, pointer(output)?);
        let stream = self.stream.raw();
        let driver = |call| move |error| NcclError::driver(call, error);
        // SAFETY: CubeCL's stream lives while its server runs this, and ours lives with the channel.
        unsafe {
            events.ready.record(compute).map_err(driver("cuEventRecord"))?;
            events.ready.make_wait(stream).map_err(driver("cuStreamWaitEvent"))?;
        }
        match &*lock(&self.comm) {
            // SAFETY: the lengths were checked for this call, and `Progress` holds both buffers.
            Some(comm) => unsafe { gpu.library.launch(comm, launch, from, to, stream)? },
            None => return Err(NcclError::aborted()),
        }
        // The first operations connect ranks in the background, and are queued only afterwards.
        wait_for_nccl(gpu.limit, "an NCCL operation", || self.state())?;
        // SAFETY: as above.
        unsafe { events.done.record(stream) }.map_err(driver("cuEventRecord"))?;
        drop(resolved);
        streams.written([output].into_iter());
        Ok(events)
    }

    /// Makes later work of `caller`, and of the streams that own the operation's memory, wait for the operation, then
    /// releases the memory. Runs on CubeCL's thread, after the launch.
    pub(crate) fn make_wait(
        &self,
        server: &mut Server,
        caller: StreamId,
        progress: &Progress,
    ) -> Result<(), NcclError> {
        self.gpu.enter()?;
        let stage = lock(&progress.stage);
        // After a failure, NCCL may still write to the operation's memory.
        let Stage::Running(events) = &*stage else { return Ok(()) };
        let mut buffers = lock(&progress.buffers);
        let mut waiting = vec![caller];
        for buffer in buffers.iter().flatten() {
            if !waiting.contains(&buffer.stream) {
                waiting.push(buffer.stream);
            }
        }
        for stream in waiting {
            let streams = server.write_streams();
            let mut resolved = streams.resolve(stream, [].into_iter()).map_err(server_error)?;
            // SAFETY: CubeCL's stream lives while its server runs this.
            unsafe { events.done.make_wait(resolved.current().sys) }
                .map_err(|error| NcclError::driver("cuStreamWaitEvent", error))?;
        }
        // CubeCL gives a stream's memory only to later work of that stream, or of streams that wait for it. Such work
        // now runs after the operation.
        *buffers = None;
        Ok(())
    }
}

fn server_error(error: ServerError) -> NcclError {
    NcclError::Driver { call: "CubeCL", reason: error.to_string() }
}

#[derive(Default)]
pub(crate) struct InFlight {
    pub(crate) queue: VecDeque<QueuedOperation>,
    pub(crate) last: Option<CallSite>,
    pub(crate) closing: bool,
}

pub(crate) struct QueuedOperation {
    pub(crate) site: CallSite,
    pub(crate) record: RecordId,
    pub(crate) issued: Instant,
    pub(crate) held_before: Duration,
    pub(crate) progress: Arc<Progress>,
}

/// Stage and memory of an operation, shared by threads. Dropping it returns the events to `spare`.
pub(crate) struct Progress {
    pub(crate) stage: Mutex<Stage>,
    /// Input and output, held so that their memory is not freed, reused or moved. `None` once the GPU has run the
    /// operation, or the streams that own the memory wait for it.
    pub(crate) buffers: Mutex<Option<[BufferBinding; 2]>>,
    spare: Weak<Mutex<Vec<Events>>>,
}

impl Progress {
    pub(crate) fn new(plan: &Plan, spare: &Arc<Mutex<Vec<Events>>>) -> Progress {
        Progress {
            stage: Mutex::new(Stage::Queued),
            buffers: Mutex::new(Some([plan.input.clone(), plan.output.clone()])),
            spare: Arc::downgrade(spare),
        }
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        let stage = std::mem::replace(&mut *lock(&self.stage), Stage::Queued);
        if let (Stage::Running(events), Some(spare)) = (stage, self.spare.upgrade()) {
            lock(&spare).push(events);
        }
    }
}

pub(crate) enum Stage {
    Queued,
    Running(Events),
    /// Queueing on the GPU failed, for the reason given.
    Failed(String),
}
