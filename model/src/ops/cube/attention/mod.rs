//! Causal attention on a GPU: the mathematics of [`causal_attention`](crate::ops::causal_attention), without the
//! matrix of scores.
//!
//! FlashAttention-2 (Dao, 2023): a cube keeps a tile of rows, and loads one tile of columns after the other into
//! shared memory. In forward, rows are queries, and the softmax is corrected when larger scores appear. In backward,
//! one kernel keeps queries and sums their gradients. Another kernel keeps keys and sums their gradients over all
//! query heads that share a key head or, if the grid would be too small, over shares of them, see `shares`. Every sum
//! is computed by one cube in one order, so the same input gives the same bits. The instructions that multiply tiles
//! are chosen when a kernel is compiled, see [`Instructions`]; masks and the softmax are the same for all of them.
//!
//! Rows attend to different numbers of columns. Cubes start in descending order of their work, over all heads and
//! sequences, so that short cubes fill the end of a launch. Cubes that run concurrently may therefore belong to any
//! head, and columns that several of them read stay in the cache only while the columns of all heads fit.
//!
//! Heads whose width is not a multiple of 8 up to 256, or whose tiles do not fit into the device's shared memory, use
//! the matrix of scores, see `unfused`.
//!
//! Read `tile` first: it defines which rows and columns a unit holds. `product` has the two products of tiles;
//! `warpgroup` has their `wgmma` versions.

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
