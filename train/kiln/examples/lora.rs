//! LoRA (Hu et al., 2021): trained low-rank adapters around the frozen layers of a trained model.
//!
//!     cargo run --release --example lora -- train configs/quickstart.toml --out runs/lora \
//!         --set init.from=runs/quickstart --allow-other-parts --allow-missing "*.lora_*" --set model.block=lora \
//!         --set 'model.extra.lora={ rank = 8, alpha = 16 }' --set 'train.train_only=["*.lora_*"]'

use std::num::NonZeroU32;
use std::process::ExitCode;

use kiln::prelude::*;
use kiln::serde::Deserialize;

kiln::allocator!();

/// Adds `alpha / rank * B(A(x))` to the result of a layer.
#[derive(Module, Debug)]
struct Lora {
    /// `A` `[d_model, rank]`.
    lora_a: Linear,
    /// `B` `[rank, d_model]`, initially zero.
    lora_b: Linear,
    #[module(skip)]
    scale: f64,
}

/// The keys of `[model.extra.lora]`.
#[derive(Deserialize)]
#[serde(crate = "kiln::serde", deny_unknown_fields)]
struct Settings {
    rank: NonZeroU32,
    alpha: f64,
}

impl Lora {
    fn new(init: LayerInit) -> Result<Self, LayerError> {
        let Settings { rank, alpha } = init.extra()?;
        let LayerInit { model, key, device, .. } = init;
        let (d, r) = (model.d_model, rank.get() as usize);
        Ok(Lora {
            lora_a: Linear::new(d, r, model.init_std, key.fork("lora_a"), device),
            lora_b: Linear::new(r, d, 0.0, key.fork("lora_b"), device),
            scale: alpha / f64::from(rank.get()),
        })
    }
}

impl Wrapper for Lora {
    fn forward(&self, layer: impl Fn(Tensor<3>) -> Tensor<3>, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        let adapted = self.lora_b.forward(self.lora_a.forward(x.clone()));
        layer(x) + adapted.mul_scalar(self.scale)
    }
}

fn main() -> ExitCode {
    kiln::cli::main(Registry::default().block_around("lora", |init, attention, ffn| {
        let attention = attention.wrapped(Lora::new(init.fork("attention"))?);
        Ok(Block::new(init, attention, ffn.wrapped(Lora::new(init.fork("ffn"))?)))
    }))
}
