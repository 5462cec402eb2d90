//! Groups whose buffers are on NVIDIA GPUs, one for each rank, and which NCCL moves.
//!
//! [`attach`] adds NCCL to a group that exists already: the group goes on to move the memory of the
//! host, to number the calls, and to find out with the other ranks what went wrong. Calls whose buffers
//! are on a GPU go to NCCL, on a stream of their own.
//!
//! Nothing waits on the host. A call queues the operation behind what its thread has given to the GPU so
//! far, and returns; [`Work::wait`](crate::Work::wait) queues the thread's later work behind the
//! operation, and returns. So an error of the transfer itself is not known then. A watching thread sees
//! it, or that an operation takes longer than [`NcclOptions::timeout`]: it fails the group as every
//! backend does, and every later call returns the cause.
//!
//! Calls on GPUs are numbered and recorded with those on the host, but not compared before they run: that
//! would take a round trip. Ranks that differ wait for each other until the time-out, whose verdict
//! compares the calls and names those that differ; where both sides of a difference have the same
//! size, NCCL itself does not notice.
//!
//! Sums are NCCL's: their order follows its rings and trees, so they are the same from run to run on the
//! same machines, but not those of other backends bit for bit.

mod channel;
mod config;
mod cuda;
mod gpu;
mod join;
mod library;
mod transport;
mod watch;

pub use join::{Control, NcclOptions, attach};
pub use library::{Installation, installation};

use crate::error::{CommError, list_ranks};
use cudarc::driver::result::DriverError;
use std::time::Duration;

/// Why NCCL cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NcclError {
    /// There is no driver for NVIDIA GPUs, or no GPU.
    #[error(
        "there is no NVIDIA GPU to use: looked for libcuda.so in the loader's path and asked it for \
         GPUs; install NVIDIA's driver, or choose another backend"
    )]
    NoDriver,
    /// There are fewer GPUs.
    #[error("there is no GPU {index}: the driver names {count}, counted from 0")]
    NoDevice {
        /// Number asked for.
        index: usize,
        /// GPUs there are.
        count: usize,
    },
    /// NCCL's library is nowhere.
    #[error(
        "NCCL is missing: looked for libnccl.so.2 and libnccl.so in the loader's path, in lib64 and lib \
         of NCCL_HOME, CUDA_PATH, CUDA_HOME and /usr/local/cuda, and in the Python packages \
         (nvidia/nccl/lib) of PYTHONPATH, VIRTUAL_ENV, CONDA_PREFIX, ~/.local, /usr/local and /usr \
         ({tried}); install it, for example with: pip install nvidia-nccl-cu13"
    )]
    NoLibrary {
        /// What was tried, with what the loader said.
        tried: String,
    },
    /// What was found is not NCCL, or is too old.
    #[error("{place} has no function {name}: Kiln needs NCCL 2.14 or later")]
    NoSymbol {
        /// The file.
        place: String,
        /// The function.
        name: &'static str,
    },
    /// The driver has refused.
    #[error("{call} failed: {reason}")]
    Driver {
        /// What was called.
        call: &'static str,
        /// In the driver's words.
        reason: String,
    },
    /// NCCL has refused.
    #[error("{call} of NCCL {version} returned {code}: {text}")]
    Call {
        /// What was called.
        call: &'static str,
        /// NCCL's code.
        code: i32,
        /// NCCL's version.
        version: String,
        /// In NCCL's words.
        text: String,
    },
    /// Something NCCL does in the background did not end in time.
    #[error("{what} took longer than {waited:?}")]
    TimedOut {
        /// What was waited for.
        what: &'static str,
        /// For how long.
        waited: Duration,
    },
    /// Other ranks cannot use NCCL.
    #[error("NCCL cannot be used on {}: see what they say", list_ranks(.ranks))]
    Peers {
        /// Ranks of the group.
        ranks: Vec<usize>,
    },
    /// Ranks of one process cannot share a GPU by way of NCCL.
    #[error(
        "{} are threads of one process and share GPU {index}: give each a GPU of its own, or leave \
         NCCL out",
        list_ranks(.ranks)
    )]
    SharedDevice {
        /// Ranks of the group.
        ranks: Vec<usize>,
        /// The GPU.
        index: usize,
    },
    /// The group has NCCL already.
    #[error("NCCL has been added to this group before: `attach` is called once")]
    Attached,
    /// The ranks could not agree by way of the group that NCCL was to be added to.
    #[error(transparent)]
    Group(#[from] CommError),
}

impl NcclError {
    fn driver(call: &'static str, error: DriverError) -> NcclError {
        NcclError::Driver { call, reason: format!("{error:?}") }
    }
}
