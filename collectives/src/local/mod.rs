//! Ranks as threads of one process, with one worker thread per rank and group. Ranks deposit their inputs with the
//! group, and every rank copies or sums from its peers' buffers, on the host or on a GPU that they all use.

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
