use super::channel::{Channel, Plan, Progress, QueuedOperation, Stage};
use super::cuda::{Events, Stream};
use super::error::NcclError;
use super::gpu::{Gpu, Server, wait_for_nccl};
use super::library::{Comm, Kind, Launch};
use super::watch;
use crate::backend::GroupControl;
use crate::buffer::Buffer;
use crate::call::{ArgumentError, CallSite};
use crate::communicator::Communicator;
use crate::device::DeviceMemory;
use crate::dtype::DType;
use crate::error::CommError;
use crate::payload::Payload;
use crate::recorder::RecordId;
use crate::sync::{Monitor, lock, spawn};
use crate::work::Work;
use cubecl_common::device::ServiceId;
use cubecl_environment::stream::StreamId;
use cudarc::nccl::sys::ncclDataType_t;
use std::sync::{Arc, Mutex};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// NCCL on one rank of a group: runs the operations with buffers on GPUs. The group records calls and finds failures.
pub(crate) struct Nccl {
    channel: Arc<Channel>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

pub(crate) type SplitGroup<'a> = (Arc<dyn GroupControl>, &'a dyn Communicator);

impl Nccl {
    pub(crate) const NAME: &'static str = "nccl";

    pub(crate) fn start(
        gpu: Arc<Gpu>,
        comm: Comm,
        control: Arc<dyn GroupControl>,
    ) -> Result<Nccl, NcclError> {
        let driver = |error| NcclError::driver("cuStreamCreateWithPriority", error);
        let stream = match gpu.on_thread(|| Stream::new().map_err(driver)) {
            Ok(stream) => stream,
            Err(error) => {
                gpu.library.abort(comm);
                return Err(error);
            }
        };
        let channel = Arc::new(Channel {
            gpu,
            comm: Mutex::new(Some(comm)),
            stream,
            spare: Arc::default(),
            in_flight: Monitor::default(),
            control,
        });
        let watched = Arc::clone(&channel);
        match spawn("nccl-watch", move || watch::run(&watched)) {
            Ok(watcher) => Ok(Nccl { channel, watcher: Mutex::new(Some(watcher)) }),
            Err(error) => {
                channel.abort();
                Err(NcclError::Driver { call: "starting a thread", reason: error.to_string() })
            }
        }
    }

    fn split_comm(
        &self,
        new_group: Option<&SplitGroup<'_>>,
        timeout: Duration,
    ) -> Result<Option<Comm>, NcclError> {
        let (channel, gpu) = (&*self.channel, &*self.channel.gpu);
        if !gpu.library.can_split() {
            return new_group.map(|(_, group)| gpu.connect(*group, timeout)).transpose();
        }
        let color = new_group.map(|(control, _)| control.identity().world_ranks[0]);
        let key = new_group.map_or(0, |(_, group)| group.rank());
        let promise = gpu.on_thread(|| match &*lock(&channel.comm) {
            Some(comm) => gpu.library.split(comm, color, key),
            None => Err(NcclError::aborted()),
        })?;
        wait_for_nccl(timeout, "splitting an NCCL communicator", || channel.state())?;
        match (new_group, promise.take()) {
            (None, _) => Ok(None),
            (Some(_), Some(comm)) => gpu.complete(comm, timeout).map(Some),
            (Some(_), None) => {
                let reason = "ncclCommSplit returned no communicator".to_owned();
                Err(NcclError::Driver { call: "NCCL", reason })
            }
        }
    }

    /// Returns why NCCL cannot process `output`, unless it is on this rank's GPU, as the input is.
    pub(crate) fn refuse(&self, output: &Buffer) -> Option<ArgumentError> {
        let here = ServiceId::of::<Server>(self.channel.gpu.id);
        let is_here = output.device().is_some_and(|memory| memory.client().service_id() == here);
        (!is_here).then_some(ArgumentError::OtherDevice)
    }

    /// Queues an operation with buffers on one GPU, in the order of the calls, and returns immediately.
    pub(crate) fn enqueue(&self, site: CallSite, record: RecordId, payload: Payload) -> Work {
        let channel = &self.channel;
        if let Some(error) = channel.control.cause(&site) {
            return Work::ready(Err(error));
        }
        let Some((plan, result)) = plan(payload) else {
            return Work::ready(Err(CommError::Invalid { site, problem: ArgumentError::NoDeviceTransport }));
        };
        let progress = Arc::new(Progress::new(&plan, &channel.spare));
        let operation = QueuedOperation {
            site: site.clone(),
            record,
            issued: Instant::now(),
            held_before: channel.control.identity().shared.holds.total(),
            progress: Arc::clone(&progress),
        };
        channel.in_flight.update(|in_flight| in_flight.queue.push_back(operation));
        let (caller, launching, report) =
            (StreamId::current(), Arc::clone(channel), Report(Some(Arc::clone(&progress))));
        channel.gpu.device.submit(move |server: &mut Server| {
            launching.control.identity().shared.recorder.started(record);
            report.set(launching.launch(server, caller, &plan));
        });
        // Work that any thread submits later runs after this operation.
        channel.gpu.device.flush_queue();

        let channel = Arc::clone(channel);
        Work::queued(result, move || {
            if let Some(error) = channel.control.cause(&site) {
                return Err(error);
            }
            let (caller, joining) = (StreamId::current(), Arc::clone(&channel));
            channel.gpu.device.submit(move |server: &mut Server| {
                let joined = joining.make_wait(server, caller, &progress);
                if let Err(error) = joined {
                    *lock(&progress.stage) = Stage::Failed(error.to_string());
                }
            });
            channel.gpu.device.flush_queue();
            Ok(())
        })
    }

    /// Splits the communicator like the group; returns the transport of this rank's new group. Every rank of the group
    /// must call it, even a rank without a new group.
    pub(crate) fn split(
        &self,
        site: &CallSite,
        new_group: Option<SplitGroup<'_>>,
        timeout: Duration,
    ) -> Result<Option<Nccl>, CommError> {
        let Channel { gpu, control, .. } = &*self.channel;
        let made = self.split_comm(new_group.as_ref(), timeout).and_then(|comm| {
            let made = comm.zip(new_group);
            made.map(|(comm, (control, _))| Nccl::start(Arc::clone(gpu), comm, control)).transpose()
        });
        made.map_err(|error| {
            let reason = error.to_string();
            control.abort(&reason);
            control.give_up(site, &reason)
        })
    }

    pub(crate) fn close(&self) {
        self.channel.in_flight.update(|in_flight| in_flight.closing = true);
        if let Some(watcher) = lock(&self.watcher).take() {
            let _ = watcher.join();
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.close();
    }
}

/// Records the outcome of a launch, even if the launch panics.
struct Report(Option<Arc<Progress>>);

impl Report {
    fn set(mut self, result: Result<Events, NcclError>) {
        if let Some(progress) = self.0.take() {
            *lock(&progress.stage) = match result {
                Ok(events) => Stage::Running(events),
                Err(error) => Stage::Failed(error.to_string()),
            };
        }
    }
}

impl Drop for Report {
    fn drop(&mut self) {
        if let Some(progress) = self.0.take() {
            let reason = "CubeCL's thread stopped before it was queued".to_owned();
            *lock(&progress.stage) = Stage::Failed(reason);
        }
    }
}

fn plan(payload: Payload) -> Option<(Plan, Buffer)> {
    let (kind, input, output) = match payload {
        Payload::AllGather { input, output } => (Kind::AllGather, Some(input), output),
        Payload::ReduceScatter { input, output } => (Kind::ReduceScatter, Some(input), output),
        Payload::AllReduce { buffer } => (Kind::AllReduce, None, buffer),
        Payload::Broadcast { buffer, root } => (Kind::Broadcast { root }, None, buffer),
        Payload::Nothing => return None,
    };
    let count = match (&kind, &input) {
        (Kind::AllGather, Some(input)) => input.len(),
        _ => output.len(),
    };
    let dtype = match output.dtype() {
        DType::F64 => ncclDataType_t::ncclFloat64,
        DType::F32 => ncclDataType_t::ncclFloat32,
        DType::F16 => ncclDataType_t::ncclFloat16,
        DType::BF16 => ncclDataType_t::ncclBfloat16,
        DType::U8 => ncclDataType_t::ncclUint8,
    };
    let binding = |memory: &DeviceMemory| memory.handle().clone().binding();
    let to = binding(output.device()?);
    let from = match &input {
        Some(input) => binding(input.device()?),
        None => to.clone(),
    };
    Some((Plan { launch: Launch { kind, dtype, count }, input: from, output: to }, output))
}
