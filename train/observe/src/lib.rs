//! Observes runs from outside: live runs by asking their processes, and all runs by reading their folders.
//!
//! - [`ask`]: the socket of each process of a run, requests and replies, and the client;
//! - [`status`]: the combined answers of all processes;
//! - [`run`]: the contents of a run folder;
//! - [`profile`]: the memory of a step, by owner;
//! - [`trace`]: a few steps of all ranks, as a file for Perfetto, and its summary;
//! - [`tensorboard`]: files that TensorBoard shows;
//! - [`export`]: metrics in the formats of other programs;
//! - [`watch`]: runs on a full-screen terminal;
//! - [`page`]: runs in a browser, and for Prometheus;
//! - [`report`]: the page as a file, with all data in it; [`plot`]: curves as SVG.
//!
//! The crate is built without burn. It never writes into a run folder unless the run passes it a file to write.

pub mod ask;
mod config;
pub mod export;
mod fresh;
mod line;
pub mod page;
pub mod plot;
pub mod profile;
pub mod report;
pub mod run;
pub mod status;
pub mod tensorboard;
pub mod trace;
pub mod watch;
