//! NCCL for groups whose buffers are on NVIDIA GPUs, one GPU for each rank.
//!
//! [`attach`] adds NCCL to a group that exists already. The group goes on to move the memory of the host, to
//! number the calls, and to find out with the other ranks what went wrong. NCCL runs the calls whose buffers
//! are on a GPU, on a stream of their own.
//!
//! Nothing waits on the host. A call queues the operation behind the GPU work that its thread has queued so
//! far, and returns. [`Work::wait`](crate::Work::wait) queues the thread's later work behind the operation,
//! and returns, so it does not know yet whether the transfer will fail. A watching thread notices an error,
//! or an operation that takes longer than [`NcclOptions::timeout`]. It fails the group as every backend does,
//! and every later call returns the cause.
//!
//! An operation holds the memory of its buffers until [`Work::wait`](crate::Work::wait) has ordered later work of
//! the streams that own the memory behind the operation, or until the GPU has run it. So a host that is far ahead of
//! the GPU holds no more memory than one that waits for the GPU.
//!
//! Calls on GPUs are numbered and recorded with those on the host, but they are not compared before they run,
//! because that would take a round trip. Ranks that call different operations wait for each other until the
//! time-out, whose verdict compares the calls and names those that differ. NCCL itself does not notice a
//! difference between calls of the same size.
//!
//! NCCL orders the additions of a sum by its rings and trees. Sums are the same from run to run on the same
//! machines, but they differ from those of other backends in their last bits.

mod channel;
mod cuda;
mod error;
mod gpu;
mod join;
mod library;
pub(crate) mod transport;
mod watch;

pub use error::NcclError;
pub use join::{ControlBackend, NcclOptions, attach};
pub use library::{Installation, installation};
