//! Proves the sharding engine correct: against an unsharded run written here in plain burn, bit for bit
//! between strategies, and call for call in the communication of the ranks.
//!
//! - `support`: a small model, its data, and the training of one sharded rank;
//! - `reference`: the same training on one device without the engine;
//! - `parity`: every combination of settings against the reference;
//! - `bits`, `hybrid`, `shapes`, `precision`, `dropout`, `frozen`: the guarantees of single settings;
//! - `counts`, `order`: the collectives that a step issues, and when; `timeline`: where its time goes;
//! - `muon`: an optimizer of several rules, one of which works on whole matrices;
//! - `owned_slots`: rules with state of whole matrices;
//! - `experts`: a mixture of experts;
//! - `checkpoint`: any number of ranks and any strategy resumes where any other stopped;
//! - `cube`: the engine on a GPU's tensors (feature `wgpu`);
//! - `corruption`: no damage to a checkpoint goes unnoticed;
//! - `residency`, `evaluation`, `failure`, `state`: the life cycle of weights and of ranks.
//!
//! `parity` covers every pair of values of its settings, and `checkpoint` a part of its product. The whole
//! products take longer and run with `cargo test --release -p kiln --test sharding -- --ignored`.

mod added_loss;
mod bits;
mod checkpoint;
mod clip;
mod corruption;
mod counts;
#[cfg(feature = "wgpu")]
mod cube;
mod dropout;
mod evaluation;
mod experts;
mod failure;
mod frozen;
mod hybrid;
mod muon;
mod order;
mod owned_slots;
mod pairwise;
mod parity;
mod precision;
mod reference;
mod residency;
mod shapes;
mod side_channel;
mod state;
mod support;
mod timeline;
mod unreached;
