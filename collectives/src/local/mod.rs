//! Ranks as threads of one process.
//!
//! Each rank has one worker thread per group, with a queue, so communication overlaps with the caller's
//! compute and groups do not wait for each other. Ranks deposit their inputs with the group, and every rank
//! copies or sums straight from the buffers of its peers, on the host or on a GPU that they all use.

mod backend;
mod delay;
#[cfg(feature = "cube")]
mod device;
mod group;
mod state;
mod transfer;
mod world;

#[cfg(feature = "cuda")]
pub use backend::LocalBackend;
pub use backend::{LocalCommunicator, LocalGroup, LocalOptions};
