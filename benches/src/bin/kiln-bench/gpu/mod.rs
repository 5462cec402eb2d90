//! `kiln-bench gpu`: every kernel against what the device could do, and whole steps, beside PyTorch's in
//! the same run if there is one.
//!
//! `clock` times what a `device` does; `shapes` are the sizes of the operations, `kernels` the operations
//! with what they have to move or compute, `table` the figures for people and programs; `steps` are the
//! end-to-end rows, `peer` runs PyTorch, and `predicted` reads what was predicted for them. `command` puts
//! them in their order.

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
