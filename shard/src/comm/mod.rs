//! Communication of one rank: what its parameter groups share, and gradients on their way over the
//! ranks. Takes buffers and gives results back; knows no parameter group.

mod context;
mod reduce;

pub(crate) use context::{CommContext, Direction};
pub(crate) use reduce::{Reducer, Reduction};
