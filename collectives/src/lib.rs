//! Communication between the ranks of a training run.
//!
//! Sharded data parallelism needs all-gather (collects a parameter's shards before use), reduce-scatter (sums gradients
//! and leaves each rank its shard), all-reduce (losses, norms, replicated groups) and broadcast (initial weights). The
//! trait [`Communicator`] has these backends:
//!
//! * [`LocalCommunicator`]: ranks are threads of this process.
//! * [`tcp::TcpCommunicator`]: ranks are processes, on one machine or many. Connections are authenticated, and can be
//!   encrypted ([`tcp::Seal`]). Ranks on one machine read each other's memory where the system allows it.
//! * `mpi::MpiCommunicator` (feature `mpi`): ranks are processes started by `mpirun`.
//! * `nccl::attach` (feature `cuda`) adds NCCL to a group of threads or TCP processes, for buffers on GPUs.
//! * [`FakeCommunicator`]: a single rank of an imaginary world, for planning and tests. It records what would be sent.
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
//! * **Order.** Operations of a group run in the order of their calls, which all ranks share. Groups are independent.
//! * **Agreement.** Ranks compare operation, dtype, count, root and the label's scope. A difference is
//!   [`CommError::Mismatch`] on every rank, not a hang.
//! * **Bits.** Sums run in ascending rank order, regardless of timing. An all-reduce gives the same bits as a
//!   reduce-scatter and an all-gather. `f16` and `bf16` are summed in `f32` and rounded once.
//! * **Ownership.** When [`Work::wait`] returns, no rank reads the input, and the backend holds no reference to it.
//! * **Failure.** A mismatch, a timeout or the loss of a rank fails the group: every pending and later operation
//!   returns
//!   the same cause, except operations that all ranks had already entered (between processes: as long as data arrives).
//!   Other groups continue; [`Communicator::abort`] ends all groups. A timeout includes a [`Verdict`] from the flight
//!   recorders of all ranks.
//!
//! NCCL keeps these guarantees with the exceptions that the module `nccl` lists.
//!
//! # A custom backend
//!
//! Implement [`GroupControl`] and [`Backend`] for one rank's side of a group, and pass it to [`ProcessGroup::start`],
//! which implements [`Communicator`]: it checks, numbers and records the calls, and runs them on a worker thread.
//! [`Call::agree`] compares the calls of all ranks, [`sum_into`] adds in rank order, [`Cause`] keeps a group's first
//! failure, and [`Verdict::for_wait`] finds the ranks to blame for a timeout. `examples/own-backend` is a complete
//! backend, which passes the conformance suite of all backends, `kiln-conformance`.

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
