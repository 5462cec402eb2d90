//! The end of a step on the shards of one rank: the norm of the gradient, clipping, and the optimizer.
//!
//! [`Optimizer`] is how parameters change; AdamW is one. `StepBackend` is where the work is done: by the
//! host, or by a GPU that nothing on the host waits for.

mod adamw;
mod backend;
#[cfg(feature = "cube")]
mod device;
mod host;
#[cfg(feature = "cube")]
mod kernels;
mod loss_scale;
mod optimizer;

pub use adamw::AdamW;
pub(crate) use backend::{StepBackend, StepSettings};
#[cfg(feature = "cube")]
pub(crate) use device::{DecisionValues, DeviceStep, Sums};
pub use host::clip_factor;
pub(crate) use host::{HostStep, norm};
pub use loss_scale::LossScale;
#[cfg(feature = "cube")]
pub use optimizer::DeviceShard;
pub use optimizer::{Optimizer, ShardRun, UpdateStep};
