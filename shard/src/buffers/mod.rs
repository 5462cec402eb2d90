//! Flat buffers on the host or on a GPU: allocated, cast, read, written, and viewed as tensors.
//!
//! The rest of this crate handles [`Buffer`](kiln_collectives::Buffer)s regardless of where they are. `host` works on
//! the host's memory, `cube` on a GPU's; `elements` chooses between the two.
//!
//! Also contains functions for inspecting and comparing runs: summaries of a tensor's elements (`histogram`,
//! `statistics`, `sums`), and the distance between two tensors (`difference`).

#[cfg(feature = "cube")]
pub(crate) mod cube;
mod difference;
pub(crate) mod elements;
mod histogram;
pub(crate) mod host;
#[cfg(feature = "cube")]
mod kernels;
mod pending;
mod placement;
#[cfg(feature = "cube")]
mod readback;
mod statistics;
mod sums;
mod tensors;
mod weights;

pub use difference::{FurthestElements, TensorDifference};
pub(crate) use elements::{
    add, cast_from_f32, cast_to, clear, copy, into_f32, into_host, on_host, range_to_host, write,
};
pub use histogram::ValueHistogram;
pub use pending::PendingValues;
pub(crate) use placement::Placement;
pub use placement::{lay_out_pages, release_unused, zeros_on};
#[cfg(feature = "cube")]
pub(crate) use readback::Readback;
pub use statistics::TensorStatistics;
pub use sums::TensorSums;
pub(crate) use tensors::{DeviceScalar, FlatTensors, LossSum};
pub(crate) use weights::{BufferPool, Counted, FlatWeights, Gathered, UnshardedCount, UnshardedGroup};
