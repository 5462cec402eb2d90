//! NCCL as the transport of a group.

use super::NcclError;
use super::channel::{Channel, Plan, aborted};
use super::cuda::{Marks, Stream};
use super::gpu::{Gpu, Server, settle};
use super::join;
use super::library::{Comm, Kind, Launch};
use super::watch::{self, Flight, Progress, Stage};
use crate::buffer::Buffer;
use crate::call::{ArgumentError, CallSite};
use crate::device::DeviceMemory;
use crate::dtype::DType;
use crate::error::CommError;
use crate::recorder::RecordId;
use crate::sync::lock;
use crate::transport::{Guardian, Movement, NewPlace, Transport};
use crate::work::Work;
use cubecl_common::device::ServiceId;
use cubecl_environment::stream::StreamId;
use cudarc::nccl::sys::ncclDataType_t;
use std::sync::{Arc, Condvar, Mutex};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

/// A rank's transport by NCCL.
pub(super) struct Nccl {
    channel: Arc<Channel>,
    watcher: Mutex<Option<JoinHandle<()>>>,
}

impl Nccl {
    /// Takes over a connected communicator.
    pub(super) fn start(
        gpu: Arc<Gpu>,
        comm: Comm,
        group: Arc<dyn Guardian>,
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
            spare: Mutex::default(),
            flights: Mutex::default(),
            changed: Condvar::new(),
            group,
        });
        let watched = Arc::clone(&channel);
        let spawned = thread::Builder::new().name("nccl-watch".into()).spawn(move || {
            watch::run(&watched);
        });
        match spawned {
            Ok(watcher) => Ok(Nccl { channel, watcher: Mutex::new(Some(watcher)) }),
            Err(error) => {
                channel.abort();
                Err(NcclError::Driver { call: "starting a thread", reason: error.to_string() })
            }
        }
    }

    fn divide(
        &self,
        place: Option<&NewPlace<'_>>,
        timeout: Duration,
    ) -> Result<Option<Comm>, NcclError> {
        let (channel, gpu) = (&*self.channel, &*self.channel.gpu);
        if !gpu.library.can_split() {
            let Some(place) = place else { return Ok(None) };
            return join::meet(gpu, place.control, timeout).map(Some);
        }
        let color = place.map(|place| place.first);
        let key = place.map_or(0, |place| place.control.rank());
        let promise = gpu.on_thread(|| match &*lock(&channel.comm) {
            Some(comm) => gpu.library.split(comm, color, key),
            None => Err(aborted()),
        })?;
        settle(timeout, "dividing a communicator of NCCL", || channel.state())?;
        match (place, promise.keep()) {
            (None, _) => Ok(None),
            (Some(_), Some(comm)) => gpu.complete(comm, timeout).map(Some),
            (Some(_), None) => {
                let reason = "ncclCommSplit returned no communicator".to_owned();
                Err(NcclError::Driver { call: "NCCL", reason })
            }
        }
    }
}

impl Transport for Nccl {
    fn name(&self) -> &'static str {
        "nccl"
    }

    fn refuse(&self, output: &Buffer) -> Option<ArgumentError> {
        let here = ServiceId::of::<Server>(self.channel.gpu.id);
        let is_here = output.device().is_some_and(|memory| memory.client().service_id() == here);
        (!is_here).then_some(ArgumentError::OtherDevice)
    }

    fn enqueue(&self, site: CallSite, record: RecordId, movement: Movement) -> Work {
        let channel = &self.channel;
        if let Some(error) = channel.group.cause(&site) {
            return Work::ready(Err(error));
        }
        let Some((plan, result)) = plan(movement) else {
            // Calls are checked before.
            return Work::ready(Err(CommError::invalid(&site, ArgumentError::NoDeviceTransport)));
        };
        let progress = Arc::new(Progress::new(channel));
        lock(&channel.flights).queue.push_back(Flight {
            site: site.clone(),
            record,
            issued: Instant::now(),
            progress: Arc::clone(&progress),
            keep: [plan.input.clone(), plan.output.clone()],
        });
        channel.changed.notify_all();
        let origin = plan.output.stream;
        let (caller, launching, report) =
            (StreamId::current(), Arc::clone(channel), Report(Some(Arc::clone(&progress))));
        channel.gpu.device.submit(move |server: &mut Server| {
            launching.group.recorder().started(record);
            report.set(launching.launch(server, caller, &plan));
        });
        // Whichever thread submits something next, this comes before.
        channel.gpu.device.flush_queue();

        let channel = Arc::clone(channel);
        Work::queued(result, move || {
            if let Some(error) = channel.group.cause(&site) {
                return Err(error);
            }
            let mut callers = vec![StreamId::current()];
            if origin != callers[0] {
                callers.push(origin);
            }
            let joining = Arc::clone(&channel);
            channel.gpu.device.submit(move |server: &mut Server| {
                let joined = joining.hold_up(server, &callers, &lock(&progress.stage));
                if let Err(error) = joined {
                    *lock(&progress.stage) = Stage::Failed(error.to_string());
                }
            });
            channel.gpu.device.flush_queue();
            Ok(())
        })
    }

    fn split(
        &self,
        site: &CallSite,
        place: Option<NewPlace<'_>>,
        timeout: Duration,
    ) -> Result<Option<Arc<dyn Transport>>, CommError> {
        let gpu = &self.channel.gpu;
        let made = self.divide(place.as_ref(), timeout).and_then(|comm| {
            let parts = comm.zip(place);
            let start = |(comm, place): (Comm, NewPlace<'_>)| {
                Nccl::start(Arc::clone(gpu), comm, place.group)
            };
            parts.map(start).transpose()
        });
        match made {
            Ok(nccl) => Ok(nccl.map(|nccl| Arc::new(nccl) as Arc<dyn Transport>)),
            Err(error) => Err(self.channel.group.give_up(site, &error.to_string())),
        }
    }

    fn close(&self) {
        lock(&self.channel.flights).closing = true;
        self.channel.changed.notify_all();
        if let Some(watcher) = lock(&self.watcher).take() {
            // A panic of the watcher has been printed; there is nothing else to do about it.
            let _ = watcher.join();
        }
    }
}

impl Drop for Nccl {
    fn drop(&mut self) {
        self.close();
    }
}

/// Notes what became of a launch, also if it panics.
struct Report(Option<Arc<Progress>>);

impl Report {
    fn set(mut self, result: Result<Marks, NcclError>) {
        if let Some(progress) = self.0.take() {
            *lock(&progress.stage) = match result {
                Ok(marks) => Stage::Running(marks),
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

/// What NCCL is to do, and the buffer that it fills.
fn plan(movement: Movement) -> Option<(Plan, Buffer)> {
    let (kind, input, output) = match movement {
        Movement::AllGather { input, output } => (Kind::AllGather, Some(input), output),
        Movement::ReduceScatter { input, output } => (Kind::ReduceScatter, Some(input), output),
        Movement::AllReduce { buffer } => (Kind::AllReduce, None, buffer),
        Movement::Broadcast { buffer, root } => (Kind::Broadcast { root }, None, buffer),
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
