//! Multi-head latent attention, which caches a small vector per position instead of keys and values:
//!
//!     cargo run --release --example latent_attention -- train configs/quickstart.toml --set model.attention=latent
//!     cargo run --release --example latent_attention -- generate runs/quickstart --prompt "pub fn"

use kiln::model::ops::{self, RotaryFrequencies};
use kiln::prelude::*;

kiln::allocator!();

/// Attention whose keys and values are projections of a latent (DeepSeek-V2, 2024). The second half of each query and
/// key is rotary. All heads share that half of the keys, which is cached next to the latent.
#[derive(Module, Debug)]
pub struct LatentAttention {
    /// `[d_model, heads * head_dim / 2]`, as is the next one.
    q_proj: Linear,
    q_rotary_proj: Linear,
    /// `[d_model, head_dim / 2]`.
    k_rotary_proj: Linear,
    /// `[d_model, 2 * head_dim]`.
    latent_proj: Linear,
    norm: RmsNorm,
    /// `[2 * head_dim, heads * head_dim / 2]`.
    k_proj: Linear,
    /// `[2 * head_dim, heads * head_dim]`.
    v_proj: Linear,
    /// `[heads * head_dim, d_model]`.
    o_proj: Linear,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    frequencies: RotaryFrequencies,
}

impl LatentAttention {
    /// Creates a layer for the model's `heads` and `head_dim`.
    pub fn new(LayerInit { model, key, device, .. }: LayerInit) -> Result<Self, LayerError> {
        let (d, head_dim, width) = (model.d_model, model.head_dim(), model.heads * model.head_dim());
        if !head_dim.is_multiple_of(4) {
            return Err(LayerError::Shape(format!("model.head_dim = {head_dim}: choose a multiple of 4")));
        }
        let linear = |name, d_in, d_out| Linear::new(d_in, d_out, model.init_std, key.fork(name), device);
        Ok(LatentAttention {
            q_proj: linear("q_proj", d, width / 2),
            q_rotary_proj: linear("q_rotary_proj", d, width / 2),
            k_rotary_proj: linear("k_rotary_proj", d, head_dim / 2),
            latent_proj: linear("latent_proj", d, 2 * head_dim),
            norm: RmsNorm::new(2 * head_dim, model.norm_eps, device),
            k_proj: linear("k_proj", 2 * head_dim, width / 2),
            v_proj: linear("v_proj", 2 * head_dim, width),
            o_proj: Linear::new(width, d, model.residual_std(), key.fork("o_proj"), device),
            heads: model.heads,
            frequencies: RotaryFrequencies { theta: model.rope_theta, scaling: model.rope_scaling },
        })
    }
}

impl Layer for LatentAttention {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let maps = [&self.q_proj, &self.q_rotary_proj, &self.k_rotary_proj, &self.latent_proj];
        let [q, q_rotary, k_rotary, latent] = Linear::forward_together(maps, x);
        let (cache, heads) = (context.cache(), self.heads as i32);
        let rotate = |x| ops::rotary(x, self.frequencies, cache.map_or(0, |cache| cache.position()));
        let split = |x: Tensor<3>| x.reshape([0, 0, heads, -1]);
        let (mut k_rotary, mut latent) = (rotate(k_rotary.unsqueeze_dim(2)), self.norm.forward(latent));
        // With a cache, `x` has only the newest positions; the cache has the rows before them.
        if let Some(cache) = cache {
            (k_rotary, latent) = (cache.append("k_rotary", k_rotary), cache.append("latent", latent));
        }
        let [_, rows, _] = latent.dims();
        let [k, v] = Linear::forward_together([&self.k_proj, &self.v_proj], latent).map(split);
        let k = Tensor::cat(vec![k, k_rotary.expand([-1, -1, heads, -1])], 3);
        let q = Tensor::cat(vec![split(q), rotate(split(q_rotary))], 3);
        let out = match cache {
            None => ops::causal_attention(q, k, v, None),
            Some(_) => ops::cached_attention(q, k, v, rows, None),
        };
        self.o_proj.forward(out.flatten(2, 3))
    }

    /// Adds 12 for each value of a query and each position, as built-in attention does.
    fn flops_per_token(&self, seq_len: usize) -> f64 {
        let [width, _] = self.o_proj.weight.lazy_shape().dims();
        6.0 * self.active_parameters() as f64 + 12.0 * (width * seq_len) as f64
    }
}

fn main() -> std::process::ExitCode {
    kiln::cli::main(Registry::default().attention("latent", LatentAttention::new))
}
