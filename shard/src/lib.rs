//! Fully sharded data parallelism for any burn [`Module`](burn::module::Module).
//!
//! A module is cut into [`Part`]s (for a decoder: embedding, every block, head). The parameters of
//! a part live as one flat buffer, a *unit*, of which each rank holds a shard. Reading a parameter
//! is an autodiff operation: its forward gathers the unit and hands out a view, its backward takes
//! the gradient and, when the unit is complete, reduces it over the ranks (the idea of SimpleFSDP,
//! Zhang et al., 2024, on burn's tape). Between forward and backward no full weight is alive.
//!
//! - [`mesh`]: strategies and the two-dimensional arrangement of ranks;
//! - [`layout`]: which parameter lies where, the one source for everything else;
//! - [`engine`]: building, the step's life cycle, errors, statistics;
//! - [`part`]: a module whose weights come and go;
//! - [`Engine::update`]: the end of a step: loss and norm over the ranks, clipping, AdamW;
//! - [`optimizer`]: its settings, and what the host computes for it;
//! - [`state`]: whole values in and out of the shards;
//! - [`snapshot`]: a rank's part of the state at one moment, while training goes on;
//! - [`memory`]: bytes counted per rank;
//! - [`ranks`]: ranks as threads or a rank as a process, each with its own compute pool.
//!
//! This crate names no layer and no file format.

mod awake;
mod boundary;
pub mod engine;
mod error;
mod flat;
mod gather;
pub mod layout;
mod loss;
pub mod memory;
pub mod mesh;
pub mod optimizer;
pub mod part;
pub mod policy;
pub mod ranks;
mod recompute;
mod reducer;
mod runtime;
pub mod snapshot;
pub mod state;
mod unit;
mod update;

pub use engine::{Engine, EngineBuilder};
pub use error::ShardError;
pub use layout::{Layout, ParameterLayout, UnitLayout};
pub use mesh::{Mesh, MeshError, Strategy, UnknownStrategy};
pub use optimizer::AdamW;
pub use part::{Part, PartOptions, Token, Unsharded};
pub use policy::{Policy, Recompute, Reshard};
pub use snapshot::Snapshot;
pub use state::Kind;
pub use update::{LossScale, Outcome, Update};
