//! The gated feed-forward layer of Llama (Shazeer, 2020).

use burn::module::Module;
use burn::tensor::Tensor;

use super::{Context, Layer, LayerInit, Linear};
use crate::meta::{MetaTape, MetaTensor};
use crate::ops;

/// `down(silu(gate(x)) * up(x))`.
#[derive(Module, Debug)]
pub struct SwiGlu {
    /// `[d_model, d_ff]`.
    pub gate_proj: Linear,
    /// `[d_model, d_ff]`.
    pub up_proj: Linear,
    /// `[d_ff, d_model]`.
    pub down_proj: Linear,
}

impl SwiGlu {
    /// Creates a feed-forward layer of the given shape.
    pub fn new(init: LayerInit) -> Self {
        let model = init.model;
        let (d, ff, std) = (model.d_model, model.d_ff, model.init_std);
        let bias = model.feed_forward_bias;
        let linear =
            |name, d_in, d_out, std| init.linear(name, d_in, d_out, std).with_bias_if(bias, init.device);
        SwiGlu {
            gate_proj: linear("gate_proj", d, ff, std),
            up_proj: linear("up_proj", d, ff, std),
            down_proj: linear("down_proj", ff, d, model.residual_std()),
        }
    }
}

impl SwiGlu {
    /// Maps `x` `[.., d_model]` to the same shape.
    pub(super) fn apply<const D: usize>(&self, x: Tensor<D>, context: &Context) -> Tensor<D> {
        let [gate, up] = Linear::forward_together_in([&self.gate_proj, &self.up_proj], x, context);
        self.down_proj.forward_in(ops::swiglu(gate, up), context)
    }
}

impl Layer for SwiGlu {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        self.apply(x, context)
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let [gate, up] = Linear::meta_forward_together([&self.gate_proj, &self.up_proj], x, tape);
        self.down_proj.meta_forward(tape.gated(gate, up), tape)
    }
}
