//! One process per rank, connected by TCP.

mod options;

pub use options::{JoinError, JoinOptions, Secret};
