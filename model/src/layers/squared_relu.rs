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
        let model = init.model;
        let (d, ff, bias) = (model.d_model, model.d_ff, model.feed_forward_bias);
        let linear =
            |name, d_in, d_out, std| init.linear(name, d_in, d_out, std).with_bias_if(bias, init.device);
        SquaredRelu {
            up_proj: linear("up_proj", d, ff, model.init_std),
            down_proj: linear("down_proj", ff, d, model.residual_std()),
        }
    }
}

impl Layer for SquaredRelu {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let up = self.up_proj.forward_in(x, context);
        self.down_proj.forward_in(ops::squared_relu(up), context)
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let up = self.up_proj.meta_forward(x, tape);
        self.down_proj.meta_forward(tape.elementwise(up), tape)
    }
}
