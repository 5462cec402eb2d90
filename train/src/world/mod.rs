//! Ranks that are processes: how they meet, and make sure that all of them were started alike. `Ranks` is
//! for commands whose ranks may as well be threads.

mod group;
mod ranks;

pub(crate) use group::Ranks;
pub(crate) use ranks::gather;
pub use ranks::{World, agree, join, ranks_of, shard_size, size_of};
