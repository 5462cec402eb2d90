//! A parameter group: parameters that are gathered, reduced and updated together.

mod group;
mod state;

pub(crate) use group::{GroupOptions, Neighbours, ParamGroup, ParamGroups, Use};
pub(crate) use state::ShardMut;
pub use state::StateKind;
