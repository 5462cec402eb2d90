//! Forward and backward passes without values, to predict their memory when a run is planned.
//!
//! Like PyTorch's meta tensors, a [`MetaTensor`] has a size and no values. A [`MetaTape`] records the operations on
//! these tensors, and a [`Ledger`] counts the memory that they hold. A layer repeats its operations on meta tensors
//! in [`Layer::meta_forward`](crate::layers::Layer::meta_forward).

mod experts;
mod ledger;
mod ops;
mod tape;

pub use ledger::{Held, Ledger, LedgerEvent, MemoryPeak, Owner};
pub use tape::{ACTIVATIONS, GRADIENTS, LOGITS, MetaBatch, MetaTape, MetaTensor, Products};
