//! The decoder-only language model that Kiln trains, as single-device code.
//!
//! - [`config`]: the shape of a model, and its presets;
//! - [`layers`]: the layers, one file each;
//! - [`decoder`]: the decoder and its forward pass, written once over [`decoder::Modules`];
//! - [`meta`]: passes without values, which predict memory;
//! - [`ops`]: the fused operations, each with a plain-burn reference;
//! - [`panics`]: names of parts in the messages of their panics;
//! - [`random`]: seeded, counter-based randomness;
//! - [`Sampling`]: choice of the next token;
//! - [`settings`]: the keys that custom parts read;
//! - [`verify`]: checks of the operations' kernels against the references, on a device.
//!
//! Nothing here depends on ranks or communicators: the sharding crate wraps the modules from outside.

pub mod config;
pub mod decoder;
pub mod layers;
pub mod meta;
pub mod ops;
pub mod panics;
pub mod random;
mod sampling;
pub mod settings;
pub mod verify;

pub use config::{
    AttentionBias, BalanceOver, FULL_ATTENTION, LoraConfig, MAX_LAYERS, MAX_SIZE, MOE, ModelConfig,
    ModelConfigError, MoeConfig, PARALLEL_RESIDUAL, PRESETS, RopeScaling, SWIGLU,
};
pub use decoder::{Decoder, Modules};
pub use layers::{Context, KeyValueCache, Layer, LayerInit, Layers};
pub use random::Key;
pub use sampling::Sampling;
