//! Passes without values: what a forward and a backward pass hold in memory, for plans of runs.
//!
//! PyTorch has meta tensors for this. A [`MetaTensor`] has a size and no values, a [`MetaTape`] is the tape
//! of its operations, and a [`Ledger`] counts what they hold. A layer goes through its operations on them in
//! [`Layer::meta_forward`](crate::layers::Layer::meta_forward).

mod experts;
mod ledger;
mod ops;
mod tape;

pub use ledger::{Held, Ledger, LedgerEvent, MemoryPeak, Owner};
pub use tape::{ACTIVATIONS, GRADIENTS, LOGITS, MetaBatch, MetaTape, MetaTensor, Products};
