//! The decoder block whose two layers read the same input.

use burn::module::Module;
use burn::tensor::Tensor;

use super::{AnyLayer, Context, Layer, LayerInit, RmsNorm};
use crate::meta::{MetaTape, MetaTensor};
use crate::ops::{self, Residual};

/// `x + attention(norm(x)) + ffn(norm(x))`: the parallel block of GPT-J (Wang and Komatsuzaki, 2021) and PaLM
/// (Chowdhery et al., 2022), with one norm for both layers.
#[derive(Module, Debug)]
pub struct ParallelBlock {
    /// Normalises the input of both layers.
    pub norm: RmsNorm,
    /// Mixes positions.
    pub attention: AnyLayer,
    /// Mixes channels.
    pub ffn: AnyLayer,
}

impl ParallelBlock {
    /// Creates a block from these two layers.
    pub fn new(init: LayerInit, attention: AnyLayer, ffn: AnyLayer) -> Self {
        let norm = RmsNorm::new(init.model.d_model, init.model.norm_eps, init.device);
        ParallelBlock { norm, attention, ffn }
    }
}

impl Layer for ParallelBlock {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let (attention_context, ffn_context) = (context.fork("attention"), context.fork("ffn"));
        let stream = Residual::new(x);
        let [for_attention, for_ffn] = ops::fork(self.norm.forward_of(&stream));
        let mixed = attention_context.dropout(self.attention.forward(for_attention, &attention_context));
        let fed = ffn_context.dropout(self.ffn.forward(for_ffn, &ffn_context));
        stream.add_result(Residual::new(mixed).add_result(fed))
    }

    fn active_parameters(&self) -> usize {
        self.norm.num_params() + self.attention.active_parameters() + self.ffn.active_parameters()
    }

    fn flops_per_token(&self, seq_len: usize) -> f64 {
        let layers = self.attention.flops_per_token(seq_len) + self.ffn.flops_per_token(seq_len);
        6.0 * self.norm.num_params() as f64 + layers
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let [for_attention, for_ffn] = tape.fork(tape.rms_norm(&x));
        let mixed = tape.dropout(self.attention.meta_forward(for_attention, tape));
        let fed = tape.dropout(self.ffn.meta_forward(for_ffn, tape));
        tape.residual(x, tape.residual(mixed, fed))
    }
}
