//! Communication between the ranks of a training run.
//!
//! Fully sharded data parallelism needs four collectives: all-gather (collects the shards of a parameter
//! before use), reduce-scatter (sums gradients and leaves each rank its shard of the sum), all-reduce
//! (losses, gradient norms, replicated groups) and broadcast (initial weights). This crate defines them as
//! the trait [`Communicator`] and provides these backends:
//!
//! * [`LocalCommunicator`]: every rank is a thread of this process. Transfers run on worker threads and
//!   overlap with the caller's compute.
//! * [`tcp::TcpCommunicator`]: every rank is a process, on one machine or many. Connections are
//!   authenticated, and traffic can be encrypted ([`tcp::Seal`]). Ranks on one machine read each other's
//!   memory where the system allows it.
//! * `mpi::MpiCommunicator` (feature `mpi`): every rank is a process started by `mpirun`.
//! * `nccl::attach` (feature `cuda`) adds NCCL to a group of threads or of TCP processes, for buffers on
//!   GPUs.
//! * [`FakeCommunicator`]: one rank of a world of any size whose other ranks do not exist. It records what
//!   would be sent, for planning and for tests.
//!
//! ```
//! use kiln_collectives::{Buffer, Communicator, Label, LocalGroup, Phase};
//! use std::{sync::Arc, thread, time::Duration};
//!
//! thread::scope(|scope| {
//!     for communicator in LocalGroup::new(2) {
//!         scope.spawn(move || {
//!             let shard = Arc::new(Buffer::from_slice(&[communicator.rank() as f32]));
//!             let label = Label::new("block 0", Phase::Forward);
//!             let output = Buffer::zeros(shard.dtype(), 2);
//!             let work = communicator.all_gather(label, shard, output);
//!             // ... compute something else here ...
//!             let full = work.wait(Duration::from_secs(60)).unwrap();
//!             assert_eq!(full.as_slice::<f32>().unwrap(), [0.0, 1.0]);
//!         });
//!     }
//! });
//! ```
//!
//! # What every backend guarantees
//!
//! * **Order.** Operations of one group run in the order they were issued; the n-th call of one rank belongs
//!   to the same operation as the n-th call of every other rank. Different groups are independent.
//! * **Agreement.** Ranks compare operation, dtype, count, root and the label's scope. A difference is
//!   [`CommError::Mismatch`] on every rank, not a hang.
//! * **Bits.** Sums run in ascending rank order, regardless of timing. An all-reduce gives the same bits as a
//!   reduce-scatter followed by an all-gather. `f16` and `bf16` are summed in `f32` and rounded once.
//! * **Ownership.** When [`Work::wait`] returns, no rank reads the input any more and the backend holds no
//!   reference to it: a unique `Arc<Buffer>` is unique again.
//! * **Failure.** A mismatch, a timeout or the loss of a rank fails the group: every pending and later
//!   operation returns the same cause. An operation that all ranks had already entered still completes on all
//!   of them (between processes: as long as data arrives). Other groups continue; call
//!   [`Communicator::abort`] to end all groups of the world. A timeout includes a [`Verdict`], the result of
//!   comparing the flight recorders of all ranks.
//!
//! NCCL keeps these guarantees with the exceptions that the module `nccl` lists.
//!
//! # A custom backend
//!
//! A backend moves the data; everything else is shared. Implement [`GroupControl`] and [`Backend`] for one
//! rank's side of a group, and pass it to [`ProcessGroup::start`], which implements [`Communicator`]: it checks
//! arguments, numbers and records the calls, and runs them on a worker thread. [`Call::agree`] compares the calls
//! of all ranks, [`sum_into`] adds in rank order, [`Cause`] keeps the first failure of a group, and
//! [`Verdict::for_wait`] finds the ranks to blame for a timeout. `examples/own-backend` is a complete backend,
//! tested by the conformance suite of all backends, the crate `kiln-conformance`.

// Launching a kernel is unsafe, and so is calling the driver.
#![cfg_attr(not(feature = "cube"), forbid(unsafe_code))]
#![deny(unsafe_code)]
#![warn(missing_docs)]

mod backend;
mod buffer;
mod call;
mod communicator;
#[cfg(feature = "cube")]
mod device;
mod diagnosis;
mod dtype;
mod error;
mod fake;
mod flight;
mod holds;
#[cfg(feature = "cube")]
mod kernels;
mod label;
mod local;
#[cfg(feature = "mpi")]
pub mod mpi;
#[cfg(feature = "cuda")]
pub mod nccl;
#[cfg(feature = "cuda")]
mod nccl_join;
mod operation;
mod payload;
mod process_group;
mod rank_view;
mod recorder;
mod reduce;
mod sync;
pub mod tcp;
mod timeline;
mod verdict;
mod work;

pub use backend::{AskAll, Backend, GroupControl, GroupRank, RankShared, WorkerStart};
pub use buffer::{Buffer, BufferError, Location, allocates_for_all};
pub use call::{Argument, ArgumentError, Call, CallSite};
pub use communicator::{Communicator, SplitResult};
#[cfg(feature = "cube")]
pub use device::DeviceMemory;
pub use diagnosis::{Lag, Wait, Witness, waits_for};
pub use dtype::{DType, Element};
pub use error::{Abort, Cause, CommError};
pub use fake::FakeCommunicator;
pub use flight::{Activity, Flight, GroupFlight, Pending, Record, Stall};
pub use holds::Holds;
pub use label::{Label, Phase};
pub use local::{LocalCommunicator, LocalGroup, LocalOptions};
pub use operation::Operation;
pub use payload::Payload;
pub use process_group::ProcessGroup;
pub use rank_view::RankView;
pub use recorder::{DEFAULT_CAPACITY, Recorder, Total};
pub use reduce::{chunk_range, sum_into};
pub use timeline::{ActivityTime, HELD, Span, StepTimeline};
pub use verdict::{Finding, Verdict};
pub use work::Work;
