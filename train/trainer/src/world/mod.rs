//! Connects ranks that are processes, and checks that they were started alike.

mod group;
mod ranks;

pub use group::Ranks;
pub use ranks::gather;
pub use ranks::{World, agree, join, ranks_of, shard_size, size_of};
