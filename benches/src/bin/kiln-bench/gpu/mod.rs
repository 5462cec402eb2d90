//! `kiln-bench gpu`: compares every kernel with the limits of the device, and whole steps with those of
//! PyTorch in the same run, if available.
//!
//! `clock` times work on a `device`; `shapes` are the sizes of the operations, `kernels` the operations with
//! the bytes or FLOPs that they require, `table` the figures for people and programs; `steps` are the
//! end-to-end rows, `peer` runs PyTorch, and `predicted` reads the predictions for them. `command` defines
//! their order.

mod clock;
mod command;
mod device;
mod kernels;
mod peer;
mod predicted;
mod shapes;
mod steps;
mod table;

pub use command::GpuArgs;
