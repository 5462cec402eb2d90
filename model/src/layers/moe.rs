//! A mixture of experts (Shazeer et al., 2017), as in Qwen3-MoE and DeepSeekMoE.

use burn::module::{Module, Param};
use burn::tensor::{Int, Tensor};

use super::{
    AnyLayer, Context, Layer, LayerError, LayerInit, Linear, SwiGlu, constant_parameter, normal_parameter,
};
use crate::config::{BalanceOver, ModelConfig, ModelConfigError, MoeConfig};
use crate::meta::{MetaTape, MetaTensor};
use crate::ops::{self, ExpertProjections, Residual, Routing};

/// A feed-forward layer that sends each token to a few of many SwiGLU experts, and to a shared expert if there is
/// one.
///
/// The router's probabilities are a softmax over all experts. A token goes to the `experts_per_token` most probable
/// experts. The layer sums their results, each times its probability; with `norm_topk_prob`, the probabilities of the
/// chosen experts are first divided by their sum. There is no capacity limit: no token is dropped.
///
/// In training, the layer adds the loss of Switch Transformer (Fedus et al., 2021), extended to several experts per
/// token: `router_aux_loss_coef · experts · Σ_e f_e · P_e`. Here, `f_e` is the mean number of times that a token
/// chooses expert `e`, and `P_e` the expert's mean probability, over the tokens of a micro-batch of one rank. If all
/// experts get the same load, the loss is `router_aux_loss_coef · experts_per_token`. The losses of layers are
/// averaged. With [`BalanceOver::AllLayers`], `f_e` and `P_e` are means over the tokens of all layers together, as in
/// transformers' `load_balancing_loss_func`; the loss logged for a layer is then the amount that it adds to the loss
/// of the earlier layers.
///
/// With `expert_bias`, each expert has a bias that is added to its probability only when experts are chosen (Wang et
/// al., 2024). After each step, the bias should move by a fixed rate: up for experts with fewer tokens than the mean,
/// and down for the others. For this, the layer adds a loss that is zero, and whose gradient has the sign of load
/// minus mean over all tokens of the step. The optimizer should apply a rule that uses only the sign to
/// [`Moe::BIAS`].
#[derive(Module, Debug)]
pub struct Moe {
    /// `[d_model, experts]`.
    pub router: Linear,
    /// `[experts]`; added to the probabilities only to choose experts.
    pub router_bias: Option<Param<Tensor<1>>>,
    /// The experts that the router chooses from.
    pub experts: Experts,
    /// The expert that processes every token.
    pub shared_expert: Option<SwiGlu>,
    /// Number of experts per token.
    experts_per_token: usize,
    /// If true, the probabilities of a token's experts are divided by their sum.
    norm_topk_prob: bool,
    /// Weight of the balance loss of this layer.
    balance: f64,
    /// The layers that the loss balances together.
    #[module(skip)]
    over: BalanceOver,
    /// Index of the block that contains the layer.
    index: usize,
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
    /// The name of the experts' bias in this layer.
    pub const BIAS: &'static str = "router_bias";

    /// Creates the feed-forward layer of a block of a model with experts: a layer with experts, or a dense layer in
    /// the blocks of [`MoeConfig::dense_layers`].
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

    /// Creates a layer with experts.
    pub fn new(init: LayerInit, moe: &MoeConfig) -> Self {
        let LayerInit { model, key, device, .. } = init;
        let shared_expert = moe.shared_expert_d_ff.map(|d_ff| {
            let model = ModelConfig { d_ff, lora: None, ..model.clone() };
            SwiGlu::new(LayerInit { model: &model, ..init.fork("shared_expert") })
        });
        let layers = moe.layers_with_experts(model.layers).max(1);
        let over = moe.router_aux_loss_over.unwrap_or_default();
        Moe {
            router: Linear::new(model.d_model, moe.experts, model.init_std, key.fork("router"), device),
            router_bias: moe.expert_bias.then(|| constant_parameter([moe.experts], 0.0, device)),
            experts: Experts::new(init.fork("experts"), moe),
            shared_expert,
            experts_per_token: moe.experts_per_token,
            norm_topk_prob: moe.norm_topk_prob,
            balance: match over {
                BalanceOver::EachLayer => moe.router_aux_loss_coef / layers as f64,
                BalanceOver::AllLayers => moe.router_aux_loss_coef / (layers * layers) as f64,
            },
            over,
            index: init.index,
        }
    }

    /// Adds the balance loss or the loss that updates the bias to the training loss, and logs the load. `chosen` are
    /// the experts of each token `[tokens, k]`; `probabilities` `[tokens, experts]` are those of all experts.
    fn add_balance(&self, chosen: Tensor<2, Int>, probabilities: Tensor<2>, context: &Context) {
        if self.balance == 0.0 && self.router_bias.is_none() && !context.is_recording() {
            return;
        }
        let ([_, experts], dtype) = (probabilities.dims(), probabilities.dtype());
        let choices: usize = chosen.dims().iter().product();
        let load = ops::router_load(probabilities.clone(), chosen);
        if context.is_recording() {
            let largest = load.clone().max().mul_scalar(experts as f64 / choices as f64);
            context.record("largest_load", largest);
        }
        if self.balance > 0.0 {
            let loss = self.balance_loss(load.clone(), probabilities, context);
            context.add_loss("balance", loss.mul_scalar(self.balance));
        }
        if let Some(bias) = &self.router_bias {
            context.add_loss("balance", steering_loss(bias.val().cast(dtype), load.cast(dtype), choices));
        }
    }

    /// Returns the balance loss of the layer, `[1]`, before its coefficient: `experts · Σ_e f_e · P_e`, from the
    /// experts' `load` `[experts]` and all `probabilities` `[tokens, experts]`. With [`BalanceOver::AllLayers`],
    /// returns the layer's part of the loss of all layers, times the square of their number.
    fn balance_loss(&self, load: Tensor<1>, probabilities: Tensor<2>, context: &Context) -> Tensor<1> {
        let [tokens, experts] = probabilities.dims();
        let load = load.div_scalar(tokens as f64);
        let importance = ops::router_means(probabilities);
        let load = load.cast(importance.dtype());
        let loss = match (self.over, context.routers()) {
            (BalanceOver::AllLayers, Some(sums)) => ops::router_balance(importance, load, sums, self.index),
            _ => (load * importance).sum(),
        };
        loss.mul_scalar(experts as f64)
    }

    /// Returns the experts of each of `tokens`, and the router's probabilities, `[tokens, experts]`.
    fn route(&self, tokens: Tensor<2>) -> (Routing, Tensor<2>) {
        let logits = self.router.forward(tokens);
        let probabilities = ops::router_softmax(logits);
        let preferred = match &self.router_bias {
            Some(bias) => probabilities.clone() + bias.val().detach().cast(probabilities.dtype()).unsqueeze(),
            None => probabilities.clone(),
        };
        let experts = ops::top_k(preferred, self.experts_per_token);
        let [probabilities, for_balance] = ops::fork(probabilities);
        let weights = ops::router_weights(probabilities, experts.clone(), self.norm_topk_prob);
        (Routing { experts, weights }, for_balance)
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
        let x: Tensor<2> = x.reshape([batch * seq, d_model]);
        let [x, for_shared] = ops::fork(x);
        let [x, for_router] = ops::fork(x);
        let (routing, probabilities) = self.route(for_router);
        if context.is_training() {
            self.add_balance(routing.experts.clone(), probabilities, context);
        }
        let y = ops::experts(x, routing, self.experts.projections());
        let y = match &self.shared_expert {
            Some(shared) => Residual::new(y).add_result(shared.apply(for_shared, context)),
            None => y,
        };
        ops::reshape(y, [batch, seq, d_model])
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let [experts, _, d_ff] = self.experts.gate_proj.lazy_shape().dims();
        let [x, for_shared] = tape.fork(x);
        let [x, for_router] = tape.fork(x);
        let probabilities = tape.router_softmax(tape.linear(for_router, experts));
        let y = tape.experts(x, probabilities, [experts, self.experts_per_token, d_ff]);
        match &self.shared_expert {
            Some(shared) => tape.residual(y, shared.meta_forward(for_shared, tape)),
            None => y,
        }
    }

    /// Counts the router, the shared expert, and the experts of one token.
    fn active_parameters(&self) -> usize {
        let [experts, ..] = self.experts.gate_proj.lazy_shape().dims::<3>();
        let shared = self.shared_expert.as_ref().map_or(0, Layer::active_parameters);
        self.router.num_params() + shared + self.experts.num_params() / experts * self.experts_per_token
    }
}

/// Returns a loss `[1]` that is zero, and whose gradient for the `bias` of each expert is `experts` times its `load`
/// minus the number of `choices`, times [`STEERING`]. This is load minus mean in whole numbers, so that sums over a
/// power of two of passes are exact. The gradients are too small to change a bit of any gradient norm.
fn steering_loss(bias: Tensor<1>, load: Tensor<1>, choices: usize) -> Tensor<1> {
    let [experts] = load.dims();
    let above_mean = load.mul_scalar(experts as f64).sub_scalar(choices as f64).mul_scalar(STEERING);
    let product = (bias * above_mean).sum();
    product.clone() - product.detach()
}

/// A small power of two. Multiplied by a pass's share of the step, it is still a normal number in f32 and bf16, and
/// its square is negligible compared with the square of any useful gradient.
const STEERING: f64 = 1.0 / (1u128 << 80) as f64;
