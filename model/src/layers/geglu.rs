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
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        let [gate, up] = Linear::forward_together([&self.gate_proj, &self.up_proj], x);
        self.down_proj.forward(ops::geglu(gate, up))
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let [d_ff, d_model] = self.down_proj.weight.lazy_shape().dims();
        let [gate, up] = tape.linears(x, [d_ff, d_ff]);
        tape.linear(tape.gated(gate, up), d_model)
    }
}
