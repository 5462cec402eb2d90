//! A custom feed-forward layer, with all commands of `kiln`:
//!
//!     cargo run --release --example own_layer -- train configs/quickstart.toml --set model.feed_forward=relu3
//!     cargo run --release --example own_layer -- generate runs/quickstart --prompt "pub fn" --max-tokens 32

use std::process::ExitCode;

use kiln::burn::tensor::activation::relu;
use kiln::prelude::*;
use kiln::serde::Deserialize;

kiln::allocator!();

/// `down(scale * relu(up(x))³)`.
#[derive(Module, Debug)]
struct CubedRelu {
    /// `[d_model, d_ff]`.
    up_proj: Linear,
    /// `[d_ff, d_model]`.
    down_proj: Linear,
    #[module(skip)]
    scale: f64,
}

/// The keys of `[model.extra]`.
#[derive(Deserialize)]
#[serde(crate = "kiln::serde", default, deny_unknown_fields)]
struct Settings {
    scale: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { scale: 1.0 }
    }
}

impl CubedRelu {
    fn new(init: LayerInit) -> Result<Self, LayerError> {
        let Settings { scale } = init.extra()?;
        let LayerInit { model, key, device, .. } = init;
        let (d, ff) = (model.d_model, model.d_ff);
        Ok(CubedRelu {
            up_proj: Linear::new(d, ff, model.init_std, key.fork("up_proj"), device),
            down_proj: Linear::new(ff, d, model.residual_std(), key.fork("down_proj"), device),
            scale,
        })
    }
}

impl Layer for CubedRelu {
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        let h = relu(self.up_proj.forward(x));
        self.down_proj.forward((h.clone() * h.clone() * h).mul_scalar(self.scale))
    }
}

fn main() -> ExitCode {
    kiln::cli::main(Registry::default().layer("relu3", CubedRelu::new))
}
