//! Causal self-attention with grouped-query heads and rotary positions.

use burn::module::Module;
use burn::tensor::{Device, Tensor};

use super::{Context, Layer, Linear};
use crate::config::ModelConfig;
use crate::ops;
use crate::random::Key;

/// Causal self-attention. Shapes: B batch, T sequence, H query heads, K key and value heads,
/// D width of a head.
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
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    kv_heads: usize,
    #[module(skip)]
    rope_theta: f64,
}

impl Attention {
    /// Attention of the given shape.
    pub fn new(config: &ModelConfig, key: Key, device: &Device) -> Self {
        let d = config.d_model;
        let kv = config.kv_heads * config.head_dim();
        let (std, residual_std) = (config.init_std, config.residual_std());
        Attention {
            q_proj: Linear::new(d, d, std, key.fork("q_proj"), device),
            k_proj: Linear::new(d, kv, std, key.fork("k_proj"), device),
            v_proj: Linear::new(d, kv, std, key.fork("v_proj"), device),
            o_proj: Linear::new(d, d, residual_std, key.fork("o_proj"), device),
            heads: config.heads,
            kv_heads: config.kv_heads,
            rope_theta: config.rope_theta,
        }
    }
}

impl Layer for Attention {
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        let [batch, seq, d_model] = x.dims();
        let head_dim = d_model / self.heads;
        let q_bthd = self.q_proj.forward(x.clone()).reshape([batch, seq, self.heads, head_dim]);
        let k_btkd = self.k_proj.forward(x.clone()).reshape([batch, seq, self.kv_heads, head_dim]);
        let v_btkd = self.v_proj.forward(x).reshape([batch, seq, self.kv_heads, head_dim]);
        let q_bthd = ops::rotary(q_bthd, self.rope_theta, 0);
        let k_btkd = ops::rotary(k_btkd, self.rope_theta, 0);
        let out_bthd = ops::causal_attention(q_bthd, k_btkd, v_btkd);
        self.o_proj.forward(out_bthd.reshape([batch, seq, d_model]))
    }
}
