//! A GPU as CubeCL runs it, and how ranks connect by NCCL.

use super::NcclError;
use super::cuda::Context;
use super::library::{Comm, Library, SUCCESS};
use cubecl_common::device::DeviceId;
use cubecl_common::device_handle::DeviceHandle;
use cubecl_cuda::CudaRuntime;
use cubecl_runtime::runtime::Runtime;
use std::hint;
use std::thread;
use std::time::{Duration, Instant};

/// CubeCL's server of a GPU. One thread runs it; work for it is submitted.
pub(super) type Server = <CudaRuntime as Runtime>::Server;

/// Looks at NCCL that follow each other at once. Queuing an operation takes it some tens of microseconds, and the
/// one thread that launches everything waits for that.
const SPINS: usize = 200;

/// How long no look waits for more than other threads that want this core, such as NCCL's own.
const YIELDING: Duration = Duration::from_millis(1);

/// Between two looks at what takes longer, such as connecting.
const POLL: Duration = Duration::from_micros(200);

/// What all communicators of a rank share.
pub(super) struct Gpu {
    pub(super) library: Library,
    pub(super) context: Context,
    pub(super) device: DeviceHandle<Server>,
    pub(super) id: DeviceId,
    /// How long an operation may take.
    pub(super) limit: Duration,
}

impl Gpu {
    /// Runs `task` on CubeCL's thread, behind all that has been submitted, and waits for that thread.
    pub(super) fn on_thread<R: Send>(
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

    pub(super) fn enter(&self) -> Result<(), NcclError> {
        self.context.enter().map_err(|error| NcclError::driver("cuCtxSetCurrent", error))
    }

    /// Connects `size` ranks that have agreed on `id`.
    pub(super) fn connect(
        &self,
        size: usize,
        id: &[u8; 128],
        rank: usize,
        timeout: Duration,
    ) -> Result<Comm, NcclError> {
        let comm = self.on_thread(|| self.library.init(size, id, rank))?;
        self.complete(comm, timeout)
    }

    /// Waits until a new communicator is connected.
    pub(super) fn complete(&self, comm: Comm, timeout: Duration) -> Result<Comm, NcclError> {
        let settled = settle(timeout, "connecting NCCL", || {
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

/// Waits until `state` no longer says that something goes on in the background.
pub(super) fn settle(
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
