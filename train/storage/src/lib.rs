//! Kiln's file reading and writing, for data, checkpoints and run folders alike.
//!
//! - [`files`]: files that may come from other people, read within limits;
//! - [`durable`]: files that are on disk as a whole or not at all, and [`StagingFolder`] for whole folders;
//! - [`Checksum`]: checksums that can be combined from those of parts;
//! - [`header`]: the header of a safetensors file;
//! - [`npy`]: arrays in NumPy's format;
//! - [`Stream`]: large files, written without the system's cache; [`Lines`] and [`Records`]: files that grow
//!   by whole lines
//!   or records; [`LineReader`]: lines of limited length.
//!
//! Nothing here knows the purpose of a file: callers add their own context to [`std::io::Error`].

mod checksum;
pub mod durable;
pub mod files;
pub mod header;
mod lines;
pub mod npy;
mod staging;
mod stream;

pub use checksum::{Checksum, RunningChecksum};
pub use lines::{LineReader, Lines, MAX_LINE, Records};
pub use staging::StagingFolder;
pub use stream::Stream;
