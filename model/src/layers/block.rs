//! One decoder block.

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::{Attention, Context, FeedForward, Layer, RmsNorm};
use crate::config::ModelConfig;
use crate::ops::Residual;
use crate::random::Key;

/// A pre-norm block: attention, then feed-forward, each added to the residual stream.
/// Both inner layers can be replaced by any [`Layer`].
#[derive(Module, Debug)]
pub struct Block<A: Module = Attention, F: Module = FeedForward> {
    /// Normalises the input of attention.
    pub attention_norm: RmsNorm,
    /// Mixes positions.
    pub attention: A,
    /// Normalises the input of the feed-forward layer.
    pub ffn_norm: RmsNorm,
    /// Mixes channels.
    pub ffn: F,
}

impl Block {
    /// Block `index` of the built-in decoder.
    pub fn new(config: &ModelConfig, index: usize, key: Key, device: &Device) -> Self {
        let ffn = FeedForward::new(config, Self::key(key, index).fork("ffn"), device);
        Block::with_ffn(config, index, key, ffn, device)
    }
}

impl<F: Layer> Block<Attention, F> {
    /// Block `index` with the built-in attention and a feed-forward layer of your own.
    pub fn with_ffn(config: &ModelConfig, index: usize, key: Key, ffn: F, device: &Device) -> Self {
        let attention_key = Block::key(key, index).fork("attention");
        Block {
            attention_norm: RmsNorm::new(config.d_model, config.norm_eps, device),
            attention: Attention::new(config, attention_key, device),
            ffn_norm: RmsNorm::new(config.d_model, config.norm_eps, device),
            ffn,
        }
    }
}

impl Block {
    /// The key that names the initial weights of block `index`.
    pub fn key(model: Key, index: usize) -> Key {
        model.fork("layers").fork_index(index as u64)
    }
}

impl<A: Layer, F: Layer> Layer for Block<A, F> {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let (attention_context, ffn_context) = (context.fork("attention"), context.fork("ffn"));
        let stream = Residual::new(x);
        let normed = self.attention_norm.forward_of(&stream);
        let mixed = self.attention.forward(normed, &attention_context);
        let stream = Residual::new(stream.add_result(attention_context.dropout(mixed)));
        let normed = self.ffn_norm.forward_of(&stream);
        let fed = self.ffn.forward(normed, &ffn_context);
        stream.add_result(ffn_context.dropout(fed))
    }

    fn active_parameters(&self) -> usize {
        let norms = self.attention_norm.num_params() + self.ffn_norm.num_params();
        norms + self.attention.active_parameters() + self.ffn.active_parameters()
    }
}
