//! Final norm and language-model head.

use burn::module::Module;
use burn::tensor::{Device, Int, Tensor};

use super::{Embed, Linear, RmsNorm};
use crate::config::ModelConfig;
use crate::ops::{self, HeadLayout, LogitLoss, LogitOptions};
use crate::random::Key;

/// The last module of the decoder: the residual stream to logits or a loss.
#[derive(Module, Debug)]
pub struct Head {
    /// Final norm.
    pub norm: RmsNorm,
    /// `[d_model, vocab_size]`; `None` when the embedding is reused.
    pub lm_head: Option<Linear>,
    /// Bound of the logits; see [`LogitOptions::softcap`].
    #[module(skip)]
    pub logit_softcap: Option<f64>,
}

impl Head {
    /// A head of the given shape.
    pub fn new(config: &ModelConfig, key: Key, device: &Device) -> Self {
        let (d, vocab) = (config.d_model, config.vocab_size);
        Head {
            norm: RmsNorm::new(d, config.norm_eps, device),
            lm_head: (!config.tie_embeddings)
                .then(|| Linear::new(d, vocab, config.init_std, key.fork("lm_head"), device)),
            logit_softcap: config.logit_softcap,
        }
    }

    /// `scale * sum(-log p(target))` over all rows, and a z-loss of weight `z_loss`, without ever holding the
    /// logits. `x`: `[batch, seq, d_model]`, `targets`: `[batch, seq]`; `tied` is the embedding when the head
    /// has no matrix of its own.
    pub fn loss(
        &self,
        x: Tensor<3>,
        targets: Tensor<2, Int>,
        scale: f64,
        z_loss: Option<f64>,
        tied: Option<&Embed>,
    ) -> LogitLoss {
        let [batch, seq, d_model] = x.dims();
        let hidden = self.norm.forward(x).reshape([batch * seq, d_model]);
        let (weight, layout) = self.matrix(tied);
        let (targets, softcap) = (targets.reshape([batch * seq]), self.logit_softcap);
        let options = LogitOptions { softcap, z_loss };
        ops::linear_cross_entropy_with(hidden, weight, layout, targets, scale, options)
    }

    /// Logits of every position: `[batch, seq, vocab_size]`.
    pub fn logits(&self, x: Tensor<3>, tied: Option<&Embed>) -> Tensor<3> {
        let hidden = self.norm.forward(x);
        let logits = match self.matrix(tied) {
            (weight, HeadLayout::VocabColumns) => ops::linear(hidden, weight, None),
            (weight, HeadLayout::VocabRows) => ops::linear(hidden, weight.transpose(), None),
        };
        match self.logit_softcap {
            Some(cap) => ops::soft_cap(logits, cap),
            None => logits,
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
