//! Token embedding.

use burn::module::{Module, Param};
use burn::tensor::{Device, Int, Tensor};

use super::{Context, normal_parameter};
use crate::config::ModelConfig;
use crate::meta::{MetaTape, MetaTensor};
use crate::ops;
use crate::random::Key;

/// A table of token vectors.
#[derive(Module, Debug)]
pub struct Embedding {
    /// `[vocab_size, d_model]`.
    pub weight: Param<Tensor<2>>,
}

/// The first module of the decoder, which maps token ids to the residual stream.
#[derive(Module, Debug)]
pub struct Embed {
    /// The table. A tied head uses it as its matrix.
    pub embed_tokens: Embedding,
}

impl Embed {
    /// Creates an embedding of the given shape.
    pub fn new(config: &ModelConfig, key: Key, device: &Device) -> Self {
        let shape = [config.vocab_size, config.d_model];
        let key = key.fork("embed_tokens");
        Embed { embed_tokens: Embedding { weight: normal_parameter(shape, config.init_std, key, device) } }
    }

    /// Maps `tokens` `[batch, seq]` to `[batch, seq, d_model]`.
    pub fn forward(&self, tokens: Tensor<2, Int>, context: &Context) -> Tensor<3> {
        let x = ops::embedding(self.embed_tokens.weight.val(), tokens);
        context.fork("embed").dropout(x)
    }

    /// Mirrors the memory of [`Embed::forward`], like [`Layer::meta_forward`](super::Layer::meta_forward).
    pub fn meta_forward(&self, tape: &MetaTape<'_>) -> MetaTensor {
        let [vocab_size, d_model] = self.embed_tokens.weight.lazy_shape().dims();
        tape.dropout(tape.embedding(vocab_size, d_model))
    }
}
