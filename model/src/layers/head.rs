//! Final norm and language-model head.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use super::{Embed, Linear, RmsNorm};
use crate::config::ModelConfig;
use crate::ops::{self, HeadLayout};
use crate::random::Key;

/// The last module of the decoder: the residual stream to logits or a loss.
#[derive(Module, Debug)]
pub struct Head {
    /// Final norm.
    pub norm: RmsNorm,
    /// `[d_model, vocab_size]`; `None` when the embedding is reused.
    pub lm_head: Option<Linear>,
}

impl Head {
    /// A head of the given shape.
    pub fn new(config: &ModelConfig, key: Key, device: &Device) -> Self {
        let (d, vocab) = (config.d_model, config.vocab_size);
        Head {
            norm: RmsNorm::new(d, config.norm_eps, device),
            lm_head: (!config.tie_embeddings)
                .then(|| Linear::new(d, vocab, config.init_std, key.fork("lm_head"), device)),
        }
    }

    /// `scale * sum(-log p(target))` over all rows, without ever holding the logits: `[1]`.
    /// `x`: `[batch, seq, d_model]`, `targets`: `[batch, seq]`; `tied` is the embedding when the
    /// head has no matrix of its own.
    pub fn loss(&self, x: Tensor<3>, targets: Tensor<2, Int>, scale: f64, tied: Option<&Embed>) -> Tensor<1> {
        let [batch, seq, d_model] = x.dims();
        let hidden = self.norm.forward(x).reshape([batch * seq, d_model]);
        let (weight, layout) = self.matrix(tied);
        ops::linear_cross_entropy(hidden, weight, layout, targets.reshape([batch * seq]), scale)
    }

    /// Logits of every position: `[batch, seq, vocab_size]`.
    pub fn logits(&self, x: Tensor<3>, tied: Option<&Embed>) -> Tensor<3> {
        let hidden = self.norm.forward(x);
        match self.matrix(tied) {
            (weight, HeadLayout::VocabColumns) => ops::linear(hidden, weight, None),
            (weight, HeadLayout::VocabRows) => ops::linear(hidden, weight.transpose(), None),
        }
    }

    fn matrix(&self, tied: Option<&Embed>) -> (Tensor<2>, HeadLayout) {
        match (&self.lm_head, tied) {
            (Some(linear), _) => (linear.weight.val(), HeadLayout::VocabColumns),
            (None, Some(embed)) => (embed.embed_tokens.weight.val(), HeadLayout::VocabRows),
            (None, None) => {
                unreachable!("invariant: a head without a matrix is given the embedding")
            }
        }
    }
}
