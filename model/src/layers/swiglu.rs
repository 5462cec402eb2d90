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
        let LayerInit { model, key, device, .. } = init;
        let (d, ff, std) = (model.d_model, model.d_ff, model.init_std);
        let bias = model.feed_forward_bias;
        let linear = |name, d_in, d_out, std| {
            Linear::new(d_in, d_out, std, key.fork(name), device).with_bias_if(bias, device)
        };
        SwiGlu {
            gate_proj: linear("gate_proj", d, ff, std),
            up_proj: linear("up_proj", d, ff, std),
            down_proj: linear("down_proj", ff, d, model.residual_std()),
        }
    }
}

impl SwiGlu {
    /// Maps `x` `[.., d_model]` to the same shape.
    pub(super) fn apply<const D: usize>(&self, x: Tensor<D>) -> Tensor<D> {
        let [gate, up] = Linear::forward_together([&self.gate_proj, &self.up_proj], x);
        self.down_proj.forward(ops::swiglu(gate, up))
    }
}

impl Layer for SwiGlu {
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        self.apply(x)
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let [d_ff, d_model] = self.down_proj.weight.lazy_shape().dims();
        let [gate, up] = tape.linears(x, [d_ff, d_ff]);
        tape.linear(tape.gated(gate, up), d_model)
    }
}
