//! The GeGLU feed-forward layer (Shazeer, 2020).

use burn::module::Module;
use burn::tensor::Tensor;

use super::{Context, Layer, LayerInit, Linear, SwiGlu};
use crate::meta::{MetaTape, MetaTensor};
use crate::ops;

/// `down(gelu(gate(x)) * up(x))`, with the exact GELU. Its parameters are those of [`SwiGlu`].
#[derive(Module, Debug)]
pub struct GeGlu {
    /// `[d_model, d_ff]`.
    pub gate_proj: Linear,
    /// `[d_model, d_ff]`.
    pub up_proj: Linear,
    /// `[d_ff, d_model]`.
    pub down_proj: Linear,
}

impl GeGlu {
    /// Creates a feed-forward layer of the given shape.
    pub fn new(init: LayerInit) -> Self {
        let SwiGlu { gate_proj, up_proj, down_proj } = SwiGlu::new(init);
        GeGlu { gate_proj, up_proj, down_proj }
    }
}

impl Layer for GeGlu {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let [gate, up] = Linear::forward_together_in([&self.gate_proj, &self.up_proj], x, context);
        self.down_proj.forward_in(ops::geglu(gate, up), context)
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let [gate, up] = Linear::meta_forward_together([&self.gate_proj, &self.up_proj], x, tape);
        self.down_proj.meta_forward(tape.gated(gate, up), tape)
    }
}
