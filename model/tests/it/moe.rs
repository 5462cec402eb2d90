//! The mixture of experts as a layer: comparison with plain burn, its balance loss, and its counts.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{
    Device, FloatDType, Int, Tensor,
    activation::{silu, softmax},
};
use kiln_model::decoder;
use kiln_model::layers::{LayerInit, Moe, Record, Records, SwiGlu};
use kiln_model::ops::{Probe, Seen, linear_reference, top_k_reference};
use kiln_model::{BalanceOver, Context, Decoder, Key, Layer, Layers, MOE, ModelConfig, MoeConfig};

use crate::layers::{BATCH, SEQ, operation, sizes};
use crate::ops_support::*;

pub fn experts() -> MoeConfig {
    MoeConfig { experts: 4, experts_per_token: 2, expert_d_ff: 6, ..MoeConfig::default() }
}

pub fn config(moe: MoeConfig) -> ModelConfig {
    ModelConfig {
        vocab_size: 37,
        d_model: 8,
        layers: 2,
        heads: 2,
        kv_heads: 2,
        d_ff: 10,
        feed_forward: MOE.to_owned(),
        moe: Some(moe),
        init_std: 0.5,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

pub fn layer(config: &ModelConfig) -> Moe {
    let moe = config.moe.as_ref().expect("experts");
    Moe::new(LayerInit::for_block(config, 0, Key::new(1), &Device::flex()), moe)
}

/// Computes the layer in plain burn: every token through every expert, weighted with 0 if the expert is not
/// chosen. Experts are chosen with a `bias`, if there is one.
fn reference(config: &ModelConfig, bias: Option<[f32; 4]>, t: &[Tensor<1>]) -> Tensor<1> {
    let moe = config.moe.as_ref().expect("experts");
    let (d, ff, tokens) = (config.d_model, moe.expert_d_ff, BATCH * SEQ);
    let x = t[0].clone().reshape([tokens, d]);
    let probabilities = softmax(x.clone().matmul(t[1].clone().reshape([d, moe.experts])), 1);
    let preferred = match bias {
        Some(bias) => probabilities.clone() + constant(bias, &t[0]).reshape([1, moe.experts]),
        None => probabilities.clone(),
    };
    let chosen = top_k_reference(preferred, moe.experts_per_token);
    let mut weights = probabilities.gather(1, chosen.clone());
    if moe.norm_topk_prob {
        weights = weights.clone() / weights.sum_dim(1);
    }
    let matrix = |values: &Tensor<1>, index: usize, shape: [usize; 2]| {
        let len = shape[0] * shape[1];
        values.clone().narrow(0, index * len, len).reshape(shape)
    };
    let gated = |index: usize, [gate, up, down]: [&Tensor<1>; 3], ff: usize| {
        let gate = linear_reference(x.clone(), matrix(gate, index, [d, ff]), None);
        let up = linear_reference(x.clone(), matrix(up, index, [d, ff]), None);
        linear_reference(silu(gate) * up, matrix(down, index, [ff, d]), None)
    };
    let mut y = x.zeros_like();
    for expert in 0..moe.experts {
        let is_not = chosen.clone().not_equal_elem(expert as i64);
        let weight = weights.clone().mask_fill(is_not, 0.0).sum_dim(1);
        y = y + gated(expert, [&t[2], &t[3], &t[4]], ff) * weight;
    }
    if let Some(ff) = moe.shared_expert_d_ff {
        y = y + gated(0, [&t[5], &t[6], &t[7]], ff);
    }
    y.reshape([tokens * d])
}

#[test]
fn the_layer_matches_plain_burn() {
    for (shared_expert_d_ff, norm_topk_prob) in [(None, true), (None, false), (Some(7), true)] {
        let config = config(MoeConfig { shared_expert_d_ff, norm_topk_prob, ..experts() });
        let (layer, d) = (layer(&config), config.d_model);
        let sizes = sizes(&layer, d);
        assert_matches(operation(&layer, d), |t: &[Tensor<1>]| reference(&config, None, t), &sizes, 1e-5);
        assert_finite_differences(operation(&layer, d), &sizes);
    }
}

/// Creates a tensor off the tape, on the device of `like`.
fn constant<const N: usize>(values: [f32; N], like: &Tensor<1>) -> Tensor<1> {
    let values: Tensor<1> = Tensor::from_data(values, &like.device());
    values.cast(like.dtype())
}

/// A bias changes which experts are chosen, and gets no gradient from the layer's result. This also holds outside of
/// training.
#[test]
fn a_bias_counts_for_the_choice_alone() {
    let config = config(MoeConfig { expert_bias: true, ..experts() });
    let (layer, d) = (layer(&config), config.d_model);
    let mut sizes = sizes(&layer, d);
    assert_eq!(sizes.remove(2), 4, "behind the input and the router");
    let with = |bias: [f32; 4]| {
        let operation = operation(&layer, d);
        move |t: &[Tensor<1>]| {
            let bias = constant(bias, &t[0]);
            operation(&[&t[..2], &[bias], &t[2..]].concat())
        }
    };
    let biases = [[0.0; 4], [0.25, -0.5, 0.125, 0.0], [-1.0, 0.0, 1.0, 0.5]];
    for bias in biases {
        let reference = |t: &[Tensor<1>]| reference(&config, Some(bias), t);
        assert_matches(with(bias), reference, &sizes, 1e-5);
    }
    let outputs = biases.map(|bias| run(&with(bias), &inputs(&sizes), FloatDType::F32).output);
    assert!(outputs[0] != outputs[1] && outputs[0] != outputs[2] && outputs[1] != outputs[2]);
}

/// The loss that steers a bias is zero, and its gradient is the load minus the mean, in whole numbers.
#[test]
fn a_bias_is_steered_by_the_load() {
    let (with, without) = (MoeConfig { expert_bias: true, ..experts() }, experts());
    let (plain, gradient, _) = train(without);
    let (loss, with_bias, largest) = train(with);
    assert_eq!(loss, plain);
    let is_bias = |gradient: &&Vec<f64>| gradient.len() == 4;
    let steering: Vec<_> = with_bias.iter().filter(is_bias).flatten().map(|v| v * 2f64.powi(80)).collect();
    // 12 tokens with 2 of 4 experts each: load times 4, minus 24.
    assert_eq!(steering.len(), 4);
    assert!(steering.iter().all(|value| (value + 24.0) % 4.0 == 0.0 && *value >= -24.0), "{steering:?}");
    assert_eq!(steering.iter().sum::<f64>(), 0.0);
    let most = steering.iter().fold(0.0f64, |a, b| a.max(*b));
    assert!(most > 0.0);
    assert_close(&[largest], &[(most + 24.0) / 24.0], 1e-6, "the largest load over the mean");
    // No other gradient changes.
    let others: Vec<_> = with_bias.into_iter().filter(|gradient| !is_bias(&gradient)).collect();
    assert_eq!(others, gradient);
}

/// Returns the loss of one batch, the gradients of the second block, and the ratio of the largest load to the mean in
/// that block.
fn train(moe: MoeConfig) -> (f64, Vec<Vec<f64>>, f64) {
    let config = config(moe);
    let device = Device::flex().autodiff();
    let decoder = decoder(&config, 3, &device);
    let ids = |shift: i64| {
        let ids: Vec<i64> = (0..12).map(|i| (i * 7 + shift) % 37).collect();
        Tensor::<1, Int>::from_data(ids.as_slice(), &device).reshape([2, 6])
    };
    let records = Records::default();
    let context = Context::training(Key::new(1), 0, 0.0).recording(&records);
    let loss = decoder::loss(&decoder, ids(0), ids(7), 1.0 / 12.0, &context);
    let grads = loss.clone().backward();
    let mut gradient = Gradient(&grads, Vec::new());
    decoder.layers[1].visit(&mut gradient);
    let is_load = |record: &Record| record.place == "layers.1.ffn" && record.name == "largest_load";
    let load = records.take().into_iter().find(is_load).expect("a record");
    (values(loss)[0], gradient.1, values(load.value)[0])
}

/// Returns the loss and the gradient of one batch with this coefficient of the balance loss.
fn losses(router_aux_loss_coef: f64) -> (f64, Vec<f64>) {
    let (loss, gradients, _) = train(MoeConfig { router_aux_loss_coef, ..experts() });
    (loss, gradients.concat())
}

/// The gradients of a module's parameters.
struct Gradient<'a>(&'a burn::tensor::Gradients, Vec<Vec<f64>>);

impl ModuleVisitor for Gradient<'_> {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.1.push(values(param.val().grad(self.0).expect("a gradient")));
    }
}

/// The loss of an even load is `experts_per_token`; these random weights give slightly more.
#[test]
fn the_balance_loss_is_added_with_its_weight() {
    let (plain, gradient) = losses(0.0);
    let (one, with_one) = losses(1.0);
    let (two, with_two) = losses(2.0);
    let balance = one - plain;
    assert!((2.0..3.5).contains(&balance), "{balance}");
    assert!(((two - plain) / balance - 2.0).abs() < 1e-4);
    let twice: Vec<_> = with_one.iter().zip(&gradient).map(|(one, none)| 2.0 * one - none).collect();
    assert_ne!(with_one, gradient);
    assert_close(&with_two, &twice, 1e-4, "gradient");
}

/// Compares balancing each layer with balancing all layers together. With one layer, loss and gradients are the same.
/// With two layers, the joint loss is smaller, because the layers prefer different experts.
#[test]
fn the_balance_can_span_all_layers() {
    let with = |over: BalanceOver, router_aux_loss_coef: f64, dense_layers: &[usize]| {
        let moe = MoeConfig { router_aux_loss_over: Some(over), router_aux_loss_coef, ..experts() };
        let (loss, gradients, _) = train(MoeConfig { dense_layers: dense_layers.to_vec(), ..moe });
        (loss, gradients.concat())
    };
    let (each, all) = (BalanceOver::EachLayer, BalanceOver::AllLayers);
    let (one, one_of_all) = (with(each, 1.0, &[0]), with(all, 1.0, &[0]));
    assert_close(&[one_of_all.0], &[one.0], 1e-6, "loss of one layer");
    assert_close(&one_of_all.1, &one.1, 1e-5, "gradient of one layer");
    let plain = with(all, 0.0, &[]);
    assert_eq!(plain, with(each, 0.0, &[]));
    let [of_each, of_all] = [each, all].map(|over| with(over, 1.0, &[]).0 - plain.0);
    // Even load makes 2, the number of experts of a token.
    assert!(2.0 - 1e-4 < of_all && of_all < of_each - 1e-3, "{of_all} and {of_each}");
    let expected = balance_of_all_layers();
    assert!((of_all - expected).abs() < 1e-4, "{of_all}, and {expected} by hand");
}

/// Computes transformers' `load_balancing_loss_func` for the batch of [`train`], without the layers' code: from the
/// logits of all layers' tokens, as if they were the tokens of one layer.
fn balance_of_all_layers() -> f64 {
    let config = config(experts());
    let device = Device::flex();
    let decoder = decoder(&config, 3, &device);
    let inputs = Arc::new(Mutex::new(BTreeMap::new()));
    let seen = inputs.clone();
    let probe = Probe::new(move |at: Seen<'_>| {
        if at.place.ends_with(".ffn") && at.name == "input" {
            seen.lock().expect("a map").insert(at.place.to_owned(), values(at.values));
        }
    });
    let ids: Vec<i64> = (0..12).map(|i| i * 7 % 37).collect();
    let ids = Tensor::<1, Int>::from_data(ids.as_slice(), &device).reshape([2, 6]);
    decoder::hidden(&decoder, ids, &Context::evaluation().probed(Some(probe)));
    let inputs = inputs.lock().expect("a map").clone();
    assert_eq!(inputs.len(), 2, "layers");
    let (mut loads, mut probabilities, mut tokens) = ([0.0; 4], [0.0; 4], 0.0);
    for (layer, input) in decoder.layers.iter().zip(inputs.values()) {
        let mut router = RouterOf(Vec::new());
        layer.visit(&mut router);
        for x in input.chunks(8) {
            let logit =
                |expert: usize| x.iter().enumerate().map(|(i, x)| x * router.0[i * 4 + expert]).sum::<f64>();
            let powers = [0, 1, 2, 3].map(|expert| logit(expert).exp());
            let mut order = [0, 1, 2, 3];
            order.sort_by(|a, b| powers[*b].total_cmp(&powers[*a]));
            order[..2].iter().for_each(|expert| loads[*expert] += 1.0);
            (0..4).for_each(|expert| probabilities[expert] += powers[expert] / powers.iter().sum::<f64>());
            tokens += 1.0;
        }
    }
    4.0 * (0..4).map(|expert| loads[expert] / tokens * (probabilities[expert] / tokens)).sum::<f64>()
}

/// Collects the weights of a layer's router, `[8, 4]`.
struct RouterOf(Vec<f64>);

impl ModuleVisitor for RouterOf {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        if param.lazy_shape().dims::<D>()[..] == [8, 4] {
            self.0 = values(param.val());
        }
    }
}

#[test]
fn counts_are_of_the_experts_of_a_token() {
    let moe = MoeConfig { shared_expert_d_ff: Some(7), dense_layers: vec![1], ..experts() };
    let config = config(moe);
    let layer = layer(&config);
    let (router, expert, shared) = (8 * 4, 3 * 8 * 6, 3 * 8 * 7);
    assert_eq!(Module::num_params(&layer), router + 4 * expert + shared);
    assert_eq!(layer.active_parameters(), router + 2 * expert + shared);
    assert_eq!(layer.flops_per_token(100), 6.0 * layer.active_parameters() as f64);
    // The second block is dense.
    let decoder = decoder(&config, 1, &Device::flex());
    let dense = SwiGlu::new(LayerInit::for_block(&config, 1, Key::new(1), &Device::flex()));
    let difference = decoder.layers[0].num_params() - decoder.layers[1].num_params();
    assert_eq!(difference, Module::num_params(&layer) - Module::num_params(&dense));
}

#[test]
fn sizes_that_cannot_be_are_refused() {
    let said = |moe: MoeConfig| config(moe).validate().unwrap_err().to_string();
    config(experts()).validate().expect("can be");
    assert_eq!(said(MoeConfig::default()), "model.moe.experts = 0: must be at least 1");
    let message = said(MoeConfig { experts_per_token: 5, ..experts() });
    assert_eq!(message, "model.moe.experts_per_token = 5: must be at most 4");
    assert!(said(MoeConfig { expert_d_ff: 0, ..experts() }).contains("model.moe.expert_d_ff = 0"));
    assert!(said(MoeConfig { shared_expert_d_ff: Some(0), ..experts() }).contains("shared_expert_d_ff = 0"));
    let message = said(MoeConfig { dense_layers: vec![2], ..experts() });
    assert_eq!(message, "model.moe.dense_layers = 2: must be at most 1");
    assert!(said(MoeConfig { router_aux_loss_coef: -1.0, ..experts() }).contains("zero or more"));
    let without = ModelConfig { moe: None, ..config(experts()) };
    assert!(without.validate().unwrap_err().to_string().contains("needs the section [model.moe]"));
    let device = Device::flex();
    let error = Decoder::new(&Layers::default(), &without, Key::new(0), &device).unwrap_err();
    assert!(error.to_string().contains("needs the section [model.moe]"), "{error}");
    let unused = ModelConfig { feed_forward: "swiglu".to_owned(), ..config(experts()) };
    let message = unused.validate().unwrap_err().to_string();
    assert_eq!(message, "[model.moe] is set, but model.feed_forward is \"swiglu\": set it to \"moe\"");
}
