//! A custom attention layer, with all commands of `kiln`:
//!
//!     cargo run --release --example own_attention -- train configs/quickstart.toml --set model.attention=alibi
//!     cargo run --release --example own_attention -- generate runs/quickstart --prompt "pub fn" --max-tokens 32
//!
//! The layer is plain burn, and computes the whole matrix of scores.

use std::process::ExitCode;

use burn::module::Module;
use burn::tensor::{Int, Tensor, activation::softmax};
use kiln::process::CountingAllocator;
use kiln::registry::Registry;
use kiln_model::layers::{Context, Layer, LayerError, LayerInit, Linear};
use kiln_model::meta::{MetaTape, MetaTensor};
use serde::Deserialize;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Multi-query attention (Shazeer, 2019) with linear biases instead of rotary positions (ALiBi, Press et al.,
/// 2022): all heads share one key and value head, and head `h` of `H` subtracts `steepest^(h + 1)` for each
/// position between a query and a key.
#[derive(Module, Debug)]
struct Alibi {
    /// `[d_model, heads * head_dim]`.
    q_proj: Linear,
    /// `[d_model, head_dim]`.
    k_proj: Linear,
    /// `[d_model, head_dim]`.
    v_proj: Linear,
    /// `[heads * head_dim, d_model]`.
    o_proj: Linear,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    steepest: f64,
}

/// The keys of `[model.extra]`.
#[derive(Deserialize)]
#[serde(default, deny_unknown_fields)]
struct Settings {
    steepest: f64,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { steepest: 0.5 }
    }
}

impl Alibi {
    fn new(init: LayerInit) -> Result<Self, LayerError> {
        let Settings { steepest } = init.extra()?;
        let LayerInit { model, key, device, .. } = init;
        let (d, heads, head_dim) = (model.d_model, model.heads, model.head_dim());
        let linear = |name, d_in, d_out, std| Linear::new(d_in, d_out, std, key.fork(name), device);
        Ok(Alibi {
            q_proj: linear("q_proj", d, heads * head_dim, model.init_std),
            k_proj: linear("k_proj", d, head_dim, model.init_std),
            v_proj: linear("v_proj", d, head_dim, model.init_std),
            o_proj: linear("o_proj", heads * head_dim, d, model.residual_std()),
            heads,
            steepest,
        })
    }
}

impl Layer for Alibi {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let ([batch, seq, _], device) = (x.dims(), x.device());
        let (q, k, v) =
            (self.q_proj.forward(x.clone()), self.k_proj.forward(x.clone()), self.v_proj.forward(x));
        // With a cache, `x` has only the newest positions; the cache has the keys and values before them.
        let (k, v) = match context.cache() {
            None => (k, v),
            Some(cache) => (cache.append("keys", k), cache.append("values", v)),
        };
        let [_, filled, head_dim] = k.dims();
        // All heads read the same keys: stacked, they are rows of one product.
        let q = q.reshape([batch, seq, self.heads, head_dim]).swap_dims(1, 2);
        let scores = q.reshape([batch, self.heads * seq, head_dim]).matmul(k.swap_dims(1, 2));
        let scores = scores.reshape([batch, self.heads, seq, filled]) / (head_dim as f64).sqrt();

        let positions = |from: usize| Tensor::<1, Int>::arange(from as i64..filled as i64, &device).float();
        let ahead = positions(0).unsqueeze_dim::<2>(0) - positions(filled - seq).unsqueeze_dim::<2>(1);
        let slopes: Vec<_> = (1..=self.heads).map(|head| self.steepest.powi(head as i32) as f32).collect();
        let slopes = Tensor::<1>::from_floats(&slopes[..], &device).reshape([1, self.heads, 1, 1]);
        let ahead = ahead.unsqueeze::<4>();
        let bias = (slopes * ahead.clone()).cast(scores.dtype());
        let scores = (scores + bias).mask_fill(ahead.greater_elem(0), f64::NEG_INFINITY);

        let weights = softmax(scores, 3).reshape([batch, self.heads * seq, filled]);
        let mixed = weights.matmul(v).reshape([batch, self.heads, seq, head_dim]).swap_dims(1, 2);
        self.o_proj.forward(mixed.reshape([batch, seq, self.heads * head_dim]))
    }

    /// Describes the products of `forward`, and the softmax between them.
    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let ([_, width], [_, head_dim]) =
            (self.q_proj.weight.lazy_shape().dims(), self.k_proj.weight.lazy_shape().dims());
        let (q, k, v) =
            (tape.linear(x.clone(), width), tape.linear(x.clone(), head_dim), tape.linear(x, head_dim));
        let scores = tape.product(q, k, self.heads * tape.batch().seq_len as usize);
        let mixed = tape.product(tape.softmax(scores), v, width);
        tape.linear(mixed, self.o_proj.weight.lazy_shape().dims::<2>()[1])
    }

    /// Adds 12 for each value of a query and each position, as built-in attention does.
    fn flops_per_token(&self, seq_len: usize) -> f64 {
        let [_, width] = self.q_proj.weight.lazy_shape().dims();
        6.0 * self.active_parameters() as f64 + 12.0 * (width * seq_len) as f64
    }
}

fn main() -> ExitCode {
    kiln::cli::main(Registry::default().attention("alibi", Alibi::new))
}
