//! The feed-forward layers that a config file can name.

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::{Context, Layer, SwiGlu};
use crate::config::{FeedForwardKind, ModelConfig};
use crate::random::Key;

/// One of the built-in feed-forward layers, chosen by `model.feed_forward`.
#[derive(Module, Debug)]
pub enum FeedForward {
    /// See [`SwiGlu`].
    SwiGlu(SwiGlu),
}

impl FeedForward {
    /// The layer that `config` names.
    pub fn new(config: &ModelConfig, key: Key, device: &Device) -> Self {
        match config.feed_forward {
            FeedForwardKind::Swiglu => FeedForward::SwiGlu(SwiGlu::new(config, key, device)),
        }
    }
}

impl Layer for FeedForward {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        match self {
            FeedForward::SwiGlu(layer) => layer.forward(x, context),
        }
    }
}
