//! Checks of the layers of a model for mistakes that training hides.
//!
//! The model runs on the CPU, on made-up tokens, with initial weights. A probe shows the result of every layer, so a
//! mistake is found where it is made.

use std::collections::BTreeSet;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex, PoisonError};

use burn::module::{Module, ModuleMapper, ModuleVisitor, Param};
use burn::tensor::{DType, Device, Int, Tensor, TensorData};

use crate::config::ModelConfig;
use crate::decoder::{self, Decoder};
use crate::layers::{Context, KeyValueCache, Layer, LayerError, LayerInit, Layers, label};
use crate::ops::Probe;
use crate::panics::message;
use crate::random::Key;

/// Number of sequences of a pass.
const BATCH: usize = 2;

/// Maximum number of tokens of a sequence.
const TOKENS: usize = 16;

/// Largest difference that rounding can explain, relative to the largest value of a layer's result. A missing mask or
/// cache changes a result by about one part in the number of tokens.
const BOUND: f64 = 1e-3;

/// Maximum number of multiplications of [`try_first_block`]: a fraction of a second on a CPU.
const WORK: usize = 5_000_000_000;

/// Maximum length of a sequence for [`try_first_block`]: attention that computes all scores takes its square.
const LONGEST: usize = 2048;

/// A kind of mistake of a layer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum MistakeKind {
    /// The layer panics, or returns another shape than it gets.
    Panic,
    /// A result depends on later tokens.
    Causal,
    /// The result with a key-value cache differs.
    Cache,
    /// The result for a shorter sequence differs, or the layer panics for it.
    Length,
    /// The result for a sequence differs in a batch.
    Batch,
    /// The result of a training pass differs when the pass is repeated.
    Random,
    /// Parameters start with equal values, although their values depend on the key.
    EqualWeights,
    /// Initial values of a parameter do not follow from the key.
    Unkeyed,
    /// Random values that are not parameters.
    Hidden,
}

impl MistakeKind {
    /// Returns advice for users.
    pub fn fix(self) -> &'static str {
        match self {
            MistakeKind::Panic => {
                "fix the layer: its result has the shape of its input, for any number of sequences and tokens"
            }
            MistakeKind::Causal => {
                "mask later positions, and mix no values over the sequence: the model would learn to copy the next \
                 token"
            }
            MistakeKind::Cache => {
                "take earlier positions from `context.cache()`, as train/kiln/examples/own_attention.rs does: answers \
                 and generated text depend on it"
            }
            MistakeKind::Length => {
                "make the layer work for any number of tokens: prompts and generated text have other lengths than \
                 data.seq_len"
            }
            MistakeKind::Batch => {
                "mix no values of two sequences: check the order of dimensions in `reshape`, and sum over no batch"
            }
            MistakeKind::Random => {
                "use `context.dropout`, whose masks follow from a key and a counter, instead of burn's random \
                 operations and of state between passes"
            }
            MistakeKind::EqualWeights => {
                "fork the key of the layer for each parameter, as in `key.fork(\"up_proj\")`"
            }
            MistakeKind::Unkeyed => {
                "make the parameter with `Linear::new` or `normal_parameter` and the key of the layer: every rank \
                 would start from another model"
            }
            MistakeKind::Hidden => {
                "hold these values in a `Param`: other tensors are neither trained nor sharded, and no checkpoint has \
                 them"
            }
        }
    }
}

/// A mistake of a layer. Its text names the layer, and what was found.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{place}{problem}")]
pub struct LayerMistake {
    /// The kind of the mistake.
    pub kind: MistakeKind,
    /// The layer with its name in the configuration, such as `layers.3.ffn ("swiglu")`; the name of a parameter for
    /// mistakes of initial weights.
    pub place: String,
    problem: String,
}

impl LayerMistake {
    fn new(kind: MistakeKind, place: impl Into<String>, problem: impl Into<String>) -> Self {
        LayerMistake { kind, place: place.into(), problem: problem.into() }
    }
}

/// Looks for mistakes in the layers of `model`, in passes over sequences of at most `seq_len` tokens:
///
/// - a result that depends on later tokens, on the number of tokens, or on other sequences;
/// - a result that differs with a key-value cache, which [`decoder::next_logits`] uses;
/// - a training pass that differs when it is repeated;
/// - equal initial weights of two parameters, and initial weights that do not follow from the key;
/// - random values that are not parameters. Tensors with other values are not found: they may be constants.
///
/// Returns the first mistake of each kind. Differences below a thousandth of a layer's largest value are rounding.
///
/// # Errors
///
/// As for [`Decoder::new`].
pub fn find_mistakes(
    layers: &Layers,
    model: &ModelConfig,
    seq_len: usize,
) -> Result<Vec<LayerMistake>, LayerError> {
    let plain = Device::flex();
    let make = |seed, device: &Device| Decoder::new(layers, model, Key::new(seed), device);
    let mut weights = Weights::of(&make(1, &plain)?);
    let mut mistakes = weights.mistakes(&Weights::of(&make(1, &plain)?), &Weights::of(&make(2, &plain)?));
    weights.fill_zeros(model.init_std);
    let passes = Passes {
        model,
        tokens: seq_len.min(TOKENS),
        plain: weights.put_into(make(1, &plain)?),
        other_key: weights.put_into(make(2, &plain)?),
        training: weights.put_into(make(1, &plain.autodiff())?),
    };
    let mut found = passes.mistakes(1);
    if found.iter().any(|mistake| mistake.kind != MistakeKind::Panic) {
        // Rounding may send a token to other experts. A mistake shows with other tokens, too.
        let again = passes.mistakes(2);
        found.retain(|mistake| again.iter().any(|again| again.kind == mistake.kind));
    }
    mistakes.extend(found);
    Ok(mistakes)
}

/// Runs the first block of `model` on one sequence of `seq_len` tokens, unless that takes more than a fraction of a
/// second.
///
/// # Errors
///
/// If a layer of the block panics, or returns another shape than it gets.
pub fn try_first_block(layers: &Layers, model: &ModelConfig, seq_len: usize) -> Result<(), LayerMistake> {
    let device = Device::flex();
    // Starts report other errors of the constructor.
    let Ok(block) = layers.make_block(LayerInit::for_block(model, 0, Key::new(0), &device)) else {
        return Ok(());
    };
    if seq_len > LONGEST || block.num_params().saturating_mul(seq_len) > WORK {
        return Ok(());
    }
    let values = Key::new(1).normal_vec(seq_len * model.d_model, 1.0);
    let x = Tensor::from_data(TensorData::new(values, [1, seq_len, model.d_model]), &device);
    let trail = Trail::default();
    let context = Context::evaluation().probed(Some(trail.probe())).at_layer(0);
    let run = catch_unwind(AssertUnwindSafe(|| block.forward(x, &context)));
    let what = format!("[1, {seq_len}] tokens");
    run.map(drop).map_err(|panic| trail.panic(MistakeKind::Panic, model, &what, message(&*panic)))
}

/// A parameter and its initial values.
struct Weight {
    name: String,
    shape: Vec<usize>,
    values: Vec<f32>,
}

/// The float parameters of a decoder, in the order of its modules.
#[derive(Default)]
struct Weights {
    path: Vec<String>,
    all: Vec<Weight>,
}

impl Weights {
    fn of(decoder: &Decoder) -> Self {
        let mut weights = Weights::default();
        decoder.visit(&mut weights);
        weights
    }

    /// Returns the mistakes of these weights, made from the same key as `again` and from another key than `other`.
    fn mistakes(&self, again: &Self, other: &Self) -> Vec<LayerMistake> {
        let all = || self.all.iter().zip(&again.all).zip(&other.all);
        let unkeyed = all().find(|((weight, again), _)| !has_bits_of(&weight.values, &again.values));
        if let Some(((weight, _), _)) = unkeyed {
            let problem = " starts with other values each time the model is made";
            return vec![LayerMistake::new(MistakeKind::Unkeyed, &weight.name, problem)];
        }
        // Values that do not depend on the key may well be equal, such as the ones of a norm.
        let keyed = || all().filter(|((weight, _), other)| !has_bits_of(&weight.values, &other.values));
        let keyed: Vec<_> = keyed().map(|((weight, _), _)| weight).collect();
        let equals = keyed.iter().enumerate().flat_map(|(at, a)| {
            let is_equal = |b: &&&Weight| a.shape == b.shape && has_bits_of(&a.values, &b.values);
            keyed[at + 1..].iter().filter(is_equal).map(move |b| (a, b))
        });
        let equals: Vec<_> = equals.collect();
        let first = equals.first().map(|(a, b)| {
            let more = match equals.len() {
                1 => String::new(),
                pairs => format!(" (of {pairs} such pairs)"),
            };
            let problem = format!(" and {} start with equal values{more}", b.name);
            LayerMistake::new(MistakeKind::EqualWeights, &a.name, problem)
        });
        first.into_iter().collect()
    }

    /// Gives parameters that start at zero other values: a result that is zero would hide mistakes.
    fn fill_zeros(&mut self, std: f64) {
        for weight in self.all.iter_mut().filter(|weight| weight.values.iter().all(|value| *value == 0.0)) {
            weight.values = Key::new(3).fork(&weight.name).normal_vec(weight.values.len(), std);
        }
    }

    /// Replaces the parameters of `decoder`, which has the same ones.
    fn put_into(&self, decoder: Decoder) -> Decoder {
        decoder.map(&mut Put(self.all.iter()))
    }
}

/// Returns whether the children of a module have names: the fields of a struct do, the variants of an enum do not.
fn is_named(container_type: &str) -> bool {
    !container_type.starts_with("Enum:")
}

impl ModuleVisitor for Weights {
    fn enter_module(&mut self, name: &str, container_type: &str) {
        if is_named(container_type) {
            self.path.push(name.to_owned());
        }
    }

    fn exit_module(&mut self, _: &str, container_type: &str) {
        if is_named(container_type) {
            self.path.pop();
        }
    }

    fn visit_float<const D: usize>(&mut self, param: &Param<Tensor<D>>) {
        let value = param.val();
        let shape = value.dims().to_vec();
        self.all.push(Weight { name: self.path.join("."), shape, values: values(value) });
    }
}

/// Replaces parameters by weights, in order.
struct Put<'a>(std::slice::Iter<'a, Weight>);

impl ModuleMapper for Put<'_> {
    fn map_float<const D: usize>(&mut self, param: Param<Tensor<D>>) -> Param<Tensor<D>> {
        let Some(weight) = self.0.next() else { return param };
        let data = TensorData::new(weight.values.clone(), weight.shape.clone());
        param.map(|old| Tensor::from_data(data, (&old.device(), old.dtype())))
    }
}

fn values<const D: usize>(tensor: Tensor<D>) -> Vec<f32> {
    tensor.into_data().convert_dtype(DType::F32).iter().collect()
}

fn has_bits_of(a: &[f32], b: &[f32]) -> bool {
    a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}

/// The result of a layer in a pass.
struct Shown {
    place: String,
    /// `[batch, tokens, d_model]`.
    shape: [usize; 3],
    values: Vec<f32>,
}

impl Shown {
    /// Returns the largest difference between position `at` of this result and position `actual_at` of `actual`.
    fn difference(&self, at: usize, actual: &Self, actual_at: usize) -> f64 {
        let pairs = (0..actual.shape[0])
            .flat_map(|batch| self.row(batch, at).iter().zip(actual.row(batch, actual_at)));
        let differences = pairs.filter(|(a, b)| a.to_bits() != b.to_bits()).map(|(a, b)| (a - b).abs());
        let number = |difference: f32| if difference.is_nan() { f64::INFINITY } else { difference.into() };
        differences.map(number).fold(0.0, f64::max)
    }

    fn row(&self, batch: usize, at: usize) -> &[f32] {
        let [_, tokens, width] = self.shape;
        let start = (batch * tokens + at) * width;
        &self.values[start..start + width]
    }
}

/// The results of layers in a pass, in order, and the places of the layers that have not returned yet.
#[derive(Clone, Default)]
struct Trail(Arc<Mutex<(Vec<Shown>, Vec<String>)>>);

impl Trail {
    fn probe(&self) -> Probe {
        let trail = self.0.clone();
        Probe::new(move |seen| {
            let mut trail = trail.lock().unwrap_or_else(PoisonError::into_inner);
            match (seen.name, seen.is_gradient) {
                ("input", false) => trail.1.push(seen.place.to_owned()),
                ("output", false) => {
                    trail.1.retain(|place| place != seen.place);
                    if let Ok(shape) = seen.shape.try_into() {
                        trail.0.push(Shown {
                            place: seen.place.to_owned(),
                            shape,
                            values: values(seen.values),
                        });
                    }
                }
                _ => {}
            }
        })
    }

    fn results(&self) -> Vec<Shown> {
        std::mem::take(&mut self.0.lock().unwrap_or_else(PoisonError::into_inner).0)
    }

    /// Returns the mistake of a pass over `what` that has panicked with `message`.
    fn panic(&self, kind: MistakeKind, model: &ModelConfig, what: &str, message: &str) -> LayerMistake {
        let trail = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let place = trail.1.last().map_or_else(|| "the model".to_owned(), |place| label(model, place));
        let problem = match message.strip_prefix(&place).map(|rest| rest.strip_prefix(": ").ok_or(rest)) {
            Some(Err(problem)) => problem.to_owned(),
            Some(Ok(message)) => format!(" panics for {what}: {message}"),
            None => format!(" panics for {what}: {message}"),
        };
        LayerMistake::new(kind, place, problem)
    }
}

/// Compares passes of a model.
struct Passes<'a> {
    model: &'a ModelConfig,
    /// Number of tokens of a sequence.
    tokens: usize,
    plain: Decoder,
    /// Has the same weights, but was made from another key.
    other_key: Decoder,
    /// On a device with autodiff, on which burn's dropout is active.
    training: Decoder,
}

impl Passes<'_> {
    fn run(
        &self,
        kind: MistakeKind,
        decoder: &Decoder,
        tokens: &Tensor<2, Int>,
        context: Context,
    ) -> Result<Vec<Shown>, LayerMistake> {
        let trail = Trail::default();
        let with = if context.cache().is_some() { " with a key-value cache" } else { "" };
        let context = context.probed(Some(trail.probe()));
        let tokens = tokens.clone().to_device(&decoder.devices()[0]);
        let what = format!("{:?} tokens{with}", tokens.dims());
        let run = catch_unwind(AssertUnwindSafe(|| {
            let x = decoder::hidden(decoder, tokens, &context);
            // Generation does not run the layer of the head.
            if decoder.head.head_layer.is_some() && context.cache().is_none() {
                decoder::head_layer(decoder, x, &context);
            }
        }));
        run.map_err(|panic| trail.panic(kind, self.model, &what, message(&*panic)))?;
        Ok(trail.results())
    }

    /// Returns a mistake if, in one of the layers, the first `count` positions of `actual` differ from those of
    /// `expected` that begin at `start`, by more than `bound` times its largest value.
    fn compare(
        &self,
        kind: MistakeKind,
        expected: &[Shown],
        actual: &[Shown],
        (start, count): (usize, usize),
        bound: f64,
        problem: &str,
    ) -> Result<(), LayerMistake> {
        let is_same_place = |(expected, actual): &(&Shown, &Shown)| expected.place == actual.place;
        for (expected, actual) in expected.iter().zip(actual).filter(is_same_place) {
            let largest =
                expected.values.iter().fold(0.0, |most: f64, value| most.max(f64::from(value.abs())));
            let difference = |at| (at, expected.difference(start + at, actual, at) / largest.max(1e-30));
            let is_large = |(_, difference): &(usize, f64)| *difference > bound;
            if let Some((at, difference)) = (0..count).map(difference).find(is_large) {
                let at = start + at;
                let rounding = match bound {
                    0.0 => String::new(),
                    bound => format!(", and rounding explains {bound:.0e}"),
                };
                let problem = format!(
                    " {problem}: position {at} differs by {difference:.0e} of the largest value{rounding}"
                );
                return Err(LayerMistake::new(kind, label(self.model, &expected.place), problem));
            }
        }
        Ok(())
    }

    /// Returns the first mistake of each kind that shows with made-up tokens.
    fn mistakes(&self, seed: u64) -> Vec<LayerMistake> {
        let ids = Key::new(seed).ids(0, BATCH * self.tokens, self.model.vocab_size as u64);
        let tokens = Tensor::from_data(TensorData::new(ids, [BATCH, self.tokens]), &Device::flex());
        let expected = match self.run(MistakeKind::Panic, &self.plain, &tokens, Context::evaluation()) {
            Ok(expected) => expected,
            Err(mistake) => return vec![mistake],
        };
        // Passes that differ by chance cannot be compared.
        let repeated = self.check_repeated(&tokens).and_then(|()| self.check_other_key(&tokens, &expected));
        if let Err(mistake) = repeated {
            return vec![mistake];
        }
        let lengths = self.check_lengths(&tokens, &expected);
        // The tokens of a cached pass are fewer, too.
        let cache = if lengths.is_ok() { self.check_cache(&tokens, &expected) } else { Ok(()) };
        let (causal, batch) = (self.check_causal(&tokens, &expected), self.check_batch(&tokens, &expected));
        [causal, lengths, cache, batch].into_iter().filter_map(Result::err).collect()
    }

    fn check_repeated(&self, tokens: &Tensor<2, Int>) -> Result<(), LayerMistake> {
        let run = || {
            let context = Context::training(Key::new(4), 0, self.model.dropout);
            self.run(MistakeKind::Panic, &self.training, tokens, context)
        };
        let (first, second) = (run()?, run()?);
        let problem = "gives another result when a training pass is repeated";
        self.compare(MistakeKind::Random, &first, &second, (0, self.tokens), 0.0, problem)
    }

    fn check_other_key(&self, tokens: &Tensor<2, Int>, expected: &[Shown]) -> Result<(), LayerMistake> {
        let actual = self.run(MistakeKind::Panic, &self.other_key, tokens, Context::evaluation())?;
        let problem = "depends on random values that are not parameters";
        self.compare(MistakeKind::Hidden, expected, &actual, (0, self.tokens), 0.0, problem)
    }

    /// Changes the last token.
    fn check_causal(&self, tokens: &Tensor<2, Int>, expected: &[Shown]) -> Result<(), LayerMistake> {
        let last = self.tokens - 1;
        let other =
            tokens.clone().narrow(1, last, 1).add_scalar(1).remainder_scalar(self.model.vocab_size as i64);
        let changed = tokens.clone().slice_assign([0..BATCH, last..last + 1], other);
        let actual = self.run(MistakeKind::Causal, &self.plain, &changed, Context::evaluation())?;
        let problem = format!("is not causal: the last of {} tokens changes earlier results", self.tokens);
        self.compare(MistakeKind::Causal, expected, &actual, (0, last), BOUND, &problem)
    }

    /// Reads half of the tokens as a prompt, and the others one by one.
    fn check_cache(&self, tokens: &Tensor<2, Int>, expected: &[Shown]) -> Result<(), LayerMistake> {
        let cache = KeyValueCache::new(self.tokens);
        while cache.len() < self.tokens {
            let start = cache.len();
            let count = if start == 0 { self.tokens.div_ceil(2) } else { 1 };
            let new = tokens.clone().narrow(1, start, count);
            let actual = self.run(MistakeKind::Cache, &self.plain, &new, Context::decoding(cache.clone()))?;
            cache.advance(count);
            let problem = "gives another result with a key-value cache than without";
            self.compare(MistakeKind::Cache, expected, &actual, (start, count), BOUND, problem)?;
        }
        Ok(())
    }

    /// Runs the first sequence alone.
    fn check_batch(&self, tokens: &Tensor<2, Int>, expected: &[Shown]) -> Result<(), LayerMistake> {
        let first = tokens.clone().narrow(0, 0, 1);
        let actual = self.run(MistakeKind::Batch, &self.plain, &first, Context::evaluation())?;
        let problem = "gives another result for a sequence alone than in a batch";
        self.compare(MistakeKind::Batch, expected, &actual, (0, self.tokens), BOUND, problem)
    }

    fn check_lengths(&self, tokens: &Tensor<2, Int>, expected: &[Shown]) -> Result<(), LayerMistake> {
        let lengths = BTreeSet::from([1, 7, self.tokens.saturating_sub(1)]);
        for length in lengths.into_iter().filter(|length| (1..self.tokens).contains(length)) {
            let shorter = tokens.clone().narrow(1, 0, length);
            let actual = self.run(MistakeKind::Length, &self.plain, &shorter, Context::evaluation())?;
            let problem =
                format!("gives another result for the first {length} of {} tokens alone", self.tokens);
            self.compare(MistakeKind::Length, expected, &actual, (0, length), BOUND, &problem)?;
        }
        Ok(())
    }
}
