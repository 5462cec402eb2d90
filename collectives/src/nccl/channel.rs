//! A rank's communicator of NCCL, and how operations are queued on the GPU.

#![allow(unsafe_code)]

use super::NcclError;
use super::cuda::{Marks, Stream};
use super::gpu::{Gpu, Server, settle};
use super::library::{Comm, Launch};
use super::watch::{Flights, Stage};
use crate::sync::lock;
use crate::transport::Guardian;
use cubecl_environment::stream::StreamId;
use cubecl_runtime::server::{BufferBinding, ServerError};
use cubecl_server::stream::{FailureStore, WriteScoped};
use std::sync::{Arc, Condvar, Mutex};
use std::time::Duration;

/// An operation and its memory.
pub(super) struct Plan {
    pub(super) launch: Launch,
    pub(super) input: BufferBinding,
    pub(super) output: BufferBinding,
}

/// One communicator, shared by callers, CubeCL's thread and the thread that watches.
pub(super) struct Channel {
    pub(super) gpu: Arc<Gpu>,
    /// `None` once it is aborted. Locked for each use, since NCCL's handles are not.
    pub(super) comm: Mutex<Option<Comm>>,
    pub(super) stream: Stream,
    /// Marks of operations that are done, for the next ones.
    pub(super) spare: Mutex<Vec<Marks>>,
    pub(super) flights: Mutex<Flights>,
    pub(super) changed: Condvar,
    pub(super) group: Arc<dyn Guardian>,
}

impl Channel {
    /// What NCCL says about the communicator.
    pub(super) fn state(&self) -> Result<i32, NcclError> {
        let library = &self.gpu.library;
        let state = match &*lock(&self.comm) {
            Some(comm) => library.state(comm),
            None => return Err(aborted()),
        };
        library.check("an operation", state)?;
        Ok(state)
    }

    /// Frees the communicator of a rank that leaves, on which nothing is under way: what has been sent is
    /// brought to its end first, for as long as `sound` says that the group can go on, and for `timeout` at
    /// most.
    pub(super) fn finish(
        &self,
        timeout: Duration,
        sound: impl Fn() -> bool,
    ) -> Result<(), NcclError> {
        let library = &self.gpu.library;
        match &*lock(&self.comm) {
            Some(comm) => library.finalize(comm)?,
            None => return Ok(()),
        }
        settle(timeout, "leaving NCCL", || if sound() { self.state() } else { Err(aborted()) })?;
        if let Some(comm) = lock(&self.comm).take() {
            library.destroy(comm);
        }
        Ok(())
    }

    /// Ends what is under way. Later uses fail.
    pub(super) fn abort(&self) {
        let comm = lock(&self.comm).take();
        if let Some(comm) = comm {
            self.gpu.library.abort(comm);
        }
    }

    /// Queues an operation behind what stream `caller` has been given. On CubeCL's thread.
    pub(super) fn launch(
        &self,
        server: &mut Server,
        caller: StreamId,
        plan: &Plan,
    ) -> Result<Marks, NcclError> {
        let (gpu, Plan { launch, input, output }) = (&*self.gpu, plan);
        gpu.enter()?;
        let marks = match lock(&self.spare).pop() {
            Some(marks) => marks,
            None => Marks::new().map_err(|error| NcclError::driver("cuEventCreate", error))?,
        };
        let streams = server.write_streams();
        // Bytes that a failed kernel has never written must not be sent.
        streams.ensure_written([input].into_iter()).map_err(server_error)?;
        let mut resolved =
            streams.resolve(caller, [input, output].into_iter()).map_err(server_error)?;
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
        // SAFETY: CubeCL's stream is alive while its server runs this, and ours with the channel.
        unsafe {
            marks.ready.record(compute).map_err(driver("cuEventRecord"))?;
            marks.ready.hold_up(stream).map_err(driver("cuStreamWaitEvent"))?;
        }
        match &*lock(&self.comm) {
            // SAFETY: the call was checked for lengths, and the flight keeps both buffers.
            Some(comm) => unsafe { gpu.library.launch(comm, launch, from, to, stream)? },
            None => return Err(aborted()),
        }
        // The first operations connect ranks in the background, and are queued only then.
        settle(gpu.limit, "an operation of NCCL", || self.state())?;
        // SAFETY: as above.
        unsafe { marks.done.record(stream) }.map_err(driver("cuEventRecord"))?;
        drop(resolved);
        streams.written([output].into_iter());
        Ok(marks)
    }

    /// Lets what the streams are given from now on wait for an operation. On CubeCL's thread, which has
    /// launched it by now.
    pub(super) fn hold_up(
        &self,
        server: &mut Server,
        callers: &[StreamId],
        stage: &Stage,
    ) -> Result<(), NcclError> {
        self.gpu.enter()?;
        if let Stage::Running(marks) = stage {
            for caller in callers {
                let streams = server.write_streams();
                let mut resolved =
                    streams.resolve(*caller, [].into_iter()).map_err(server_error)?;
                // SAFETY: CubeCL's stream is alive while its server runs this.
                unsafe { marks.done.hold_up(resolved.current().sys) }
                    .map_err(|error| NcclError::driver("cuStreamWaitEvent", error))?;
            }
        }
        Ok(())
    }
}

pub(super) fn aborted() -> NcclError {
    let reason = "the communicator has been aborted".to_owned();
    NcclError::Driver { call: "NCCL", reason }
}

fn server_error(error: ServerError) -> NcclError {
    NcclError::Driver { call: "CubeCL", reason: error.to_string() }
}
