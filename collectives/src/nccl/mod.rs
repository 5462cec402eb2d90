//! NCCL for groups whose buffers are on NVIDIA GPUs, one GPU per rank.
//!
//! [`attach`] adds NCCL to an existing group. The group continues to move host memory, number the calls, and
//! find the cause of failures together with the other ranks. NCCL runs the calls whose buffers are on a GPU,
//! on a separate stream.
//!
//! Nothing waits on the host. A call queues its operation behind the GPU work that the thread has queued so
//! far, and returns. [`Work::wait`](crate::Work::wait) makes the thread's later GPU work run after the
//! operation, and returns, before it is known whether the transfer will succeed. A watcher thread detects
//! errors and operations that take longer than [`NcclOptions::timeout`]. It then fails the group, as every
//! backend does, and every later call returns the cause.
//!
//! An operation holds the memory of its buffers until [`Work::wait`](crate::Work::wait) has made later work
//! of the streams that own the memory wait for the operation, or until the GPU has run it. So a host that is
//! far ahead of the GPU holds no more memory than a host that waits for the GPU.
//!
//! Calls on GPUs are numbered and recorded like those on the host, but they are not compared before they run,
//! because that would take a round trip. Ranks that call different operations wait for each other until the
//! time-out, whose verdict compares the calls and names those that differ. NCCL itself does not detect
//! differing calls of the same size.
//!
//! NCCL's rings and trees determine the order in which addends are summed. Sums are the same from run to run
//! on the same machines, but their last bits differ from those of other backends.

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
