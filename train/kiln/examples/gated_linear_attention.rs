//! Gated linear attention, which generates text from a state of fixed size instead of keys and values:
//!
//!     cargo run --release --example gated_linear_attention -- train configs/quickstart.toml \
//!         --set model.attention=gated_linear
//!     cargo run --release --example gated_linear_attention -- generate runs/quickstart --prompt "pub fn"
//!
//! A pass over a sequence computes the whole matrix of scores, which suits a few hundred positions.

use kiln::burn::tensor::activation::log_sigmoid;
use kiln::prelude::*;

kiln::allocator!();

/// Linear attention with a gate per head and position (Dao and Gu, 2024; Yang et al., 2024). The state `S`
/// `[head_dim, head_dim]` of a head follows `S = a S + kᵀ v`, with `a` in (0, 1), and the head's output is `q S`.
#[derive(Module, Debug)]
pub struct GatedLinearAttention {
    /// `[d_model, heads * head_dim]`, as are the next two.
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    /// `[d_model, heads]`.
    gate_proj: Linear,
    /// Normalises the outputs of each head.
    norm: RmsNorm,
    /// `[heads * head_dim, d_model]`.
    o_proj: Linear,
    #[module(skip)]
    heads: usize,
}

impl GatedLinearAttention {
    /// Creates a layer for the model's `heads` and `head_dim`.
    pub fn new(init: LayerInit) -> Result<Self, LayerError> {
        let LayerInit { model, key, device, .. } = init;
        let (d, width) = (model.d_model, model.heads * model.head_dim());
        let linear = |name, d_in, d_out, std| Linear::new(d_in, d_out, std, key.fork(name), device);
        Ok(GatedLinearAttention {
            q_proj: linear("q_proj", d, width, model.init_std),
            k_proj: linear("k_proj", d, width, model.init_std),
            v_proj: linear("v_proj", d, width, model.init_std),
            gate_proj: linear("gate_proj", d, model.heads, model.init_std).with_bias(device),
            norm: RmsNorm::new(model.head_dim(), model.norm_eps, device),
            o_proj: linear("o_proj", width, d, model.residual_std()),
            heads: model.heads,
        })
    }
}

impl Layer for GatedLinearAttention {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let ([batch, seq, _], dtype, device) = (x.dims(), x.dtype(), x.device());
        let projections = [&self.q_proj, &self.k_proj, &self.v_proj, &self.gate_proj];
        // `[batch, heads, seq, head_dim]`, and `[batch, heads, seq, 1]` for the gates. Sums over positions need f32.
        let [q, k, v, gates] = Linear::forward_together(projections, x).map(|x| {
            let [_, _, width] = x.dims();
            x.cast(DType::F32).reshape([batch, seq, self.heads, width / self.heads]).swap_dims(1, 2)
        });
        // A product of gates is the exponential of a difference of these sums. It is at most 1, so it cannot overflow.
        let sums = (log_sigmoid(gates) / 16.0).cumsum(2);
        let later = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &device).unsqueeze();
        let products = sums.clone() - sums.clone().swap_dims(2, 3);
        let products = products.mask_fill(later, f64::NEG_INFINITY).exp();
        let scores = q.clone().matmul(k.clone().swap_dims(2, 3)) * products;
        let mut out = scores.matmul(v.clone());
        // With a cache, `x` has only the newest positions; the state is the sum over those before them.
        if let Some(cache) = context.cache() {
            let [_, _, _, head_dim] = q.dims();
            let shape = [batch, self.heads, head_dim, head_dim];
            let state = cache.state("state", || Tensor::<4>::zeros(shape, (&device, DType::F32)));
            out = out + (q * sums.clone().exp()).matmul(state.clone());
            let all = sums.clone().narrow(2, seq - 1, 1);
            let added = (k * (all.clone() - sums).exp()).swap_dims(2, 3).matmul(v);
            cache.set_state("state", state * all.exp() + added);
        }
        let out = self.norm.forward(out.swap_dims(1, 2).cast(dtype));
        self.o_proj.forward(out.flatten(2, 3))
    }

    /// Adds 12 for each value of a query and each position, as attention does.
    fn flops_per_token(&self, seq_len: usize) -> f64 {
        let [width, _] = self.o_proj.weight.lazy_shape().dims();
        6.0 * self.active_parameters() as f64 + 12.0 * (width * seq_len) as f64
    }
}

fn main() -> std::process::ExitCode {
    kiln::cli::main(Registry::default().attention("gated_linear", GatedLinearAttention::new))
}
