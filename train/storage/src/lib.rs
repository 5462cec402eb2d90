//! How Kiln reads and writes files, for data, checkpoints and run folders alike.
//!
//! - [`files`]: files that others may have put there, read within bounds;
//! - [`durable`]: what is on the disk as a whole or not at all, and [`StagingFolder`] for whole folders;
//! - [`Checksum`]: checksums that can be put together from those of parts;
//! - [`header`]: the header of a safetensors file;
//! - [`npy`]: arrays in NumPy's format;
//! - [`Stream`]: large files, written past the system's cache; [`Lines`] and [`Records`]: files that grow by whole lines
//!   or records; [`LineReader`]: lines within a bound.
//!
//! Nothing here says what a file is about: callers put their own words around [`std::io::Error`].

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
