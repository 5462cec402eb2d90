//! Causal attention in tiles of the scores, without the whole matrix of scores.
//!
//! Rows are `[batch, seq, heads, head_dim]`, so the rows of one head are a strided matrix, which the matrix
//! products read in place. `forward` and `backward` are written once over these `products`.

mod backward;
mod forward;
mod kernels;
mod products;
mod tile;
