//! Communication of one rank: the state that its parameter groups share, and the reduction of gradients over
//! the ranks. It takes buffers and returns results, and does not depend on parameter groups.

mod context;
mod reduce;

pub(crate) use context::{CommContext, Direction};
pub(crate) use reduce::{Reducer, Reduction};
