//! NCCL for groups whose buffers are on NVIDIA GPUs, one GPU per rank.
//!
//! [`attach`] adds NCCL to an existing group, which still moves host memory, numbers the calls, and finds the cause of
//! failures. NCCL runs the calls with buffers on a GPU, on a separate stream.
//!
//! The host never waits. A call queues its operation behind the thread's GPU work. [`Work::wait`](crate::Work::wait)
//! makes the thread's later GPU work run after the operation, and returns before the transfer's success is known. A
//! watcher thread fails the group after an error or [`NcclOptions::timeout`], and every later call returns the cause.
//!
//! An operation holds its buffers until the GPU has run it, or until [`Work::wait`](crate::Work::wait) has made the
//! streams that own the memory wait. So a host far ahead of the GPU needs no more memory.
//!
//! Calls are recorded but not compared before they run, because that would take a round trip. Ranks with different
//! calls wait until the timeout, whose verdict names the difference. NCCL itself does not detect different calls of
//! equal size.
//!
//! NCCL determines the order of additions. Sums are reproducible on the same machines, but their last bits differ from
//! other backends.

mod channel;
pub(crate) mod cuda;
pub(crate) mod error;
pub(crate) mod gpu;
pub(crate) mod library;
pub(crate) mod transport;
mod watch;

pub use crate::nccl_join::{ControlBackend, NcclOptions, attach};
pub use error::NcclError;
pub use library::{Installation, installation};
