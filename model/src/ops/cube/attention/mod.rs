//! Causal attention on a GPU, as [`causal_attention`](crate::ops::causal_attention), without the matrix of scores.
//!
//! FlashAttention-2 (Dao, 2023): a cube keeps a tile of rows and loops over tiles of columns in shared memory. In
//! forward, rows are queries. In backward, one kernel keeps queries and another keeps keys. One cube computes each
//! sum in a fixed order, so the same input gives the same bits. See [`Instructions`] for the multiplications.
//!
//! Cubes start in descending order of their work, so that short cubes fill the end of a launch.
//!
//! Heads whose width is not a multiple of 8 up to 256, or whose tiles exceed shared memory, use `unfused`.
//!
//! Read `tile` first: it defines which rows and columns a unit holds.

mod backward_pass;
mod catalogue;
mod entry;
mod forward_pass;
mod fragments;
mod launch;
mod product;
mod shares;
mod stage;
mod tile;
mod unfused;
mod warpgroup;

pub use catalogue::kernels;
pub use entry::{backward, cached_forward, forward};
pub use launch::{backward_into, forward_into};
pub use shares::shares_of;
pub use tile::{Instructions, Pass, Tile, has_warpgroups};
