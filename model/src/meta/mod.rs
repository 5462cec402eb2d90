//! Forward and backward passes without values, which predict their memory, like PyTorch's meta tensors.
//!
//! A [`MetaTape`] records operations on [`MetaTensor`]s, and a [`Ledger`] counts their memory. Layers implement
//! [`Layer::meta_forward`](crate::layers::Layer::meta_forward).

mod experts;
mod ledger;
mod ops;
mod tape;

pub use ledger::{Held, Ledger, LedgerEvent, MemoryPeak, Owner};
pub use tape::{ACTIVATIONS, GRADIENTS, LOGITS, MetaBatch, MetaTape, MetaTensor, Products};
