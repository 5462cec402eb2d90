//! A program with a planted mistake, which `kiln check` finds before a run starts, or `kiln diff` by comparing runs
//! with and without the mistake. The variable PLANTED names it.
//!
//!     P="cargo run --release --example planted --"
//!     S="--set model.attention=mine --set model.feed_forward=mine --hash steps=1-3 --set train.steps=3"
//!     $P train configs/debug.toml --out runs/good $S
//!     PLANTED=rope $P train configs/debug.toml --out runs/bad $S
//!     $P diff runs/good runs/bad
//!     PLANTED=not_causal $P check configs/debug.toml $S

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::hint::black_box;
use std::process::ExitCode;

use burn::module::{Module, Param};
use burn::nn::DropoutConfig;
use burn::tensor::activation::log_softmax;
use burn::tensor::{Device, Distribution, Tensor};
use kiln::config::ConfigError;
use kiln::losses::LossInit;
use kiln::objective::{ObjectiveContext, TokenBatch};
use kiln::optimizers::OptimizerInit;
use kiln::process::CountingAllocator;
use kiln::registry::Registry;
use kiln::sharded::Pass;
use kiln_model::layers::{
    Context, Layer, LayerError, LayerInit, Linear, SwiGlu, TokenLoss, constant_parameter,
};
use kiln_model::ops::{RotaryFrequencies, cached_attention, causal_attention, rotary};
use kiln_shard::{Rule, Settings, ShardRun, UpdateStep};
use rustix::process::{Resource, Rlimit};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

/// Returns whether this mistake is planted.
fn is_planted(name: &str) -> bool {
    std::env::var("PLANTED").is_ok_and(|planted| planted == name)
}

/// Attention with rotary positions.
#[derive(Module, Debug)]
struct Attention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    #[module(skip)]
    heads: usize,
    #[module(skip)]
    theta: f64,
    /// Number of positions that queries are rotated ahead of the keys.
    #[module(skip)]
    ahead: usize,
}

impl Attention {
    fn new(init: LayerInit) -> Result<Self, LayerError> {
        let LayerInit { model, key, device, index, .. } = init;
        let (d, width) = (model.d_model, model.heads * model.head_dim());
        let linear = |name, d_in, d_out| Linear::new(d_in, d_out, model.init_std, key.fork(name), device);
        Ok(Attention {
            q_proj: linear("q_proj", d, width),
            k_proj: linear(if is_planted("same_key") { "q_proj" } else { "k_proj" }, d, width),
            v_proj: linear("v_proj", d, width),
            o_proj: linear("o_proj", width, d),
            heads: model.heads,
            theta: model.rope_theta,
            ahead: usize::from(index == 1 && is_planted("rope")),
        })
    }
}

impl Layer for Attention {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let [batch, seq, _] = x.dims();
        let [q, k, v] = Linear::forward_together([&self.q_proj, &self.k_proj, &self.v_proj], x)
            .map(|x| x.reshape([batch as i32, seq as i32, self.heads as i32, -1]));
        let cache = context.cache().filter(|_| !is_planted("no_cache"));
        let position = cache.map_or(0, |cache| cache.position());
        let frequencies = RotaryFrequencies::new(self.theta);
        let (q, k) = (rotary(q, frequencies, position + self.ahead), rotary(k, frequencies, position));
        let out = match cache {
            None => causal_attention(q, k, v, None),
            Some(cache) => {
                let (k, v) = (cache.append("keys", k), cache.append("values", v));
                cached_attention(q, k, v, position + seq, None)
            }
        };
        let y = self.o_proj.forward(out.reshape([batch as i32, seq as i32, -1]));
        if is_planted("not_causal") { y.clone() + y.mean_dim(1) } else { y }
    }
}

/// If `PLANTED` is `exhausted:BYTES`, uses up all memory except that many bytes, and then panics.
#[allow(unsafe_code)]
fn exhaust() {
    let planted = std::env::var("PLANTED").unwrap_or_default();
    let Some(left) = planted.strip_prefix("exhausted:").and_then(|left| left.parse::<usize>().ok()) else {
        return;
    };
    let used = std::fs::read_to_string("/proc/self/statm").unwrap_or_default();
    let pages: u64 = used.split(' ').next().and_then(|pages| pages.parse().ok()).unwrap_or(0);
    let current = Some(pages * rustix::param::page_size() as u64);
    let _ = rustix::process::setrlimit(Resource::As, Rlimit { current, maximum: None });
    // Bypasses the global allocator, which would notice. `black_box` keeps the compiler from removing these
    // allocations and assuming that they succeed.
    let block = |bytes: usize| Layout::from_size_align(bytes.max(16), 16).unwrap_or(Layout::new::<u128>());
    // SAFETY: no layout is empty, and the only freed block was allocated there with its layout.
    unsafe {
        let kept = black_box(System.alloc(block(left)));
        (4..21).rev().for_each(|size| while !black_box(System.alloc(block(1 << size))).is_null() {});
        if !kept.is_null() {
            System.dealloc(kept, block(left));
        }
    }
    panic!("without memory");
}

/// SwiGLU with a gain.
#[derive(Module, Debug)]
struct FeedForward {
    inner: SwiGlu,
    /// `[d_model]`.
    gain: Param<Tensor<1>>,
    /// `[d_model]`, if weights outside of parameters are planted.
    hidden: Option<Tensor<1>>,
    #[module(skip)]
    index: usize,
}

thread_local! {
    /// Number of updates in this thread: optimizer state that no checkpoint stores.
    static UPDATES: Cell<u32> = const { Cell::new(0) };
    /// Number of forward passes in this thread: a dropout mask must not depend on it.
    static PASSES: Cell<usize> = const { Cell::new(0) };
}

impl FeedForward {
    fn new(init: LayerInit) -> Result<Self, LayerError> {
        let LayerInit { model, index, device, .. } = init;
        let first = if index == 1 && is_planted("init") { 1.1 } else { 1.0 };
        let gain = match is_planted("unkeyed") {
            true => Param::from_tensor(Tensor::random([model.d_model], Distribution::Default, device)),
            false => gain(model.d_model, first, device),
        };
        let values = init.key.fork("hidden").normal_vec(model.d_model, 1.0);
        let hidden = is_planted("hidden").then(|| Tensor::from_floats(&values[..], device));
        Ok(FeedForward { gain, hidden, inner: SwiGlu::new(init), index })
    }
}

fn gain(width: usize, first: f32, device: &Device) -> Param<Tensor<1>> {
    constant_parameter([width], first, device)
}

impl Layer for FeedForward {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        // The added term is 0; its gradient is 0 too, unless the mistake is planted.
        let [rows, ..] = x.dims();
        let stray = if self.index == 1 && is_planted("backward") { 0.01 } else { 0.0 };
        let twice = if self.index == 0 && is_planted("gradient") { 2.0 } else { 1.0 };
        let gain = self.gain.val();
        let gain = gain.clone().mul_scalar(twice) - gain.detach().mul_scalar(twice - 1.0);
        let y = self.inner.forward(x.clone(), context) * gain.unsqueeze::<3>();
        let y = y + (x.clone() - x.detach()).mul_scalar(stray);
        if self.index == 1 {
            exhaust();
        }
        assert!(!is_planted("ffn_panics") || rows == 1, "made for one sequence");
        let passes = PASSES.with(|passes| passes.replace(passes.get() + 1));
        let y = if is_planted("mask") && (passes / 2).is_multiple_of(2) { y.mul_scalar(0.9) } else { y };
        let y = match &self.hidden {
            Some(hidden) => y * hidden.clone().unsqueeze(),
            None => y,
        };
        let y = if is_planted("random") { DropoutConfig::new(0.1).init().forward(y) } else { y };
        let [_, seq, _] = y.dims();
        assert!(!is_planted("one_length") || seq == 8, "made for 8 tokens");
        if self.index == 0 && is_planted("shape") { Tensor::cat(vec![y.clone(), y], 2) } else { y }
    }
}

/// Returns the cross-entropy of each token.
fn loss(_: LossInit) -> Result<TokenLoss, ConfigError> {
    Ok(TokenLoss::new(|logits: Tensor<2>, targets| {
        let [tokens, _] = logits.dims();
        assert!(!is_planted("loss_panics") || tokens > 2, "fewer than three tokens");
        assert!(!is_planted("loss_panics_later") || tokens <= 2, "more than two tokens");
        let loss = log_softmax(logits, 1).gather(1, targets.unsqueeze_dim(1)).neg().squeeze_dim::<1>(1);
        if !is_planted("counted_twice") {
            return loss;
        }
        let (first, rest) = (loss.clone().narrow(0, 0, tokens / 2), loss.narrow(0, tokens / 2, tokens / 2));
        Tensor::cat(vec![first.mul_scalar(2.0), rest], 0)
    }))
}

/// Panics.
fn panicking(_: &Pass<'_>, _: &TokenBatch, _: &ObjectiveContext<'_>) -> Tensor<1> {
    panic!("no idea")
}

/// Descent with momentum.
#[derive(Debug)]
struct Momentum {
    weight_decay: f64,
}

impl Rule for Momentum {
    fn name(&self) -> &str {
        "momentum"
    }

    fn slots(&self) -> &[&'static str] {
        &["momentum"]
    }

    fn settings(&self, shape: &[usize]) -> Settings {
        let decays = shape.len() >= 2 || is_planted("decay_norms");
        Settings { weight_decay: if decays { self.weight_decay } else { 0.0 }, ..Settings::default() }
    }

    fn update(&self, step: &UpdateStep, run: ShardRun<'_>) {
        let ShardRun { weights, gradient, mut slots, settings } = run;
        let updates = UPDATES.with(|updates| updates.replace(updates.get() + 1));
        let hidden = if is_planted("hidden_state") { 0.01 * (updates % 16) as f32 } else { 0.0 };
        let stays = hidden + if is_planted("momentum") { 0.8 } else { 0.9 };
        let rate = (step.learning_rate * settings.learning_rate) as f32;
        let (kept, clip) = (settings.kept(step.learning_rate), step.gradient_factor as f32);
        for ((weight, gradient), momentum) in weights.iter_mut().zip(gradient).zip(slots[0].iter_mut()) {
            *momentum = stays * *momentum + gradient * clip;
            *weight = *weight * kept - rate * *momentum;
        }
    }
}

fn optimizer(init: OptimizerInit) -> Result<Momentum, ConfigError> {
    Ok(Momentum { weight_decay: init.section.weight_decay })
}

fn main() -> ExitCode {
    let registry = Registry::default().attention("mine", Attention::new).layer("mine", FeedForward::new);
    let registry = registry.loss("mine", loss).optimizer("mine", optimizer);
    let registry = registry.objective("panics", |_| Ok(panicking));
    kiln::cli::main(registry.command("panic", |_, _| panic!("planted panic")))
}
