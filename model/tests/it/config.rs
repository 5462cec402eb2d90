//! Valid and invalid shapes, and their parameter counts.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Tensor};
use kiln_model::decoder::Decoder;
use kiln_model::{AttentionBias, Layers, ModelConfig, ModelConfigError, RopeScaling};

use crate::ops_support::decoder;

fn base() -> ModelConfig {
    ModelConfig {
        vocab_size: 50,
        d_model: 16,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        d_ff: 24,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

fn llama3(factor: f64, low_freq_factor: f64, high_freq_factor: f64) -> Option<RopeScaling> {
    let original_context = 8192;
    Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context })
}

/// Names and sizes of parameters.
#[derive(Default)]
struct Parameters {
    path: Vec<String>,
    found: Vec<(String, usize)>,
}

impl ModuleVisitor for Parameters {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.found.push((self.path.join("."), param.lazy_shape().num_elements()));
    }

    fn enter_module(&mut self, name: &str, container_type: &str) {
        // Variants of enums are not part of names.
        if !container_type.starts_with("Enum:") {
            self.path.push(name.to_owned());
        }
    }

    fn exit_module(&mut self, _name: &str, container_type: &str) {
        if !container_type.starts_with("Enum:") {
            self.path.pop();
        }
    }
}

/// Returns names and sizes of the parameters of `module`.
pub fn parameters_of(module: &impl Module) -> Vec<(String, usize)> {
    let mut parameters = Parameters::default();
    module.visit(&mut parameters);
    parameters.found
}

fn parameters(config: &ModelConfig) -> Vec<(String, usize)> {
    parameters_of(&decoder(config, 0, &Device::flex()))
}

#[test]
fn counts_are_those_of_the_decoder() {
    for attention_bias in [AttentionBias::None, AttentionBias::Qkv, AttentionBias::All] {
        for head_dim in [None, Some(2), Some(10)] {
            for bits in 0..8 {
                let [qk_norm, feed_forward_bias, tie_embeddings] = [0, 1, 2].map(|bit| bits >> bit & 1 == 1);
                let config = ModelConfig {
                    attention_bias,
                    head_dim,
                    qk_norm,
                    feed_forward_bias,
                    tie_embeddings,
                    ..base()
                };
                config.validate().expect("a shape that can be");
                let total: usize = parameters(&config).iter().map(|(_, size)| size).sum();
                let count = Decoder::count_parameters(&Layers::default(), &config).expect("built-in layers");
                assert_eq!(count, total, "{config:?}");
            }
        }
    }
}

#[test]
fn new_parameters_have_the_names_they_should() {
    let plain: Vec<_> = parameters(&base()).into_iter().map(|(name, _)| name).collect();
    let config =
        ModelConfig { attention_bias: AttentionBias::Qkv, qk_norm: true, feed_forward_bias: true, ..base() };
    let all = parameters(&config).into_iter().map(|(name, _)| name);
    let new: Vec<_> = all.filter(|name| !plain.contains(name)).collect();
    let expected = [0, 1].map(|layer| {
        [
            "attention.q_proj.bias",
            "attention.k_proj.bias",
            "attention.v_proj.bias",
            "attention.q_norm.weight",
            "attention.k_norm.weight",
            "ffn.gate_proj.bias",
            "ffn.up_proj.bias",
            "ffn.down_proj.bias",
        ]
        .map(|name| format!("layers.{layer}.{name}"))
    });
    assert_eq!(new, expected.concat());
}

#[test]
fn flops_of_attention_follow_the_heads() {
    let config = ModelConfig { head_dim: Some(10), ..base() };
    let attention = |config: &ModelConfig| {
        let decoder = decoder(config, 0, &Device::flex());
        decoder.flops_per_token(32) - 6.0 * decoder.num_params() as f64
    };
    assert_eq!(attention(&config), 12.0 * (2 * 4 * 10 * 32) as f64);
    assert_eq!(attention(&base()), 12.0 * (2 * 16 * 32) as f64);
}

/// Returns whether each block of a model has a window.
fn windowed(config: &ModelConfig) -> Vec<bool> {
    (0..config.layers).map(|index| config.window_of(index).is_some()).collect()
}

#[test]
fn windows_follow_their_pattern() {
    let config = |layers, window, pattern: Option<&str>| ModelConfig {
        layers,
        window,
        window_pattern: pattern.map(str::to_owned),
        ..base()
    };
    assert_eq!(windowed(&config(3, None, None)), [false; 3]);
    assert_eq!(windowed(&config(3, Some(9), None)), [true; 3]);
    assert_eq!(config(3, Some(9), None).window_of(2), Some(9));
    let gemma3 = config(14, Some(9), Some("wwwwwf"));
    gemma3.validate().expect("can be");
    assert_eq!(
        windowed(&gemma3),
        [5, 11].into_iter().fold([true; 14], |mut all, i| {
            all[i] = false;
            all
        })
    );
    // And back, as short as possible.
    for (pattern, shortest) in
        [("wf", Some("wf")), ("ffww", Some("ffww")), ("wwww", None), ("wfwf", Some("wf"))]
    {
        let windowed = windowed(&config(7, Some(9), Some(pattern)));
        assert_eq!(ModelConfig::window_pattern_of(&windowed).as_deref(), shortest);
    }
    let said = |window, pattern| config(4, window, pattern).validate().expect_err("cannot be").to_string();
    assert_eq!(said(Some(0), None), "model.window = 0: must be at least 1");
    assert!(said(Some(usize::MAX), None).contains("must be at most 10000000"));
    for (window, pattern, problem) in [
        (None, "wf", "needs a window: set model.window"),
        (Some(1), "wF", "may only contain w"),
        (Some(1), "w€", "may only contain w"),
        (Some(1), "f", "must contain a w"),
        (Some(1), "", "must contain a w"),
        (Some(1), "wwwwf", "must have at most one letter per block"),
    ] {
        let said = said(window, Some(pattern));
        assert!(said.contains(&format!("model.window_pattern = \"{pattern}\": {problem}")), "{said}");
    }
}

#[test]
fn flops_of_attention_follow_the_window() {
    let attention = |window, pattern: Option<&str>| {
        let config = ModelConfig { window, window_pattern: pattern.map(str::to_owned), ..base() };
        let decoder = decoder(&config, 0, &Device::flex());
        decoder.flops_per_token(32) - 6.0 * decoder.num_params() as f64
    };
    let full = attention(None, None);
    assert_eq!(attention(Some(32), None), full);
    assert_eq!(attention(Some(8), None), full / 4.0);
    assert_eq!(attention(Some(8), Some("wf")), full * 5.0 / 8.0);
}

#[test]
fn shapes_that_cannot_be_are_refused() {
    let said = |config: ModelConfig| config.validate().expect_err("cannot be").to_string();
    let heads = |head_dim| ModelConfig { head_dim: Some(head_dim), ..base() };
    assert_eq!(said(heads(0)), "model.head_dim = 0: must be at least 1");
    assert_eq!(
        said(heads(5)),
        "model.head_dim = 5 is odd: rotary embeddings turn pairs, so the head width must be even"
    );
    let zero = ModelConfig { heads: 0, ..heads(6) };
    assert_eq!(zero.validate(), Err(ModelConfigError::Zero { key: "heads" }));
    // With an explicit head width, the number of heads need not divide the model's width.
    ModelConfig { d_model: 18, ..heads(6) }.validate().expect("can be");
    assert!(said(ModelConfig { d_model: 18, ..base() }).contains("not divisible by model.heads"));

    let scaled = |rope_scaling| said(ModelConfig { rope_scaling, ..base() });
    for factor in [0.5, 0.0, f64::NAN, f64::INFINITY] {
        let expected = format!("model.rope_scaling.factor = {factor}: must be at least 1, and finite");
        assert_eq!(scaled(Some(RopeScaling::Linear { factor })), expected);
        assert_eq!(scaled(llama3(factor, 1.0, 4.0)), expected);
    }
    for low in [0.0, -1.0, f64::NAN, f64::INFINITY] {
        assert!(scaled(llama3(8.0, low, 4.0)).starts_with("model.rope_scaling.low_freq_factor ="));
    }
    for high in [1.0, 0.5, f64::NAN, f64::INFINITY] {
        assert_eq!(
            scaled(llama3(8.0, 1.0, high)),
            format!(
                "model.rope_scaling.high_freq_factor = {high}: must be above \
                 rope_scaling.low_freq_factor, and finite"
            )
        );
    }
    let original_context = 0;
    let (factor, low_freq_factor, high_freq_factor) = (8.0, 1.0, 4.0);
    let zero = RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context };
    assert_eq!(scaled(Some(zero)), "model.rope_scaling.original_context = 0: must be at least 1");
    ModelConfig { rope_scaling: llama3(1.0, 1.0, 4.0), ..base() }.validate().expect("can be");
}
