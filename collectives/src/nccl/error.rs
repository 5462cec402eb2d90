use crate::call::list_ranks;
use crate::error::CommError;
use cudarc::driver::result::DriverError;
use std::time::Duration;

/// The reason why NCCL cannot be used.
#[derive(Clone, Debug, PartialEq, thiserror::Error)]
pub enum NcclError {
    /// There is no driver for NVIDIA GPUs, or no GPU.
    #[error(
        "there is no NVIDIA GPU to use: looked for libcuda.so in the loader's path and asked it for \
         GPUs; install NVIDIA's driver, or choose another backend"
    )]
    NoDriver,
    /// The GPU number is out of range.
    #[error("there is no GPU {index}: the driver reports {count}, counted from 0")]
    NoDevice {
        /// Requested number.
        index: usize,
        /// Number of GPUs of the machine.
        count: usize,
    },
    /// NCCL's library was not found.
    #[error(
        "NCCL was not found; looked for {names} in {places} ({tried}). Install it with `pip install \
         nvidia-nccl-cu13`"
    )]
    NoLibrary {
        /// File names that were searched for.
        names: String,
        /// Places that were searched.
        places: String,
        /// The loader's error for each file that was tried.
        tried: String,
    },
    /// The library is not NCCL, or is too old.
    #[error("{place} has no function {name}: Kiln needs NCCL 2.14 or later")]
    NoSymbol {
        /// Path of the library.
        place: String,
        /// The missing function.
        name: &'static str,
    },
    /// A call of the driver or of CubeCL failed.
    #[error("{call} failed: {reason}")]
    Driver {
        /// The function that failed.
        call: &'static str,
        /// The function's error message.
        reason: String,
    },
    /// A call of NCCL failed.
    #[error("{call} of NCCL {version} returned {code}: {text}")]
    Call {
        /// The function that failed.
        call: &'static str,
        /// The error code that NCCL returned.
        code: i32,
        /// NCCL's version.
        version: String,
        /// NCCL's error message.
        text: String,
    },
    /// Background work of NCCL did not finish in time.
    #[error("{what} took longer than {waited:?}")]
    TimedOut {
        /// Description of the work.
        what: &'static str,
        /// Time that the caller waited.
        waited: Duration,
    },
    /// Other ranks cannot use NCCL.
    #[error("NCCL cannot be used on {}: see the errors of those ranks", list_ranks(.ranks))]
    Peers {
        /// Ranks of the group that cannot use NCCL.
        ranks: Vec<usize>,
    },
    /// Several threads of one process share a GPU, which NCCL does not support.
    #[error(
        "{} are threads of one process and share GPU {index}: give each its own GPU, or do not \
         use NCCL",
        list_ranks(.ranks)
    )]
    SharedDevice {
        /// Ranks of the group that share the GPU.
        ranks: Vec<usize>,
        /// Number of the GPU.
        index: usize,
    },
    /// NCCL is already attached to the group.
    #[error("NCCL is already attached to this group: call `attach` only once")]
    Attached,
    /// The group failed while its ranks agreed to attach NCCL.
    #[error(transparent)]
    Group(#[from] CommError),
}

impl NcclError {
    pub(crate) fn driver(call: &'static str, error: DriverError) -> NcclError {
        NcclError::Driver { call, reason: format!("{error:?}") }
    }

    pub(crate) fn aborted() -> NcclError {
        let reason = "the communicator has been aborted".to_owned();
        NcclError::Driver { call: "NCCL", reason }
    }
}
