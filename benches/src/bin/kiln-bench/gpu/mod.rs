//! `kiln-bench gpu`: compares kernels with the limits of the device, and steps with PyTorch's in the same run.

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
