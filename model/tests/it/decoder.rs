//! The decoder as a whole: counts, initial weights, and the initial loss.

use burn::module::{Module, ModuleVisitor, Param};
use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_model::decoder::{self, Decoder};
use kiln_model::layers::{GeGlu, Layer, Layers, Linear};
use kiln_model::{Context, Key, ModelConfig, PRESETS};

use crate::ops_support::decoder;

pub fn tiny(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 50,
        d_model: 16,
        layers: 2,
        heads: 4,
        kv_heads: 2,
        d_ff: 24,
        tie_embeddings: tied,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

/// Counts elements without initialising any.
#[derive(Default)]
struct Count(usize);

impl ModuleVisitor for Count {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        assert!(!param.is_initialized(), "counting must not allocate the model");
        self.0 += param.lazy_shape().num_elements();
    }
}

#[test]
fn presets_have_their_published_parameter_counts() {
    let known = [8_959_232, 89_884_800, 302_558_208, 1_100_048_384, 6_738_415_616];
    for (name, known) in PRESETS.into_iter().zip(known) {
        let config = ModelConfig::preset(name).expect("a preset");
        config.validate().expect("presets are valid");
        let mut count = Count::default();
        decoder(&config, 0, &Device::flex()).visit(&mut count);
        let counted = Decoder::count_parameters(&Layers::default(), &config).expect("built-in layers");
        assert_eq!((counted, count.0), (known, known), "{name}");
    }
}

#[test]
fn flops_count_what_multiplies() {
    let config = ModelConfig::preset("10m").expect("a preset");
    let flops = |config: &ModelConfig| decoder(config, 0, &Device::flex()).flops_per_token(256);
    let tied = flops(&config);
    assert_eq!(tied, 6.0 * 8_959_232.0 + 12.0 * 10.0 * 256.0 * 256.0);
    let untied = ModelConfig { tie_embeddings: false, ..config.clone() };
    // The second matrix is multiplied with; the table, which is only looked up, does not count.
    assert_eq!(flops(&untied), tied);
}

#[test]
#[should_panic(expected = "model.feed_forward = \"swiglu\" is a layer already")]
fn a_name_stands_for_one_layer() {
    let _ = Layers::default().feed_forward("swiglu", |init| Ok(GeGlu::new(init)));
}

/// A mixture that sends a token to one expert.
#[derive(Module, Debug)]
struct Experts {
    router: Linear,
    experts: Vec<Linear>,
}

impl Layer for Experts {
    fn forward(&self, x: Tensor<3>, _context: &Context) -> Tensor<3> {
        self.experts[0].forward(x)
    }

    fn active_parameters(&self) -> usize {
        self.router.num_params() + self.experts[0].num_params()
    }
}

#[test]
fn experts_count_as_often_as_a_token_meets_them() {
    let config = tiny(false);
    let d = config.d_model;
    let layers = Layers::default().feed_forward("experts", |init| {
        let d = init.model.d_model;
        let linear = |width| Linear::new(d, width, 0.1, init.key, init.device);
        Ok(Experts { router: linear(8), experts: (0..8).map(|_| linear(d)).collect() })
    });
    let config = ModelConfig { feed_forward: "experts".to_owned(), ..config };
    let decoder = Decoder::new(&layers, &config, Key::new(0), &Device::flex()).expect("registered layers");
    let idle = config.layers * 7 * d * d;
    // The embedding table.
    let lookup = if config.tie_embeddings { 0 } else { config.vocab_size * d };
    let attention = 12 * config.layers * config.d_model * 32;
    let active = decoder.num_params() - idle - lookup;
    assert_eq!(decoder.flops_per_token(32), (6 * active + attention) as f64);
}

/// All parameters of a decoder, one after the other.
#[derive(Default)]
struct Values(Vec<Vec<f32>>);

impl ModuleVisitor for Values {
    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        self.0.push(param.val().into_data().try_to_vec().expect("f32"));
    }
}

fn values(seed: u64, threads: usize) -> Vec<Vec<f32>> {
    let pool = rayon::ThreadPoolBuilder::new().num_threads(threads).build().expect("a pool");
    pool.install(|| {
        let mut values = Values::default();
        decoder(&tiny(false), seed, &Device::flex()).visit(&mut values);
        values.0
    })
}

#[test]
fn initial_weights_depend_on_the_seed_alone() {
    assert_eq!(values(1, 1), values(1, 3));
    let (one, two) = (values(1, 1), values(2, 1));
    // Norms start at one for every seed; matrices differ.
    assert!(one.iter().zip(&two).all(|(a, b)| (a == b) == a.iter().all(|x| *x == 1.0)));
    // No two matrices share their values.
    let firsts: Vec<f32> = one.iter().map(|values| values[0]).filter(|x| *x != 1.0).collect();
    let mut distinct = firsts.clone();
    distinct.sort_by(f32::total_cmp);
    distinct.dedup();
    assert_eq!(firsts.len(), distinct.len());
}

#[test]
fn normal_values_have_the_moments_they_should() {
    let values = Key::new(7).fork("moments").normal_vec(200_000, 2.0);
    let n = values.len() as f64;
    let moment = |power: i32| values.iter().map(|x| f64::from(*x).powi(power)).sum::<f64>() / n;
    // Four standard errors of each moment.
    assert!(moment(1).abs() < 4.0 * 2.0 / n.sqrt());
    assert!((moment(2) - 4.0).abs() < 4.0 * 4.0 * (2.0 / n).sqrt());
    assert!((moment(4) / 48.0 - 1.0).abs() < 4.0 * (96.0 / 9.0 / n).sqrt());
}

#[test]
fn normal_values_are_those_of_box_and_muller() {
    let key = Key::new(5).fork("formula");
    let values = key.normal_vec(40_000, 0.5);
    for (i, value) in values.into_iter().enumerate() {
        let (bits, normal) = (key.at(i as u64), key.normal(i as u64));
        assert_eq!(value, (normal * 0.5) as f32, "{i}");
        let radius = ((bits >> 32) as f64 + 1.0) / 2f64.powi(32);
        let turns = (bits & 0xFFFF_FFFF) as f64 / 2f64.powi(32);
        let formula = (-2.0 * radius.ln()).sqrt() * (std::f64::consts::TAU * turns).cos();
        assert!((normal - formula).abs() < 1e-14, "{i}: {normal}, {formula}");
    }
}

#[test]
fn keys_of_different_names_are_different() {
    let key = Key::new(0);
    assert_ne!(key.fork("a"), key.fork("b"));
    assert_ne!(key.fork("a").fork("b"), key.fork("b").fork("a"));
    assert_ne!(key.fork_index(0), key.fork_index(1));
    assert_ne!(key.fork_index(0), key);
    assert!((0..1000).all(|i| (0.0..1.0).contains(&key.uniform(i))));
}

#[test]
fn an_untrained_decoder_is_uniform_over_tokens() {
    for tied in [true, false] {
        let config = tiny(tied);
        let device = Device::flex();
        let model = decoder(&config, 3, &device);
        let ids = |from: i32| -> Tensor<2, Int> {
            let ids: Vec<i32> = (0..20).map(|i| (from + 7 * i) % 50).collect();
            Tensor::from_data(TensorData::new(ids, [2, 10]), &device)
        };
        let loss = decoder::loss(&model, ids(0), ids(1), 1.0 / 20.0, &Context::evaluation());
        let loss = loss.into_scalar::<f32>();
        assert!((loss - 50f32.ln()).abs() < 0.05, "tied {tied}: {loss}");
        // The loss agrees with the logits.
        let logits = decoder::logits(&model, ids(0)).reshape([20, 50]);
        let targets = ids(1).reshape([20, 1]);
        let log_p = burn::tensor::activation::log_softmax(logits, 1).gather(1, targets);
        let from_logits = -log_p.mean().into_scalar::<f32>();
        assert!((loss - from_logits).abs() < 1e-5 * loss, "tied {tied}: {loss} {from_logits}");
    }
}

#[test]
fn later_tokens_do_not_change_earlier_logits() {
    let device = Device::flex();
    let model = decoder(&tiny(true), 3, &device);
    let logits = |last: i32| {
        let ids = TensorData::new(vec![1, 2, 3, last], [1, 4]);
        let logits = decoder::logits(&model, Tensor::from_data(ids, &device));
        logits.narrow(1, 0, 3).into_data().try_to_vec::<f32>().expect("f32")
    };
    assert_eq!(logits(4), logits(40));
}
