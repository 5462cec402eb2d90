//! The feed-forward layer with a squared ReLU (So et al., 2021).

use burn::module::Module;
use burn::tensor::Tensor;

use super::{Context, Layer, LayerInit, Linear};
use crate::meta::{MetaTape, MetaTensor};
use crate::ops;

/// `down(relu(up(x))²)`.
#[derive(Module, Debug)]
pub struct SquaredRelu {
    /// `[d_model, d_ff]`.
    pub up_proj: Linear,
    /// `[d_ff, d_model]`.
    pub down_proj: Linear,
}

impl SquaredRelu {
    /// Creates a feed-forward layer of the given shape.
    pub fn new(init: LayerInit) -> Self {
        let LayerInit { model, key, device, .. } = init;
        let (d, ff, bias) = (model.d_model, model.d_ff, model.feed_forward_bias);
        let linear = |name, d_in, d_out, std| {
            Linear::new(d_in, d_out, std, key.fork(name), device).with_bias_if(bias, device)
        };
        SquaredRelu {
            up_proj: linear("up_proj", d, ff, model.init_std),
            down_proj: linear("down_proj", ff, d, model.residual_std()),
        }
    }
}

impl Layer for SquaredRelu {
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        self.down_proj.forward(ops::squared_relu(self.up_proj.forward(x)))
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let [d_ff, d_model] = self.down_proj.weight.lazy_shape().dims();
        tape.linear(tape.elementwise(tape.linear(x, d_ff)), d_model)
    }
}
