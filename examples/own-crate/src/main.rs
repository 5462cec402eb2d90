//! A custom feed-forward layer, and all commands of `kiln` with it.

use std::process::ExitCode;

use kiln::burn::tensor::activation::relu;
use kiln::prelude::*;

kiln::allocator!();

/// `down(relu(up(x)))`.
#[derive(Module, Debug)]
struct Mine {
    /// `[d_model, d_ff]`.
    up_proj: Linear,
    /// `[d_ff, d_model]`.
    down_proj: Linear,
}

impl Mine {
    fn new(init: LayerInit) -> Result<Self, LayerError> {
        let LayerInit { model, key, device, .. } = init;
        let (d, ff) = (model.d_model, model.d_ff);
        Ok(Mine {
            up_proj: Linear::new(d, ff, model.init_std, key.fork("up_proj"), device),
            down_proj: Linear::new(ff, d, model.residual_std(), key.fork("down_proj"), device),
        })
    }
}

impl Layer for Mine {
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        self.down_proj.forward(relu(self.up_proj.forward(x)))
    }
}

fn main() -> ExitCode {
    kiln::cli::main(Registry::default().layer("mine", Mine::new))
}
