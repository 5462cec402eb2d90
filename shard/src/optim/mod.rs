//! The end of a step on the shards of one rank: the norm of the gradient, clipping, and the optimizer.
//!
//! A [`Rule`] defines how parameters change, such as AdamW or Muon, and an [`Optimizer`] assigns rules to
//! parameters. `StepBackend` does the work: on the host, or on a GPU that nothing on the host waits for.
//! `matrices` has helpers for rules on whole matrices.

mod adamw;
mod backend;
#[cfg(feature = "cube")]
mod device;
mod host;
#[cfg(feature = "cube")]
mod kernels;
mod loss_scale;
mod matrices;
mod muon;
mod newton_schulz;
mod optimizer;
mod rule;
#[cfg(feature = "cube")]
mod segments;
mod sign;

pub use adamw::AdamW;
pub(crate) use backend::{GroupUpdate, StepBackend, StepSettings};
#[cfg(feature = "cube")]
pub(crate) use device::{DecisionValues, DeviceStep, Sums};
pub use host::clip_factor;
pub(crate) use host::{HostStep, norm};
pub use loss_scale::LossScale;
pub use matrices::Owners;
pub(crate) use matrices::{Target, transform};
pub use muon::{AdjustLr, Muon};
pub(crate) use optimizer::GroupRule;
pub use optimizer::{Choice, Optimizer};
#[cfg(feature = "cube")]
pub use rule::{DeviceRule, DeviceShard, HalfDType};
pub use rule::{DirectionRun, LearningRates, OwnedRun, Rule, Settings, ShardRun, UpdateStep};
pub use sign::Sign;
