//! Final norm and language-model head.

use std::fmt;
use std::sync::Arc;

use burn::module::Module;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, FloatDType, Int, Tensor};

use super::{AnyLayer, Embed, Linear, RmsNorm};
use crate::config::ModelConfig;
use crate::meta::{MetaTape, MetaTensor};
use crate::ops::{self, HeadLayout, LogitLoss, LogitOptions};
use crate::random::Key;

/// A custom training loss instead of the cross-entropy: the loss of each token, `[tokens]`, given its logits,
/// `[tokens, vocab_size]` in f32, and its target, `[tokens]`. The training loss is the mean over all tokens
/// of the step.
///
/// Unlike the fused cross-entropy, it holds all logits of a micro-batch in memory.
///
/// ```
/// use burn::tensor::activation::log_softmax;
/// use kiln_model::layers::TokenLoss;
///
/// let cross_entropy = TokenLoss::new(|logits, targets| {
///     log_softmax(logits, 1).gather(1, targets.unsqueeze_dim(1)).neg().squeeze_dim(1)
/// });
/// ```
#[derive(Clone)]
pub struct TokenLoss(Arc<dyn Fn(Tensor<2>, Tensor<1, Int>) -> Tensor<1> + Send + Sync>);

impl TokenLoss {
    /// Wraps the function `loss(logits, targets)`.
    pub fn new(loss: impl Fn(Tensor<2>, Tensor<1, Int>) -> Tensor<1> + Send + Sync + 'static) -> Self {
        TokenLoss(Arc::new(loss))
    }

    /// Returns the loss of each token, `[tokens]`.
    pub fn of(&self, logits: Tensor<2>, targets: Tensor<1, Int>) -> Tensor<1> {
        (self.0)(logits, targets)
    }
}

impl fmt::Debug for TokenLoss {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("TokenLoss")
    }
}

/// The last module of the decoder, which maps the residual stream to logits or a loss.
#[derive(Module, Debug)]
pub struct Head {
    /// Final norm.
    pub norm: RmsNorm,
    /// `[d_model, vocab_size]`; `None` if the head reuses the embedding.
    pub lm_head: Option<Linear>,
    /// A layer that only objectives run, such as an extra head.
    pub head_layer: Option<AnyLayer>,
    /// Bound on the logits; see [`LogitOptions::softcap`].
    #[module(skip)]
    pub logit_softcap: Option<f64>,
}

impl Head {
    /// Creates a head of the given shape.
    pub fn new(config: &ModelConfig, key: Key, device: &Device) -> Self {
        let (d, vocab) = (config.d_model, config.vocab_size);
        Head {
            norm: RmsNorm::new(d, config.norm_eps, device),
            lm_head: (!config.tie_embeddings)
                .then(|| Linear::new(d, vocab, config.init_std, key.fork("lm_head"), device)),
            head_layer: None,
            logit_softcap: config.logit_softcap,
        }
    }

    /// Returns `scale * sum(-log p(target))` over all rows, plus a z-loss of weight `z_loss`, without ever storing
    /// all logits. `x` is `[batch, seq, d_model]`, `targets` `[batch, seq]`; `weights` `[batch, seq]` multiply the
    /// losses of each position; `tied` is the embedding, if the head reuses it.
    pub fn loss(
        &self,
        x: Tensor<3>,
        targets: Tensor<2, Int>,
        weights: Option<Tensor<2>>,
        scale: f64,
        z_loss: Option<f64>,
        tied: Option<&Embed>,
    ) -> LogitLoss {
        let [batch, seq, d_model] = x.dims();
        let hidden = self.norm.forward(x).reshape([batch * seq, d_model]);
        let (weight, layout) = self.matrix(tied);
        let (targets, softcap) = (targets.reshape([batch * seq]), self.logit_softcap);
        let options = LogitOptions { softcap, z_loss };
        let weights = weights.map(|weights| weights.reshape([batch * seq]));
        ops::linear_cross_entropy_with(hidden, weight, layout, targets, weights, scale, options)
    }

    /// Returns `scale` times the sum of `loss` over all rows, `[1]`; otherwise like [`Head::loss`].
    pub fn token_loss(
        &self,
        x: Tensor<3>,
        targets: Tensor<2, Int>,
        weights: Option<Tensor<2>>,
        scale: f64,
        loss: &TokenLoss,
        tied: Option<&Embed>,
    ) -> Tensor<1> {
        let logits = self.logits(x, tied);
        let [batch, seq, vocab_size] = logits.dims();
        let rows = batch * seq;
        let logits = logits.reshape([rows, vocab_size]).cast(FloatDType::F32);
        // Sum along a dimension, because a GPU sums over all elements in an arbitrary order.
        let targets = targets.reshape([rows]);
        let losses = match weights {
            // The loss may not know that a negative target is ignored, with a weight of 0.
            Some(weights) => loss.of(logits, targets.clamp_min(0)) * weights.detach().reshape([rows]),
            None => loss.of(logits, targets),
        };
        losses.sum_dim(0).mul_scalar(scale)
    }

    /// Returns the log-probability of each target, `[batch, seq]` in f32; otherwise like [`Head::loss`]. Unlike it,
    /// this holds all logits in memory.
    pub fn log_probabilities(
        &self,
        x: Tensor<3>,
        targets: Tensor<2, Int>,
        tied: Option<&Embed>,
    ) -> Tensor<2> {
        let log_p = log_softmax(self.logits(x, tied).cast(FloatDType::F32), 2);
        log_p.gather(2, targets.clamp_min(0).unsqueeze_dim(2)).squeeze_dim(2)
    }

    /// Returns the logits of every position, `[batch, seq, vocab_size]`.
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

    /// Mirrors the memory of the norm before [`Head::meta_loss`].
    pub fn meta_norm(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        tape.rms_norm(&x)
    }

    /// Mirrors the memory of [`Head::loss`], or of [`Head::token_loss`] if `token_loss` is true, from the normalised
    /// `hidden` on; like [`Layer::meta_forward`](super::Layer::meta_forward).
    pub fn meta_loss(
        &self,
        hidden: MetaTensor,
        vocab_size: usize,
        token_loss: bool,
        tape: &MetaTape<'_>,
    ) -> MetaTensor {
        match token_loss {
            true => tape.whole_logits(hidden, vocab_size),
            false => tape.cross_entropy(hidden, vocab_size, self.lm_head.is_none()),
        }
    }
}
