//! Decoding with a cache gives the same logits as a pass over the whole sequence.

use burn::backend::Flex;
use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln_model::decoder::{self, Decoder, WithLoss};
use kiln_model::layers::{AnyLayer, CacheFull, Layers};
use kiln_model::{
    AttentionBias, Context, Key, KeyValueCache, Layer, LayerInit, ModelConfig, Modules, RopeScaling,
};

use crate::ops_support::*;

const VOCAB: usize = 50;

/// Returns a model whose weights are large enough for attention to matter.
fn config(kv_heads: usize) -> ModelConfig {
    ModelConfig {
        vocab_size: VOCAB,
        d_model: 16,
        layers: 3,
        heads: 4,
        kv_heads,
        d_ff: 24,
        init_std: 0.4,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

/// Returns models with windows of an odd length in every block or in every other block, and models with a window
/// longer than any text.
fn windowed() -> [ModelConfig; 4] {
    let windowed = |window, pattern: Option<&str>| ModelConfig {
        window: Some(window),
        window_pattern: pattern.map(str::to_owned),
        ..config(2)
    };
    [windowed(1, None), windowed(7, Some("wf")), windowed(8, Some("fww")), windowed(1_000, None)]
}

fn configs() -> [ModelConfig; 4] {
    let llama3 = RopeScaling::Llama3 {
        factor: 4.0,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_context: 16,
    };
    [
        config(4),
        config(2),
        ModelConfig {
            head_dim: Some(6),
            qk_norm: true,
            attention_bias: AttentionBias::All,
            tie_embeddings: false,
            ..config(1)
        },
        ModelConfig { rope_scaling: Some(llama3), rope_theta: 100.0, ..config(2) },
    ]
}

fn tokens(batch: usize, seq: usize, seed: u64) -> Tensor<2, Int> {
    let key = Key::new(seed);
    let ids: Vec<i32> = (0..(batch * seq) as u64).map(|i| (key.at(i) % VOCAB as u64) as i32).collect();
    Tensor::from_data(TensorData::new(ids, [batch, seq]), &Device::flex())
}

/// Asserts that the logits after each of `chunks` match the logits of one pass over the whole sequence, relative to
/// the largest logit.
fn assert_chunks_match(config: &ModelConfig, batch: usize, chunks: &[usize]) {
    assert_chunks_of_model_match(&decoder(config, 5, &Device::flex()), batch, chunks);
}

fn assert_chunks_of_model_match(model: &Decoder, batch: usize, chunks: &[usize]) {
    let seq = chunks.iter().sum();
    let tokens = tokens(batch, seq, 1);
    let whole = decoder::logits(model, tokens.clone());
    let cache = KeyValueCache::new(seq);
    let mut read = 0;
    for chunk in chunks {
        let new = tokens.clone().narrow(1, read, *chunk);
        let logits = decoder::next_logits(model, new, &cache).expect("room");
        read += chunk;
        assert_eq!(cache.len(), read);
        let expected = whole.clone().narrow(1, read - 1, 1);
        let what = format!("{model}, {batch} sequences, logits after {read} tokens");
        assert_close(&values(logits), &values(expected), 1e-5, &what);
    }
}

#[test]
fn cached_decoding_matches_the_whole_pass() {
    for config in configs() {
        for batch in [1, 3] {
            assert_chunks_match(&config, batch, &[1; 20]);
            assert_chunks_match(&config, batch, &[7, 1, 1, 5, 2, 16, 1]);
        }
    }
}

/// The sequence is longer than the kernel's tiles, which begin at different positions than in the whole pass.
#[test]
fn cached_decoding_matches_over_many_tiles() {
    for config in configs() {
        assert_chunks_match(&config, 2, &[190, 1, 1, 1, 50, 3, 170, 1]);
    }
}

/// Prompts are shorter than the window, as long as the window, and longer; chunks begin and end anywhere in the
/// window.
#[test]
fn cached_windows_match_the_whole_pass() {
    for config in windowed() {
        for batch in [1, 3] {
            assert_chunks_match(&config, batch, &[1; 20]);
            for prompt in [6, 7, 8, 9, 16, 17, 30] {
                assert_chunks_match(&config, batch, &[&[prompt][..], &[1; 10]].concat());
            }
            assert_chunks_match(&config, batch, &[7, 1, 1, 5, 2, 16, 1, 6, 7, 8, 3, 1, 1]);
            assert_chunks_match(&config, batch, &[2, 2, 2, 2, 2, 2, 2, 2, 2]);
        }
    }
}

/// A window at least as long as the cache's capacity keeps the same positions as full attention.
#[test]
fn a_full_window_has_the_bits_of_full_attention() {
    let logits = |window| {
        let model = decoder(&ModelConfig { window, ..config(2) }, 5, &Device::flex());
        let cache = KeyValueCache::new(20);
        let next = |new: Tensor<2, Int>| values(decoder::next_logits(&model, new, &cache).expect("room"));
        let logits = [next(tokens(1, 9, 1)), next(tokens(1, 1, 2)), next(tokens(1, 10, 3))];
        (logits, cache.num_bytes())
    };
    assert_eq!(logits(Some(20)), logits(None));
    assert_eq!(logits(Some(1000)), logits(None));
}

/// A layer with a window keeps only as many positions as the window has, however long the text is.
#[test]
fn a_cache_is_bounded_by_the_window() {
    // Keys and values of four bytes, in two heads of four.
    let bytes = |positions: [usize; 3]| 2 * 4 * 2 * 4 * positions.iter().sum::<usize>();
    for (pattern, positions) in [(None, [8, 8, 8]), (Some("wf"), [8, 300, 8]), (Some("fww"), [300, 8, 8])] {
        let window_pattern = pattern.map(str::to_owned);
        let model = ModelConfig { window: Some(8), window_pattern, ..config(2) };
        let model = decoder(&model, 5, &Device::flex());
        let cache = KeyValueCache::new(300);
        assert_eq!(cache.num_bytes(), 0);
        for (seed, chunk) in [200, 1, 1, 30, 1, 60, 1].into_iter().enumerate() {
            decoder::next_logits(&model, tokens(1, chunk, seed as u64), &cache).expect("room");
            assert_eq!(cache.num_bytes(), bytes(positions), "{pattern:?} after {} positions", cache.len());
        }
    }
}

#[test]
fn a_cleared_cache_starts_over() {
    for window in [None, Some(3)] {
        check_cleared_cache(&ModelConfig { window, ..config(2) });
    }
}

fn check_cleared_cache(config: &ModelConfig) {
    let model = decoder(config, 5, &Device::flex());
    let cache = KeyValueCache::new(8);
    let next = |seed| values(decoder::next_logits(&model, tokens(1, 5, seed), &cache).expect("room"));
    let first = next(1);
    cache.clear();
    assert!(cache.is_empty());
    let other = next(2);
    cache.clear();
    assert_eq!(next(1), first);
    assert_ne!(other, first);
    // Also for another batch size.
    cache.clear();
    let both = decoder::next_logits(&model, tokens(2, 3, 1), &cache).expect("room");
    assert_eq!(both.dims(), [2, VOCAB]);
}

#[test]
fn a_full_cache_says_so_and_stays_as_it_is() {
    let model = decoder(&config(2), 5, &Device::flex());
    let (cache, fresh) = (KeyValueCache::new(6), KeyValueCache::new(6));
    for cache in [&cache, &fresh] {
        decoder::next_logits(&model, tokens(1, 4, 1), cache).expect("room");
    }
    let refused = decoder::next_logits(&model, tokens(1, 3, 2), &cache).map(values);
    assert_eq!(refused, Err(CacheFull { filled: 4, new: 3, capacity: 6 }));
    let next = |cache| values(decoder::next_logits(&model, tokens(1, 2, 3), cache).expect("room"));
    assert_eq!(next(&cache), next(&fresh));
    assert_eq!(cache.len(), cache.capacity());
}

/// Provides every block twice, as a sharded decoder that recomputes blocks does.
struct Twice(Decoder);

impl Modules for Twice {
    fn num_blocks(&self) -> usize {
        self.0.num_blocks()
    }

    fn embed(&self, run: impl FnOnce(&kiln_model::layers::Embed) -> Tensor<3>) -> Tensor<3> {
        self.0.embed(run)
    }

    fn block(
        &self,
        index: usize,
        x: Tensor<3>,
        run: impl Fn(&AnyLayer, Tensor<3>) -> WithLoss + Send + Sync + 'static,
    ) -> WithLoss {
        run(&self.0.layers[index], x.clone());
        run(&self.0.layers[index], x)
    }

    fn head<const D: usize>(
        &self,
        x: Tensor<3>,
        run: impl FnOnce(&kiln_model::layers::Head, Option<&kiln_model::layers::Embed>, Tensor<3>) -> Tensor<D>,
    ) -> Tensor<D> {
        self.0.head(x, run)
    }
}

#[test]
fn a_block_that_runs_twice_leaves_the_same_cache() {
    let configs = [config(2)].into_iter().chain(windowed());
    let attention = configs.map(|config| decoder(&config, 5, &Device::flex()));
    for model in attention.chain([mixers()]) {
        let (once, twice) = (model.clone(), Twice(model));
        let caches = [KeyValueCache::new(40), KeyValueCache::new(40)];
        for (seed, chunk) in [1, 2, 3, 9, 1, 1, 4, 12, 1].into_iter().enumerate() {
            let tokens = tokens(1, chunk, seed as u64);
            let a = decoder::next_logits(&once, tokens.clone(), &caches[0]).expect("room");
            let b = decoder::next_logits(&twice, tokens, &caches[1]).expect("room");
            assert_eq!(values(a), values(b), "{} after {} positions", once, caches[0].len());
        }
    }
}

/// A layer with a state and rows: adds to each position a decaying sum over all positions up to it, and their largest
/// elements.
#[derive(burn::module::Module, Debug)]
struct Mixer {
    #[module(skip)]
    decay: f64,
}

impl Layer for Mixer {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let [batch, seq, width] = x.dims();
        let zeros = || Tensor::<2>::zeros([batch, width], &x.device());
        let rows = x.clone().max_dim(2).squeeze_dim::<2>(2);
        let (mut sum, rows) = match context.cache() {
            Some(cache) => (cache.state("mixed", zeros), cache.append("mixed", rows)),
            None => (zeros(), rows),
        };
        let [_, filled] = rows.dims();
        let mixed = (0..seq).map(|i| {
            sum = sum.clone() * self.decay + x.clone().narrow(1, i, 1).squeeze_dim(1);
            let largest = rows.clone().narrow(1, 0, filled - seq + i + 1).max_dim(1);
            (sum.clone() + largest).unsqueeze_dim(1)
        });
        let mixed = Tensor::cat(mixed.collect(), 1);
        if let Some(cache) = context.cache() {
            cache.set_state("mixed", sum);
        }
        mixed
    }
}

/// Returns a model in which both layers of a block keep a state and rows, under one name.
fn mixers() -> Decoder {
    let mixer = |decay| move |_: LayerInit| Ok(Mixer { decay });
    let layers = Layers::default().attention("mixer", mixer(0.7)).feed_forward("mixer", mixer(-0.4));
    let name = || "mixer".to_owned();
    let config = ModelConfig { attention: name(), feed_forward: name(), ..config(4) };
    Decoder::new(&layers, &config, Key::new(5), &Device::flex()).expect("registered layers")
}

#[test]
fn states_and_rows_of_custom_layers_match_the_whole_pass() {
    for batch in [1, 3] {
        assert_chunks_of_model_match(&mixers(), batch, &[1; 12]);
        assert_chunks_of_model_match(&mixers(), batch, &[7, 1, 1, 5, 2]);
    }
}

/// A layer that appends its input, and records where the cache stores it.
#[derive(burn::module::Module, Debug)]
struct Recorder {
    #[module(skip)]
    window: Option<usize>,
    #[module(skip)]
    places: std::sync::Arc<std::sync::Mutex<Vec<usize>>>,
}

impl Layer for Recorder {
    fn forward(&self, x: Tensor<3>, context: &Context) -> Tensor<3> {
        let cache = context.cache().expect("a pass with a cache");
        let (rows, _) = cache.append_in_window("rows", x.clone().unsqueeze_dim::<4>(2), self.window);
        let primitive = rows.try_into_primitive::<Flex>().expect("a tensor of flex");
        let place = primitive.data_arc().as_ptr() as usize;
        self.places.lock().expect("no panic").push(place);
        x
    }
}

#[test]
fn appending_copies_nothing() {
    for window in [None, Some(5)] {
        check_that_appending_copies_nothing(window);
    }
}

fn check_that_appending_copies_nothing(window: Option<usize>) {
    let recorder = Recorder { window, places: Default::default() };
    let model = {
        let recorder = recorder.clone();
        let layers = Layers::default().block("recorder", move |_| Ok(recorder.clone()));
        let config = ModelConfig { block: Some("recorder".to_owned()), ..config(4) };
        Decoder::new(&layers, &config, Key::new(1), &Device::flex()).expect("registered layers")
    };
    let cache = KeyValueCache::new(64);
    for seed in 0..40 {
        decoder::next_logits(&model, tokens(1, 1, seed), &cache).expect("room");
    }
    let places = recorder.places.lock().expect("no panic");
    let [a, b, c] = [places[0], places[1], places[2]];
    assert!(a != b && b != c && a != c, "layers have tensors of their own");
    assert!(places.chunks(3).all(|token| token == [a, b, c]), "the tensors stay where they are");
}
