//! Features of layers that other models' weights need: biases, norms of queries and keys, heads of any width. Each is
//! compared with plain burn and with finite differences.

use std::sync::{Arc, Mutex};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{
    Device, Tensor,
    activation::{gelu, relu, silu},
};
use kiln_model::layers::{
    AnyLayer, Attention, Block, GeGlu, LayerInit, Layers, ParallelBlock, SquaredRelu, SwiGlu, Wrapper,
    constant_parameter,
};
use kiln_model::ops::{
    RotaryFrequencies, causal_attention_reference, linear_reference, rms_norm_reference, rotary_reference,
};
use kiln_model::{AttentionBias, Context, Decoder, Key, Layer, ModelConfig, PARALLEL_RESIDUAL, RopeScaling};

use serde::Deserialize;

use crate::config::parameters_of;
use crate::ops_support::*;

pub const BATCH: usize = 2;
pub const SEQ: usize = 5;

/// Returns a model of width 8 with heads of width 6.
fn config(attention_bias: AttentionBias, qk_norm: bool) -> ModelConfig {
    ModelConfig {
        d_model: 8,
        heads: 4,
        kv_heads: 2,
        head_dim: Some(6),
        d_ff: 10,
        attention_bias,
        qk_norm,
        rope_theta: 50.0,
        rope_scaling: Some(RopeScaling::Linear { factor: 2.0 }),
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

/// Sizes of a module's parameters, in order.
#[derive(Default)]
struct Sizes(Vec<usize>);

impl ModuleVisitor for Sizes {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.lazy_shape().num_elements());
    }
}

/// Replaces a module's parameters by flat tensors, in order.
struct Substitute<'a>(std::slice::Iter<'a, Tensor<1>>);

impl ModuleMapper for Substitute<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let shape: [usize; D] = param.lazy_shape().dims();
        let values = self.0.next().expect("a tensor for every parameter").clone();
        Param::initialized(param.id, values.reshape(shape))
    }
}

/// Converts a layer to an operation on its input and its parameters.
pub fn operation<L: Layer>(layer: &L, d_model: usize) -> impl Operation + Sync {
    move |t: &[Tensor<1>]| {
        let layer = layer.clone().map(&mut Substitute(t[1..].iter()));
        let x = t[0].clone().reshape([BATCH, SEQ, d_model]);
        layer.forward(x, &Context::evaluation()).reshape([BATCH * SEQ * d_model])
    }
}

pub fn sizes<L: Layer>(layer: &L, d_model: usize) -> Vec<usize> {
    let mut sizes = Sizes(vec![BATCH * SEQ * d_model]);
    layer.visit(&mut sizes);
    sizes.0
}

/// Takes a matrix and, if there is one, a bias from the front of `parameters`, and applies them to `x`.
fn project(
    x: Tensor<3>,
    parameters: &mut std::slice::Iter<'_, Tensor<1>>,
    d_out: usize,
    bias: bool,
) -> Tensor<3> {
    let [_, _, d_in] = x.dims();
    let mut next = || parameters.next().expect("a parameter").clone();
    let weight = next().reshape([d_in, d_out]);
    linear_reference(x, weight, bias.then(next))
}

fn attention_reference(config: &ModelConfig, t: &[Tensor<1>]) -> Tensor<1> {
    let (d, head_dim) = (config.d_model, config.head_dim());
    let [qkv_bias, o_bias] = match config.attention_bias {
        AttentionBias::None => [false, false],
        AttentionBias::Qkv => [true, false],
        AttentionBias::All => [true, true],
    };
    let x = t[0].clone().reshape([BATCH, SEQ, d]);
    let mut parameters = t[1..].iter();
    let q = project(x.clone(), &mut parameters, config.heads * head_dim, qkv_bias);
    let k = project(x.clone(), &mut parameters, config.kv_heads * head_dim, qkv_bias);
    let v = project(x, &mut parameters, config.kv_heads * head_dim, qkv_bias);
    let o_parameters = parameters.as_slice();
    let mut norms = o_parameters[1 + usize::from(o_bias)..].iter();
    let frequencies = RotaryFrequencies { theta: config.rope_theta, scaling: config.rope_scaling };
    let mut rotated = |x: Tensor<3>, heads: usize| {
        let mut x = x.reshape([BATCH, SEQ, heads, head_dim]);
        if config.qk_norm {
            let weight = norms.next().expect("a norm").clone();
            x = rms_norm_reference(x, weight, config.norm_eps);
        }
        rotary_reference(x, frequencies, 0)
    };
    let (q, k) = (rotated(q, config.heads), rotated(k, config.kv_heads));
    let v = v.reshape([BATCH, SEQ, config.kv_heads, head_dim]);
    let mixed = causal_attention_reference(q, k, v, config.window);
    let mixed = mixed.reshape([BATCH, SEQ, config.heads * head_dim]);
    project(mixed, &mut o_parameters.iter(), d, o_bias).reshape([BATCH * SEQ * d])
}

#[test]
fn attention_with_all_options_matches_plain_burn() {
    for bias in [AttentionBias::None, AttentionBias::Qkv, AttentionBias::All] {
        for qk_norm in [false, true] {
            let config = config(bias, qk_norm);
            let attention = Attention::new(LayerInit::for_block(&config, 0, Key::new(1), &Device::flex()));
            let reference = |t: &[Tensor<1>]| attention_reference(&config, t);
            let sizes = sizes(&attention, config.d_model);
            assert_matches(operation(&attention, config.d_model), reference, &sizes, 2e-5);
        }
    }
}

/// The window is shorter than the sequence, and applies to the blocks that the pattern selects.
#[test]
fn attention_in_a_window_matches_plain_burn() {
    for (index, window) in [(0, Some(2)), (1, None)] {
        let window_pattern = Some("wf".to_owned());
        let config = ModelConfig { window: Some(2), window_pattern, ..config(AttentionBias::None, true) };
        let attention = Attention::new(LayerInit::for_block(&config, index, Key::new(1), &Device::flex()));
        let seen = ModelConfig { window, ..config.clone() };
        let reference = |t: &[Tensor<1>]| attention_reference(&seen, t);
        let sizes = sizes(&attention, config.d_model);
        assert_matches(operation(&attention, config.d_model), reference, &sizes, 2e-5);
    }
}

#[test]
fn attention_with_all_options_has_its_gradients() {
    let config = config(AttentionBias::All, true);
    let attention = Attention::new(LayerInit::for_block(&config, 0, Key::new(1), &Device::flex()));
    let sizes = sizes(&attention, config.d_model);
    assert_finite_differences(operation(&attention, config.d_model), &sizes);
}

/// Compares a feed-forward layer with biases to `inner`, a function of the projections of the layer's input that
/// `inputs` names.
fn check_feed_forward<L: Layer>(
    make: impl Fn(LayerInit) -> L,
    inputs: usize,
    inner: impl Fn(Vec<Tensor<3>>) -> Tensor<3>,
) {
    let config = ModelConfig { feed_forward_bias: true, ..config(AttentionBias::None, false) };
    let (d, ff) = (config.d_model, config.d_ff);
    let layer = make(LayerInit::for_block(&config, 0, Key::new(1), &Device::flex()));
    let sizes = sizes(&layer, d);
    let reference = |t: &[Tensor<1>]| {
        let x = t[0].clone().reshape([BATCH, SEQ, d]);
        let mut parameters = t[1..].iter();
        let projected = (0..inputs).map(|_| project(x.clone(), &mut parameters, ff, true)).collect();
        project(inner(projected), &mut parameters, d, true).reshape([BATCH * SEQ * d])
    };
    assert_matches(operation(&layer, d), reference, &sizes, 1e-5);
    assert_finite_differences(operation(&layer, d), &sizes);
}

#[test]
fn feed_forward_layers_match_plain_burn() {
    check_feed_forward(SwiGlu::new, 2, |t| silu(t[0].clone()) * t[1].clone());
    check_feed_forward(GeGlu::new, 2, |t| gelu(t[0].clone()) * t[1].clone());
    check_feed_forward(SquaredRelu::new, 1, |t| relu(t[0].clone()).powi_scalar(2));
}

#[test]
fn a_parallel_block_shares_one_input() {
    let (config, device) = (config(AttentionBias::Qkv, false), Device::flex());
    let init = LayerInit::for_block(&config, 0, Key::new(1), &device);
    let (attention, ffn) = (Attention::new(init.fork("attention")), SwiGlu::new(init.fork("ffn")));
    let block = ParallelBlock::new(init, AnyLayer::new(attention), AnyLayer::new(ffn));
    let d = config.d_model;
    let reference = |t: &[Tensor<1>]| {
        let block = block.clone().map(&mut Substitute(t[1..].iter()));
        let x = t[0].clone().reshape([BATCH, SEQ, d]);
        let context = Context::evaluation();
        let mixed = block.attention.forward(block.norm.forward(x.clone()), &context);
        let fed = block.ffn.forward(block.norm.forward(x.clone()), &context);
        (x + mixed + fed).reshape([BATCH * SEQ * d])
    };
    let sizes = sizes(&block, d);
    assert_matches(operation(&block, d), reference, &sizes, 1e-5);
    assert_finite_differences(operation(&block, d), &sizes);

    // The block of that name uses the layers that the configuration names.
    let named = ModelConfig { block: Some(PARALLEL_RESIDUAL.to_owned()), ..config.clone() };
    let (layers, init) = (Layers::default(), LayerInit { model: &named, ..init });
    let made = layers.make_block(init).expect("built-in layers");
    let values = |layer: &dyn Fn(Tensor<3>) -> Tensor<3>| values(layer(Tensor::ones([1, 3, d], &device)));
    let evaluation = Context::evaluation();
    let expected = values(&|x| block.forward(x, &evaluation));
    assert_eq!(values(&|x| made.forward(x, &evaluation)), expected);
    assert_eq!(made.flops_per_token(32), block.flops_per_token(32));
    assert!(layers.missing(&named).is_empty());
    let squared = ModelConfig { feed_forward: "squared_relu".to_owned(), ..named.clone() };
    let made = layers.make_block(LayerInit { model: &squared, ..init }).expect("built-in layers");
    assert_ne!(values(&|x| made.forward(x, &evaluation)), expected);
    let unknown = ModelConfig { feed_forward: "mine".to_owned(), ..named };
    assert_eq!(layers.missing(&unknown), [("feed_forward", "mine")]);
}

/// Doubles the result of a layer and adds a weight.
#[derive(Module, Debug)]
struct Doubled {
    added: Param<Tensor<1>>,
}

impl Wrapper for Doubled {
    fn forward(&self, layer: impl Fn(Tensor<3>) -> Tensor<3>, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        layer(x) * 2.0 + self.added.val().unsqueeze()
    }
}

#[test]
fn wrapped_layers_keep_their_names() {
    let (config, device) = (config(AttentionBias::None, false), Device::flex());
    let d = config.d_model;
    let layers = Layers::default().block_around("doubled", move |init, attention, ffn| {
        let added = constant_parameter([d], 1.0, init.device);
        Ok(Block::new(init, attention, ffn.wrapped(Doubled { added })))
    });
    let named = ModelConfig { block: Some("doubled".to_owned()), ..config.clone() };
    let make = |model| {
        let block = layers.make_block(LayerInit::for_block(model, 0, Key::new(1), &device));
        block.expect("a block of this program")
    };
    let (stock, doubled) = (make(&config), make(&named));
    let mut expected = parameters_of(&stock);
    expected.push(("ffn.added".to_owned(), d));
    assert_eq!(parameters_of(&doubled), expected);
    assert_eq!(doubled.active_parameters(), stock.active_parameters() + d);
    assert_eq!(doubled.flops_per_token(8), stock.flops_per_token(8) + 6.0 * d as f64);
    let values =
        |block: &AnyLayer| values(block.forward(Tensor::ones([1, 3, d], &device), &Context::evaluation()));
    assert_ne!(values(&doubled), values(&stock));

    // A program without the block lacks it, and the layers that it is made of.
    assert!(layers.missing(&named).is_empty());
    let mine = ModelConfig { feed_forward: "mine".to_owned(), ..named };
    assert_eq!(layers.missing(&mine), [("feed_forward", "mine")]);
    assert_eq!(Layers::default().missing(&mine), [("block", "doubled"), ("feed_forward", "mine")]);
}

#[derive(Deserialize, Debug, PartialEq)]
#[serde(default, deny_unknown_fields)]
struct Settings {
    rank: usize,
}

impl Default for Settings {
    fn default() -> Self {
        Settings { rank: 1 }
    }
}

/// Reads the settings of the block `around` and of the feed-forward layer `inside` from `extra`, as JSON.
fn settings(extra: &str) -> Result<[usize; 2], String> {
    let read = Arc::new(Mutex::new([0; 2]));
    let (of_block, of_layer) = (read.clone(), read.clone());
    let layers = Layers::default()
        .block_around("around", move |init, attention, ffn| {
            of_block.lock().expect("no panic")[0] = init.fork("inner").extra::<Settings>()?.rank;
            Ok(Block::new(init, attention, ffn))
        })
        .feed_forward("inside", move |init| {
            of_layer.lock().expect("no panic")[1] = init.extra::<Settings>()?.rank;
            Ok(SwiGlu::new(init))
        });
    let model = ModelConfig {
        block: Some("around".to_owned()),
        feed_forward: "inside".to_owned(),
        extra: serde_json::from_str(extra).expect("JSON"),
        ..config(AttentionBias::None, false)
    };
    let made = layers.make_block(LayerInit::for_block(&model, 2, Key::new(1), &Device::flex()));
    made.map_err(|error| error.to_string())?;
    let read = *read.lock().expect("no panic");
    Ok(read)
}

#[test]
fn each_part_reads_its_own_table() {
    for (extra, expected) in [
        ("{}", [1, 1]),
        (r#"{"rank": 3}"#, [3, 3]),
        (r#"{"around": {"rank": 3}}"#, [3, 1]),
        (r#"{"around": {"rank": 3}, "inside": {"rank": 4}, "full": {}}"#, [3, 4]),
    ] {
        assert_eq!(settings(extra), Ok(expected), "{extra}");
    }
    for (extra, expected) in [
        (r#"{"ranks": 3}"#, "model.extra.ranks: unknown field `ranks`, expected `rank` (layers.2.ffn)"),
        (
            r#"{"arround": {"rank": 3}}"#,
            "model.extra.arround: unknown field `arround`, expected `rank` (layers.2.ffn)",
        ),
        (
            r#"{"around": {"rank": -3}}"#,
            "model.extra.around.rank: invalid value: integer `-3`, expected usize (layers.2)",
        ),
        (
            r#"{"inside": {}, "rank": 3}"#,
            "model.extra.rank: not a table of a part of this model, `around`, `full`, `inside`, although \
             [model.extra] has such tables (layers.2.ffn)",
        ),
    ] {
        assert_eq!(settings(extra), Err(expected.to_owned()), "{extra}");
    }
}

/// The block reads `rank`, and the feed-forward layer nothing.
#[test]
fn settings_that_no_layer_reads_are_refused() {
    #[derive(serde::Deserialize)]
    #[expect(dead_code, reason = "only the names of the fields are read")]
    struct Settings {
        rank: usize,
    }
    let layers = Layers::default().block_around("around", |init, attention, ffn| {
        init.extra::<Settings>()?;
        Ok(Block::new(init, attention, ffn))
    });
    let refused = |extra: &str, block: Option<&str>| {
        let extra = serde_json::from_str(extra).expect("JSON");
        let model =
            ModelConfig { block: block.map(str::to_owned), extra, ..config(AttentionBias::None, false) };
        let made = Decoder::new(&layers, &model, Key::new(1), &Device::flex());
        made.map(|_| ()).map_err(|error| error.to_string())
    };
    let around = Some("around");
    assert_eq!(refused(r#"{"rank": 2}"#, around), Ok(()));
    assert_eq!(refused(r#"{"around": {"rank": 2}}"#, around), Ok(()));
    for (extra, block, expected) in [
        (r#"{"rank": 2}"#, None, "model.extra.rank: no part of this program reads this setting: remove"),
        (
            r#"{"rank": 2, "rang": 3}"#,
            around,
            "model.extra.rang: no part of this program reads this setting, only `rank`",
        ),
        (r#"{"around": {"rank": 2, "rang": 3}}"#, around, "model.extra.around.rang: no part"),
        (r#"{"around": {"rank": 2}, "swiglu": {"rank": 3}}"#, around, "model.extra.swiglu.rank: no part"),
    ] {
        let message = refused(extra, block).expect_err("refused");
        assert!(message.starts_with(expected), "{message}");
    }
}
