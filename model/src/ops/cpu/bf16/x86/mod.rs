//! Instructions of x86 processors.

mod pack;
mod product;
mod tiles;
mod unit;
mod vectors;

pub use product::{Left, Right};
pub use unit::Unit;
