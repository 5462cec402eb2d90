//! Fully sharded data parallelism for any burn [`Module`](burn::module::Module).
//!
//! A model is given module by module (for a decoder: embedding, every block, head). The parameters of
//! a module live as one flat buffer, a *parameter group*, of which each rank holds a shard. Reading a
//! parameter is an autodiff operation: its forward gathers the group and hands out a view, its backward
//! takes the gradient and, when the group is complete, reduces it over the ranks (the idea of SimpleFSDP,
//! Zhang et al., 2024, on burn's tape). Between forward and backward no full weight is alive.
//!
//! From the ground up; no module uses one that is further down in this list:
//!
//! - [`mesh`], [`layout`], [`policy`]: the arrangement of ranks, the place of each parameter, and the user's
//!   decisions;
//! - [`memory`]: bytes counted per rank;
//! - `buffers`: the elements of flat buffers, on the host or on a GPU; summaries of the elements of a tensor;
//! - `comm`: communicators and what groups share; gradients on their way over the ranks;
//! - `param_group`: the life of one parameter group;
//! - `tape`: operations on burn's autodiff tape; [`ShardedModule`]: a module whose weights come and go;
//! - [`Optimizer`]: which [`Rule`] updates which parameter, with AdamW and Muon;
//! - [`Engine`]: building, passes, [`Engine::update`] as the end of a step, whole values in and out,
//!   and [`Snapshot`]s;
//! - [`ranks`]: ranks as threads or a rank as a process, each with its own compute pool.
//!
//! This crate names no layer and no file format.

mod buffers;
mod comm;
mod engine;
mod error;
pub mod layout;
pub mod memory;
pub mod mesh;
mod optim;
mod param_group;
pub mod policy;
pub mod ranks;
mod sharded_module;
mod spin_wait;
mod sync;
mod tape;

pub use buffers::{
    FurthestElements, PendingValues, TensorDifference, TensorStatistics, TensorSums, ValueHistogram,
    lay_out_pages, release_unused, zeros_on,
};
pub use engine::{Engine, EngineBuilder, Outcome, PlannedGroup, Snapshot, Update};
pub use error::ShardError;
pub use layout::{Layout, OwnedSlot, ParamGroupLayout, ParameterLayout};
pub use mesh::{Mesh, MeshError, Strategy, UnknownStrategy};
pub use optim::{
    AdamW, AdjustLr, Choice, DirectionRun, LearningRates, LossScale, Muon, Optimizer, OwnedRun, Owners, Rule,
    Settings, ShardRun, Sign, UpdateStep, clip_factor,
};
#[cfg(feature = "cube")]
pub use optim::{DeviceRule, DeviceShard, HalfDType};
pub use param_group::StateKind;
pub use policy::{Accumulate, Policy, Recompute, Reshard};
pub use sharded_module::{OrderToken, ShardOptions, ShardedModule, Unsharded};
