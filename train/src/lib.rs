//! Kiln trains decoder-only language models with fully sharded data parallelism.
//!
//! This crate ties the others together: configuration, data, the training loop, checkpoints,
//! generation, and the binary `kiln`. Start reading at [`run::train`]; a binary of one's own calls
//! [`process::start`] first.
//!
//! What is a product of its own is a crate in a folder beside `src`, and a module here: [`data`], [`checkpoint`],
//! [`place`]. None of these crates knows this one.

pub mod bench;
pub mod cli;
pub mod config;
pub mod convert;
pub mod device;
pub mod doctor;
mod error;
pub mod eval;
pub mod fault;
pub mod flight;
pub mod generate;
pub mod inspect;
pub mod launch;
pub mod logged;
pub mod metrics;
pub mod optimizers;
pub mod prepared;
pub mod process;
pub mod registry;
pub mod run;
pub mod schedule;
pub mod values;
mod version;
pub mod world;

pub use kiln_checkpoint as checkpoint;
pub use kiln_checkpoint::{hugging_face, sharded, source, weights};
pub use kiln_data as data;
pub use kiln_launch::place;
pub use kiln_process::words;
pub(crate) use kiln_storage::files;
