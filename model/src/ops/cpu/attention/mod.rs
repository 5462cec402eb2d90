//! Causal attention in tiles of the scores, without the whole matrix of scores.
//!
//! Rows are `[batch, seq, heads, head_dim]`. A head is a strided matrix, which products read in place.

mod backward;
mod forward;
mod kernels;
mod products;
mod tile;
