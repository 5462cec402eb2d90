//! Causal attention in tiles of the scores, without the whole matrix of scores.
//!
//! Rows are `[batch, seq, heads, head_dim]`, so the rows of one head are a strided matrix, which the matrix
//! products read in place. `forward` and `backward` are written once over these products: `float_products`
//! has those of `f32` and `f64`, `bf16_products` those of the processor's own instructions for bf16.

mod backward;
mod bf16_products;
mod float_products;
mod forward;
mod kernels;
mod products;
mod tile;
