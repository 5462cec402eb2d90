//! Ranks that are processes: how they meet, and make sure that all of them were started alike.

mod ranks;

pub use ranks::{World, agree, join, ranks_of, shard_size, size_of};
