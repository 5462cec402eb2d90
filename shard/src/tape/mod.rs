//! Operations on burn's autodiff tape: reading a parameter, entering and leaving a module, recomputing a block, and
//! the loss that backward starts from.

mod boundary;
mod gather;
mod loss;
mod node;
mod reading;
mod recompute;

pub(crate) use boundary::{at_input, at_output};
pub(crate) use gather::{WeightRef, gather, order_token};
pub(crate) use loss::{LossSink, add_loss};
pub(crate) use reading::start_reading;
pub(crate) use recompute::{BlockOutput, Body, Run, recompute};
