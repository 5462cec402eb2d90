//! Kiln trains decoder-only language models with fully sharded data parallelism.
//!
//! This crate ties the others together: configuration, data, the training loop, checkpoints, generation, and
//! the binary `kiln`. Start reading at [`run::train`]; a binary of one's own calls [`process::start`] first.

pub mod bench;
pub mod checkpoint;
mod checksum;
pub mod cli;
pub mod config;
pub mod data;
pub mod device;
pub mod doctor;
mod error;
pub mod eval;
pub mod fault;
mod files;
pub mod flight;
pub mod generate;
mod header;
pub mod hugging_face;
pub mod inspect;
pub mod launch;
mod lines;
pub mod metrics;
mod mismatch;
pub mod place;
pub mod prepared;
pub mod process;
pub mod run;
pub mod schedule;
pub mod sharded;
pub mod source;
mod staging;
mod version;
pub mod weights;
pub mod words;
pub mod world;

/// So that tests can tell how much memory reading something takes.
#[cfg(test)]
#[global_allocator]
static ALLOCATOR: kiln_shard::memory::CountingAllocator = kiln_shard::memory::CountingAllocator;
