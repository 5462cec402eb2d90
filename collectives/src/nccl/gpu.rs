//! A rank's GPU, which CubeCL runs, and the connection of the ranks' GPUs through NCCL.

use super::cuda::Context;
use super::error::NcclError;
use super::library::{Comm, Library, SUCCESS};
use crate::buffer::Buffer;
use crate::communicator::Communicator;
use crate::label::{Label, Phase};
use cubecl_common::device::DeviceId;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use std::hint;
use std::thread;
use std::time::{Duration, Instant};

/// CubeCL's server of a GPU, which one thread runs.
pub(crate) type Server = <CudaRuntime as Runtime>::Server;

/// Polls of NCCL without a pause. NCCL queues an operation in tens of microseconds, while the thread that launches all
/// GPU work waits.
const SPINS: usize = 200;

const YIELDING: Duration = Duration::from_micros(100);

const POLL: Duration = Duration::from_micros(200);

pub(crate) struct Gpu {
    pub(crate) library: Library,
    pub(crate) context: Context,
    pub(crate) device: DeviceHandle<Server>,
    pub(crate) id: DeviceId,
    pub(crate) limit: Duration,
}

impl Gpu {
    /// Runs `task` on CubeCL's thread, after all earlier tasks, and waits for its result.
    pub(crate) fn on_thread<R: Send>(
        &self,
        task: impl FnOnce() -> Result<R, NcclError> + Send,
    ) -> Result<R, NcclError> {
        let done = self.device.submit_blocking(|_: &mut Server| {
            self.enter()?;
            task()
        });
        done.unwrap_or_else(|panic| {
            let reason = panic.message().unwrap_or("its thread is gone").to_owned();
            Err(NcclError::Driver { call: "CubeCL", reason })
        })
    }

    pub(crate) fn enter(&self) -> Result<(), NcclError> {
        self.context.enter().map_err(|error| NcclError::driver("cuCtxSetCurrent", error))
    }

    /// Connects all ranks of `group` through an id that the first rank creates.
    pub(crate) fn connect(&self, group: &dyn Communicator, timeout: Duration) -> Result<Comm, NcclError> {
        let made = if group.rank() == 0 { self.library.unique_id() } else { Ok([0; 128]) };
        // Without an id, the first rank sends zeros, so that the others do not wait for it.
        let buffer = Buffer::from_slice(&made.clone().unwrap_or([0; 128]));
        let work = group.broadcast(Label::new("NCCL id", Phase::Init), buffer, 0);
        let sent = work.wait(timeout)?;
        made?;
        let mut id = [0; 128];
        id.copy_from_slice(sent.as_bytes());
        if id == [0; 128] {
            return Err(NcclError::Peers { ranks: vec![0] });
        }
        let (size, rank) = (group.world_size(), group.rank());
        let comm = self.on_thread(|| self.library.init(size, &id, rank))?;
        self.complete(comm, timeout)
    }

    pub(crate) fn complete(&self, comm: Comm, timeout: Duration) -> Result<Comm, NcclError> {
        let settled = wait_for_nccl(timeout, "connecting NCCL", || {
            let state = self.library.state(&comm);
            self.library.check("ncclCommInitRankConfig", state)?;
            Ok(state)
        });
        match settled {
            Ok(()) => Ok(comm),
            Err(error) => {
                self.library.abort(comm);
                Err(error)
            }
        }
    }
}

/// Waits until `state` returns success: NCCL has finished its background work.
pub(crate) fn wait_for_nccl(
    timeout: Duration,
    what: &'static str,
    mut state: impl FnMut() -> Result<i32, NcclError>,
) -> Result<(), NcclError> {
    let start = Instant::now();
    let mut looks = 0;
    while state()? != SUCCESS {
        let waited = start.elapsed();
        if waited >= timeout {
            return Err(NcclError::TimedOut { what, waited: timeout });
        }
        looks += 1;
        if looks < SPINS {
            hint::spin_loop();
        } else if waited < YIELDING {
            thread::yield_now();
        } else {
            thread::sleep(POLL);
        }
    }
    Ok(())
}
