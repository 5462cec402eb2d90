//! A mixture of experts (Shazeer et al., 2017), as Qwen3-MoE and DeepSeekMoE have it.

use burn::module::{Module, Param};
use burn::tensor::{DType, Device, FloatDType, Int, Tensor};

use super::{AnyLayer, Context, Layer, LayerError, LayerInit, Linear, SwiGlu, normal_parameter};
use crate::config::{ModelConfig, ModelConfigError, MoeConfig};
use crate::ops::{self, ExpertProjections, Routing};

/// A feed-forward layer that sends each token to a few of many SwiGLU experts, and to a shared expert if
/// there is one.
///
/// The router's probabilities are a softmax over all experts. A token goes to the `experts_per_token` most
/// probable ones, and their results are added up, each times its probability, which `norm_topk_prob` divides
/// by the sum of the chosen ones. There is no capacity: no token is dropped.
///
/// In training the layer adds the loss of Switch Transformer (Fedus et al., 2021), with several experts for a
/// token: `router_aux_loss_coef · experts · Σ_e f_e · P_e`, where `f_e` is the number of choices of expert
/// `e` for each token and `P_e` its mean probability, over the tokens of a micro-batch of one rank. It is
/// least where all experts get as much. The losses of layers are averaged: a coefficient means what it means
/// in transformers, whose `load_balancing_loss_func` takes both means over the tokens of all layers together.
#[derive(Module, Debug)]
pub struct Moe {
    /// `[d_model, experts]`.
    pub router: Linear,
    /// The experts that the router chooses from.
    pub experts: Experts,
    /// The expert of every token.
    pub shared_expert: Option<SwiGlu>,
    /// Experts of a token.
    experts_per_token: usize,
    /// Whether the probabilities of a token's experts are divided by their sum.
    norm_topk_prob: bool,
    /// Weight of the balance loss of this layer.
    balance: f64,
}

/// The projections of the experts of a layer, one tensor for all experts.
#[derive(Module, Debug)]
pub struct Experts {
    /// `[experts, d_model, expert_d_ff]`.
    pub gate_proj: Param<Tensor<3>>,
    /// `[experts, d_model, expert_d_ff]`.
    pub up_proj: Param<Tensor<3>>,
    /// `[experts, expert_d_ff, d_model]`.
    pub down_proj: Param<Tensor<3>>,
}

impl Moe {
    /// The feed-forward layer of a block of a model with experts: a dense one in the blocks that
    /// [`MoeConfig::dense_layers`] names.
    ///
    /// # Errors
    ///
    /// If the model has no section for the experts.
    pub fn layer_of(init: LayerInit) -> Result<AnyLayer, LayerError> {
        let Some(moe) = &init.model.moe else {
            return Err(LayerError::Shape(ModelConfigError::NoExperts.to_string()));
        };
        Ok(match moe.has_experts(init.index) {
            true => AnyLayer::new(Moe::new(init, moe)),
            false => AnyLayer::new(SwiGlu::new(init)),
        })
    }

    /// A layer with experts.
    pub fn new(init: LayerInit, moe: &MoeConfig) -> Self {
        let LayerInit { model, key, device, .. } = init;
        let shared_expert = moe.shared_expert_d_ff.map(|d_ff| {
            let model = ModelConfig { d_ff, ..model.clone() };
            SwiGlu::new(LayerInit { model: &model, ..init.fork("shared_expert") })
        });
        let layers = moe.layers_with_experts(model.layers).max(1);
        Moe {
            router: Linear::new(model.d_model, moe.experts, model.init_std, key.fork("router"), device),
            experts: Experts::new(init.fork("experts"), moe),
            shared_expert,
            experts_per_token: moe.experts_per_token,
            norm_topk_prob: moe.norm_topk_prob,
            balance: moe.router_aux_loss_coef / layers as f64,
        }
    }

    /// The experts of each of `tokens`, and the router's probabilities, `[tokens, experts]`.
    fn route(&self, tokens: Tensor<2>) -> (Routing, Tensor<2>) {
        let logits = self.router.forward(tokens);
        // As in transformers: probabilities of half-precision logits are computed in f32.
        let logits = match logits.dtype() {
            DType::F16 | DType::BF16 => logits.cast(FloatDType::F32),
            _ => logits,
        };
        let probabilities = softmax(logits);
        let experts = ops::top_k(probabilities.clone(), self.experts_per_token);
        let weights = probabilities.clone().gather(1, experts.clone());
        let weights = match self.norm_topk_prob {
            true => weights.clone() / weights.sum_dim(1),
            false => weights,
        };
        (Routing { experts, weights }, probabilities)
    }
}

impl Experts {
    fn new(init: LayerInit, moe: &MoeConfig) -> Self {
        let LayerInit { model, key, device, .. } = init;
        let (d, ff) = (model.d_model, moe.expert_d_ff);
        let stacked = |name, shape: [usize; 2], std| {
            normal_parameter([moe.experts, shape[0], shape[1]], std, key.fork(name), device)
        };
        Experts {
            gate_proj: stacked("gate_proj", [d, ff], model.init_std),
            up_proj: stacked("up_proj", [d, ff], model.init_std),
            down_proj: stacked("down_proj", [ff, d], model.residual_std()),
        }
    }

    fn projections(&self) -> ExpertProjections {
        ExpertProjections { gate: self.gate_proj.val(), up: self.up_proj.val(), down: self.down_proj.val() }
    }
}

impl Layer for Moe {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let [batch, seq, d_model] = x.dims();
        let tokens: Tensor<2> = x.clone().reshape([batch * seq, d_model]);
        let (routing, probabilities) = self.route(tokens.clone());
        if self.balance > 0.0 && context.is_training() {
            let loss = balance_loss(routing.experts.clone(), probabilities);
            context.add_loss("balance", loss.mul_scalar(self.balance));
        }
        let y = ops::experts(tokens, routing, self.experts.projections());
        let y = match &self.shared_expert {
            // Of a view of its own. Its two projections add their gradients to what the input has got by
            // then, and the order of the sum would differ where the block runs again.
            Some(shared) => y + shared.apply(x.reshape([batch * seq, d_model])),
            None => y,
        };
        y.reshape([batch, seq, d_model])
    }

    /// The router, the shared expert, and as many experts as a token is sent to.
    fn active_parameters(&self) -> usize {
        let [experts, ..] = self.experts.gate_proj.lazy_shape().dims::<3>();
        let shared = self.shared_expert.as_ref().map_or(0, Layer::active_parameters);
        self.router.num_params() + shared + self.experts.num_params() / experts * self.experts_per_token
    }
}

/// The softmax of each row. Step by step: burn's own has other bits with autodiff than without, and a block
/// that runs again in backward must have the bits of its first run.
fn softmax(logits: Tensor<2>) -> Tensor<2> {
    let largest = logits.clone().detach().max_dim(1);
    let powers = (logits - largest).exp();
    powers.clone() / powers.sum_dim(1)
}

/// The loss of [`Moe`] before its coefficient, `[1]`, of `chosen` experts `[tokens, k]` and the
/// `probabilities` `[tokens, experts]` of all: `experts · Σ_e f_e · P_e`.
fn balance_loss(chosen: Tensor<2, Int>, probabilities: Tensor<2>) -> Tensor<1> {
    let [tokens, experts] = probabilities.dims();
    let load = expert_load(chosen, experts, &probabilities.device()).div_scalar(tokens as f64);
    let importance = probabilities.mean_dim(0).reshape([experts]);
    (load.cast(importance.dtype()) * importance).sum().mul_scalar(experts as f64)
}

/// Number of choices of each expert, `[experts]`.
fn expert_load(chosen: Tensor<2, Int>, experts: usize, device: &Device) -> Tensor<1> {
    let count = chosen.dims().iter().product();
    // Indices as floats, which are exact: the integers of two sources need not have one type.
    let indices = Tensor::<1, Int>::arange(0..experts as i64, device).float();
    let indices: Tensor<2> = indices.reshape([1, experts]).expand([count, experts]);
    let chosen: Tensor<2> = chosen.float().reshape([count, 1]).expand([count, experts]);
    chosen.equal(indices).float().sum_dim(0).reshape([experts])
}
