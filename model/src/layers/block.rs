//! One decoder block.

use burn::module::Module;
use burn::tensor::Tensor;

use super::{AnyLayer, Context, Layer, LayerInit, RmsNorm};
use crate::meta::{MetaTape, MetaTensor};
use crate::ops::Residual;

/// A pre-norm block: attention, then feed-forward, each added to the residual stream.
#[derive(Module, Debug)]
pub struct Block {
    /// Normalises the input of attention.
    pub attention_norm: RmsNorm,
    /// Mixes positions.
    pub attention: AnyLayer,
    /// Normalises the input of the feed-forward layer.
    pub ffn_norm: RmsNorm,
    /// Mixes channels.
    pub ffn: AnyLayer,
}

impl Block {
    /// Creates a block from these two layers.
    pub fn new(init: LayerInit, attention: AnyLayer, ffn: AnyLayer) -> Self {
        let norm = || RmsNorm::new(init.model.d_model, init.model.norm_eps, init.device);
        Block { attention_norm: norm(), attention, ffn_norm: norm(), ffn }
    }
}

impl Layer for Block {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let (attention_context, ffn_context) = (context.fork("attention"), context.fork("ffn"));
        let stream = Residual::new(x);
        let normed = self.attention_norm.forward_of(&stream);
        let mixed = self.attention.forward(normed, &attention_context);
        let (stream, normed) = self.ffn_norm.forward_after(stream, attention_context.dropout(mixed));
        let fed = self.ffn.forward(normed, &ffn_context);
        stream.add_result(ffn_context.dropout(fed))
    }

    fn active_parameters(&self) -> usize {
        let norms = self.attention_norm.num_params() + self.ffn_norm.num_params();
        norms + self.attention.active_parameters() + self.ffn.active_parameters()
    }

    fn flops_per_token(&self, seq_len: usize) -> f64 {
        let norms = self.attention_norm.num_params() + self.ffn_norm.num_params();
        6.0 * norms as f64 + self.attention.flops_per_token(seq_len) + self.ffn.flops_per_token(seq_len)
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let mixed = self.attention.meta_forward(tape.rms_norm(&x), tape);
        let (x, normed) = tape.residual_and_norm(x, tape.dropout(mixed));
        let fed = self.ffn.meta_forward(normed, tape);
        tape.residual(x, tape.dropout(fed))
    }
}
