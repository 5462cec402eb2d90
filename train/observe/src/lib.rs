//! Looks at runs of Kiln from outside: at those that go on, by asking their processes, and at all of them by what
//! is in their folders.
//!
//! - [`ask`]: the socket of each process of a run, what it is asked and says, and the one who asks;
//! - [`status`]: what is made of all answers together;
//! - [`run`]: what is in a run folder;
//! - [`profile`]: the memory of a step, by owner;
//! - [`trace`]: a few steps of all ranks, in a file for Perfetto, and what it tells;
//! - [`tensorboard`]: files that TensorBoard shows;
//! - [`export`]: metrics in the forms of other programs;
//! - [`watch`]: runs on a whole terminal;
//! - [`page`]: all of it in a browser, and for Prometheus;
//! - [`report`]: the page as a file, with all data in it; [`plot`]: curves as SVG.
//!
//! The crate is built without burn. It reads run folders and never writes into them, except where a run itself hands
//! it a file to write.

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
