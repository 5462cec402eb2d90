//! Ranks that are processes: connects them, and checks that they were started alike. `Ranks` is for commands
//! whose ranks may be threads instead.

mod group;
mod ranks;

pub use group::Ranks;
pub use ranks::gather;
pub use ranks::{World, agree, join, ranks_of, shard_size, size_of};
