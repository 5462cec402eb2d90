//! Causal self-attention with grouped-query heads and rotary positions.

use burn::module::Module;
use burn::tensor::Tensor;

use super::{Context, Layer, LayerInit, Linear, RmsNorm};
use crate::config::AttentionBias;
use crate::meta::{MetaTape, MetaTensor};
use crate::ops::{self, RotaryFrequencies};

/// Causal self-attention, over the whole sequence or in a window: see
/// [`ModelConfig::window_of`](crate::ModelConfig::window_of). In shapes, H is the number of query heads, K the number
/// of key and value heads, and D the width of a head.
#[derive(Module, Debug)]
pub struct Attention {
    /// `[d_model, H * D]`.
    pub q_proj: Linear,
    /// `[d_model, K * D]`.
    pub k_proj: Linear,
    /// `[d_model, K * D]`.
    pub v_proj: Linear,
    /// `[H * D, d_model]`.
    pub o_proj: Linear,
    /// Normalises the D values of each query head (Henry et al., 2020; as in Qwen3).
    pub q_norm: Option<RmsNorm>,
    /// Normalises the D values of each key head.
    pub k_norm: Option<RmsNorm>,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    kv_heads: usize,
    #[module(skip)]
    head_dim: usize,
    /// Maximum number of positions that a position attends to: the position and those right before it.
    #[module(skip)]
    window: Option<usize>,
    #[module(skip)]
    frequencies: RotaryFrequencies,
}

impl Attention {
    /// Creates an attention layer of the given shape.
    pub fn new(init: LayerInit) -> Self {
        let LayerInit { model: config, index, device, .. } = init;
        let (d, head_dim) = (config.d_model, config.head_dim());
        let (q, kv) = (config.heads * head_dim, config.kv_heads * head_dim);
        let (std, residual_std) = (config.init_std, config.residual_std());
        let (qkv_bias, o_bias) = match config.attention_bias {
            AttentionBias::None => (false, false),
            AttentionBias::Qkv => (true, false),
            AttentionBias::All => (true, true),
        };
        let linear =
            |name, d_in, d_out, std, bias| init.linear(name, d_in, d_out, std).with_bias_if(bias, device);
        let norm = || config.qk_norm.then(|| RmsNorm::new(head_dim, config.norm_eps, device));
        Attention {
            q_proj: linear("q_proj", d, q, std, qkv_bias),
            k_proj: linear("k_proj", d, kv, std, qkv_bias),
            v_proj: linear("v_proj", d, kv, std, qkv_bias),
            o_proj: linear("o_proj", q, d, residual_std, o_bias),
            q_norm: norm(),
            k_norm: norm(),
            heads: config.heads,
            kv_heads: config.kv_heads,
            head_dim,
            window: config.window_of(index),
            frequencies: RotaryFrequencies { theta: config.rope_theta, scaling: config.rope_scaling },
        }
    }

    /// Returns the maps that read the layer's input.
    fn projections(&self) -> [&Linear; 3] {
        [&self.q_proj, &self.k_proj, &self.v_proj]
    }

    /// Splits a projection `[batch, seq, heads * D]` into heads, and applies `norm` if there is one: `[batch, seq,
    /// heads, D]`.
    fn split(&self, x: Tensor<3>, heads: usize, norm: Option<&RmsNorm>) -> Tensor<4> {
        let [batch, seq, _] = x.dims();
        let x = ops::reshape(x, [batch, seq, heads, self.head_dim]);
        match norm {
            Some(norm) => norm.forward(x),
            None => x,
        }
    }
}

impl Layer for Attention {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let [batch, seq, _] = x.dims();
        let [q, k, v] = Linear::forward_together_in(self.projections(), x, context);
        let q_bthd = self.split(q, self.heads, self.q_norm.as_ref());
        let k_btkd = self.split(k, self.kv_heads, self.k_norm.as_ref());
        let v_btkd = self.split(v, self.kv_heads, None);
        let cache = context.cache();
        let position = cache.map_or(0, |cache| cache.position());
        let rotary = if self.q_norm.is_some() { ops::rotary_of_normed } else { ops::rotary };
        let q_bthd = rotary(q_bthd, self.frequencies, position);
        let k_btkd = rotary(k_btkd, self.frequencies, position);
        let out_bthd = match cache {
            None => ops::causal_attention(q_bthd, k_btkd, v_btkd, self.window),
            Some(cache) => {
                let (keys_bckd, _) = cache.append_in_window("keys", k_btkd, self.window);
                let (values_bckd, filled) = cache.append_in_window("values", v_btkd, self.window);
                ops::cached_attention(q_bthd, keys_bckd, values_bckd, filled, self.window)
            }
        };
        self.o_proj.forward_in(ops::reshape(out_bthd, [batch, seq, self.heads * self.head_dim]), context)
    }

    /// Adds 12 per element of the queries and per position that a query attends to (Chowdhery et al., 2022), without
    /// subtracting the causal half, as is usual for MFU. With a window, the number of positions is the length of the
    /// window.
    fn flops_per_token(&self, seq_len: usize) -> f64 {
        let positions = self.window.map_or(seq_len, |window| window.min(seq_len));
        6.0 * self.active_parameters() as f64 + 12.0 * (self.heads * self.head_dim * positions) as f64
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let [q, k, v] = Linear::meta_forward_together(self.projections(), x, tape);
        let (q, k) = match self.q_norm {
            Some(_) => (tape.rms_norm(&q), tape.rms_norm(&k)),
            None => (q, k),
        };
        let out = tape.attention([tape.rotary(q), tape.rotary(k), v], self.heads);
        self.o_proj.meta_forward(out, tape)
    }
}
