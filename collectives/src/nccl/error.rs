//! Why NCCL cannot be used.

use crate::call::list_ranks;
use crate::error::CommError;
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
    /// The machine has fewer GPUs.
    #[error("there is no GPU {index}: the driver names {count}, counted from 0")]
    NoDevice {
        /// The number that was asked for.
        index: usize,
        /// How many GPUs the machine has.
        count: usize,
    },
    /// NCCL's library was not found.
    #[error(
        "NCCL is not found; looked for {names} in {places} ({tried}). `pip install nvidia-nccl-cu13` \
         brings it"
    )]
    NoLibrary {
        /// Names of its file.
        names: String,
        /// The places that were searched.
        places: String,
        /// The loader's reason for each file that was tried.
        tried: String,
    },
    /// The library that was found is not NCCL, or is too old.
    #[error("{place} has no function {name}: Kiln needs NCCL 2.14 or later")]
    NoSymbol {
        /// The file.
        place: String,
        /// The function.
        name: &'static str,
    },
    /// A call of the driver or of CubeCL failed.
    #[error("{call} failed: {reason}")]
    Driver {
        /// What was called.
        call: &'static str,
        /// The reason in the words of what was called.
        reason: String,
    },
    /// A call of NCCL failed.
    #[error("{call} of NCCL {version} returned {code}: {text}")]
    Call {
        /// What was called.
        call: &'static str,
        /// NCCL's code.
        code: i32,
        /// NCCL's version.
        version: String,
        /// The reason in NCCL's words.
        text: String,
    },
    /// Work that NCCL does in the background did not end in time.
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
    /// Ranks of one process share a GPU, which NCCL cannot do.
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
    /// The ranks could not agree over the group that NCCL was to be added to.
    #[error(transparent)]
    Group(#[from] CommError),
}

impl NcclError {
    pub(super) fn driver(call: &'static str, error: DriverError) -> NcclError {
        NcclError::Driver { call, reason: format!("{error:?}") }
    }

    /// The communicator has been aborted, so nothing can be done with it.
    pub(super) fn aborted() -> NcclError {
        let reason = "the communicator has been aborted".to_owned();
        NcclError::Driver { call: "NCCL", reason }
    }
}
