//! A small model, its data, and the training of one sharded rank.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln::sharded::ShardedDecoder;
use kiln_collectives::{Communicator, LocalGroup, LocalOptions};
use kiln_model::decoder::{self, Decoder};
use kiln_model::layers::{AnyLayer, Layer, LayerInit};
use kiln_model::{Context, Key, Layers, ModelConfig};
use kiln_shard::ranks::{RankError, RanksError, run_ranks, run_ranks_on};
use kiln_shard::{
    Accumulate, AdamW, Choice, Engine, EngineBuilder, Muon, Optimizer, Policy, Recompute, Reshard,
    ShardError, StateKind, Strategy,
};

/// Largest distance between a sharded and the unsharded run, as `‖a - b‖ / ‖b‖` per tensor. Both compute in
/// f32 and add the same numbers in different orders (rows of a batch over ranks and micro-batches), which
/// moves sums of some hundred terms by a few units in the last place, 6e-8 each.
pub const TOLERANCE: f64 = 1e-5;

pub const LEARNING_RATE: f64 = 1e-3;

/// Values of parameters, by name.
pub type Values = BTreeMap<String, Vec<f32>>;

/// All settings of a run.
#[derive(Clone)]
pub struct Run {
    pub model: ModelConfig,
    pub policy: Policy,
    pub ranks: usize,
    pub shard_size: Option<usize>,
    /// Micro-batches per step.
    pub accumulation: usize,
    pub steps: u64,
    /// Sequences per step over all ranks.
    pub batch: usize,
    pub seq: usize,
    /// Token ids in the data are less than this number.
    pub tokens: usize,
    pub adamw: AdamW,
    /// The optimizer of the matrices of blocks, if it is not AdamW.
    pub muon: Option<Muon>,
    /// Limit of the gradient norm; 0 for no clipping.
    pub max_norm: f64,
    pub frozen: fn(&str) -> bool,
    /// If set, delays communication at random.
    pub delay_seed: Option<u64>,
    /// The device of weights and computation.
    pub device: fn() -> Device,
}

/// The results of a run.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Trace {
    /// Loss of each step over all ranks.
    pub losses: Vec<f64>,
    /// Norm of the gradient of each step, before clipping.
    pub norms: Vec<f64>,
    /// Gradients of each step, before clipping; frozen parameters have none.
    pub gradients: Vec<Values>,
    /// Weights at the end.
    pub weights: Values,
}

/// Returns the configuration of three blocks of width 16. Weights are large for this width, so that attention is
/// far from uniform and no gradient is small compared with the others.
pub fn small_model(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 37,
        d_model: 16,
        layers: 3,
        heads: 4,
        kv_heads: 2,
        d_ff: 24,
        tie_embeddings: tied,
        init_std: 0.2,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

impl Run {
    /// Five steps of the small model under `strategy`. The 96 sequences can be split over 1, 2, 3, 4 or 8
    /// ranks and four micro-batches.
    pub fn new(strategy: Strategy, ranks: usize) -> Self {
        let model = small_model(false);
        Run {
            tokens: model.vocab_size,
            model,
            policy: Policy { strategy, timeout: Duration::from_secs(120), ..Policy::default() },
            ranks,
            shard_size: None,
            accumulation: 1,
            steps: 5,
            batch: 96,
            seq: 6,
            adamw: AdamW::default(),
            muon: None,
            max_norm: 0.5,
            frozen: |_| false,
            delay_seed: None,
            device: Device::flex,
        }
    }

    /// Returns the optimizer of the run.
    pub fn optimizer(&self) -> Optimizer {
        match self.muon {
            None => self.adamw.into(),
            Some(muon) => {
                Optimizer::new("muon", vec![Arc::new(self.adamw), Arc::new(muon)], |name, shape| {
                    let is_matrix = name.starts_with("layers.") && shape.len() >= 2;
                    Choice { rule: usize::from(is_matrix), ..Choice::default() }
                })
            }
        }
    }

    pub fn tied(mut self, tied: bool) -> Self {
        self.model.tie_embeddings = tied;
        self
    }

    pub fn reshard(mut self, reshard: Reshard) -> Self {
        self.policy.reshard = reshard;
        self
    }

    pub fn recompute(mut self, recompute: Recompute) -> Self {
        self.policy.recompute = recompute;
        self
    }

    pub fn accumulation(mut self, accumulation: usize) -> Self {
        self.accumulation = accumulation;
        self
    }

    pub fn accumulate(mut self, accumulate: Accumulate) -> Self {
        self.policy.accumulate = accumulate;
        self
    }

    pub fn shard_size(mut self, shard_size: usize) -> Self {
        self.shard_size = Some(shard_size);
        self
    }

    pub fn steps(mut self, steps: u64) -> Self {
        self.steps = steps;
        self
    }

    pub fn frozen(mut self, frozen: fn(&str) -> bool) -> Self {
        self.frozen = frozen;
        self
    }

    pub fn key(&self) -> Key {
        Key::new(1)
    }

    pub fn decoder(&self, device: &Device) -> Decoder {
        self.seeded(self.key(), device)
    }

    pub fn seeded(&self, key: Key, device: &Device) -> Decoder {
        Decoder::new(&Layers::default(), &self.model, key, device).expect("built-in layers")
    }

    /// Returns a decoder with blocks from `make`.
    pub fn with_blocks<L: Layer>(
        &self,
        device: &Device,
        make: impl Fn(LayerInit) -> L + Send + Sync + 'static,
    ) -> Decoder {
        let layers = Layers::default().block("own", move |init| Ok(make(init)));
        let model = ModelConfig { block: Some("own".to_owned()), ..self.model.clone() };
        Decoder::new(&layers, &model, self.key(), device).expect("a layer of the test")
    }

    /// Returns the token at a position of a sample. It depends only on `sample` and `position`.
    pub fn token(&self, sample: usize, position: usize) -> i32 {
        let key = Key::new(2).fork_index(sample as u64);
        (key.at(position as u64) % self.tokens as u64) as i32
    }

    /// Returns the inputs and targets `[rows, seq]` of `rows` samples starting with `first`, and their context.
    pub fn samples(&self, first: usize, rows: usize, device: &Device) -> Batch {
        let ids = |shift: usize| {
            let ids: Vec<i32> = (first..first + rows)
                .flat_map(|sample| (0..self.seq).map(move |at| self.token(sample, at + shift)))
                .collect();
            Tensor::from_data(TensorData::new(ids, [rows, self.seq]), device)
        };
        Batch {
            inputs: ids(0),
            targets: ids(1),
            scale: 1.0 / (self.batch * self.seq) as f64,
            context: Context::training(Key::new(3), first as u64, self.model.dropout),
        }
    }

    /// Runs `body` on all ranks.
    pub fn try_on_ranks<T: Send, E: RankError>(
        &self,
        body: impl Fn(Arc<dyn Communicator>) -> Result<T, E> + Sync,
    ) -> Result<Vec<T>, RanksError<E>> {
        match self.delay_seed {
            None => run_ranks(self.ranks, 1, body),
            seed => {
                let max_delay = Duration::from_micros(300);
                let options = LocalOptions { random_delay_seed: seed, max_delay, ..LocalOptions::default() };
                run_ranks_on(LocalGroup::with_options(self.ranks, options), 1, body)
            }
        }
    }

    /// Runs `body` on all ranks, which must succeed.
    pub fn on_ranks<T: Send>(
        &self,
        body: impl Fn(Arc<dyn Communicator>) -> Result<T, ShardError> + Sync,
    ) -> Vec<T> {
        self.try_on_ranks(body).unwrap_or_else(|error| panic!("{}: {error}", self.name()))
    }

    /// Trains with shards. Returns the results of rank 0, which must equal those of every rank.
    pub fn train(&self) -> Trace {
        self.same_on_all(self.on_ranks(|world| {
            let rank = Rank::start(self, world)?;
            let trace = rank.train()?;
            assert_eq!(rank.engine().pinned_groups(), Vec::<String>::new(), "pinned");
            Ok(trace)
        }))
    }

    /// Returns the result that all ranks have, which must be equal.
    pub fn same_on_all<T: PartialEq>(&self, results: Vec<T>) -> T {
        let mut results = results.into_iter();
        let first = results.next().expect("at least one rank");
        for (rank, other) in results.enumerate() {
            assert!(other == first, "{}: rank {} differs from rank 0", self.name(), rank + 1);
        }
        first
    }

    pub fn name(&self) -> String {
        let Policy { strategy, reshard, recompute, accumulate, .. } = &self.policy;
        format!(
            "{strategy} on {} ranks (shard size {:?}), reshard {reshard:?}, recompute {recompute:?}, {} micro-batches, \
             accumulate {accumulate}, tied {}",
            self.ranks, self.shard_size, self.accumulation, self.model.tie_embeddings
        )
    }
}

/// A batch of samples.
pub struct Batch {
    inputs: Tensor<2, Int>,
    targets: Tensor<2, Int>,
    scale: f64,
    pub context: Context,
}

impl Batch {
    /// Returns the same samples, for an evaluation.
    pub fn for_evaluation(self) -> Self {
        Batch { context: Context::evaluation(), ..self }
    }

    /// Returns this batch's part of the mean loss of the step.
    pub fn loss<P: decoder::Modules>(self, modules: &P) -> Tensor<1> {
        decoder::loss(modules, self.inputs, self.targets, self.scale, &self.context)
    }
}

/// One rank of a sharded run.
pub struct Rank<'a> {
    pub run: &'a Run,
    pub model: ShardedDecoder,
    pub training: Device,
}

impl<'a> Rank<'a> {
    pub fn start(run: &'a Run, world: Arc<dyn Communicator>) -> Result<Self, ShardError> {
        Rank::with_decoder(run, world, run.decoder(&(run.device)()))
    }

    pub fn with_decoder(
        run: &'a Run,
        world: Arc<dyn Communicator>,
        decoder: Decoder,
    ) -> Result<Self, ShardError> {
        Rank::made_of(run, world, decoder, run.optimizer())
    }

    /// [`Rank::start`] with a different optimizer than the run's.
    pub fn with_optimizer(
        run: &'a Run,
        world: Arc<dyn Communicator>,
        optimizer: Optimizer,
    ) -> Result<Self, ShardError> {
        Rank::made_of(run, world, run.decoder(&(run.device)()), optimizer)
    }

    pub fn made_of(
        run: &'a Run,
        world: Arc<dyn Communicator>,
        decoder: Decoder,
        optimizer: Optimizer,
    ) -> Result<Self, ShardError> {
        let builder = EngineBuilder::new(world, run.policy.clone(), run.shard_size)?.optimizer(optimizer);
        let model = ShardedDecoder::new(decoder, builder.freeze(run.frozen))?;
        Ok(Rank { run, model, training: (run.device)().autodiff() })
    }

    pub fn engine(&self) -> &Engine {
        self.model.engine()
    }

    /// Returns micro-batch `index` of this rank in `step`, which counts from 1.
    pub fn micro_batch(&self, step: u64, index: usize, device: &Device) -> Batch {
        let run = self.run;
        let per_rank = run.batch / run.ranks;
        let rows = per_rank / run.accumulation;
        assert_eq!(rows * run.accumulation * run.ranks, run.batch, "the batch can be split");
        let rank = self.engine().world().rank();
        let first = (step as usize - 1) * run.batch + rank * per_rank + index * rows;
        run.samples(first, rows, device)
    }

    /// Computes the gradients of `step`.
    pub fn gradients(&self, step: u64) -> Result<(), ShardError> {
        let engine = self.engine();
        engine.begin_step();
        for index in 0..self.run.accumulation {
            let batch = self.micro_batch(step, index, &self.training);
            let loss = batch.loss(&self.model.pass(&self.training));
            engine.check()?;
            engine.backward(loss, index + 1 == self.run.accumulation)?;
        }
        Ok(())
    }

    /// Clips and updates. Returns the loss over all ranks and the norm of the gradient.
    pub fn update(&self) -> Result<(f64, f64), ShardError> {
        let update = self.engine().update(LEARNING_RATE, self.run.max_norm)?;
        let outcome = self.engine().outcome(update)?;
        assert!(outcome.applied, "{}: {outcome:?}", self.run.name());
        Ok((outcome.loss, outcome.grad_norm))
    }

    /// Takes one whole step. Returns loss and norm.
    pub fn step(&self, step: u64) -> Result<(f64, f64), ShardError> {
        self.gradients(step)?;
        self.update()
    }

    /// Returns all values of this kind by parameter.
    pub fn values(&self, kind: StateKind) -> Result<Values, ShardError> {
        let engine = self.engine();
        let mut values = Values::new();
        for (_, parameter) in engine.layout().parameters() {
            if let Some(whole) = engine.gather_parameter(&parameter.name, kind)? {
                values.insert(parameter.name.clone(), whole);
            }
        }
        Ok(values)
    }

    pub fn train(&self) -> Result<Trace, ShardError> {
        let mut trace = Trace::default();
        for step in 1..=self.run.steps {
            self.gradients(step)?;
            trace.gradients.push(self.values(StateKind::Gradient)?);
            let (loss, norm) = self.update()?;
            trace.losses.push(loss);
            trace.norms.push(norm);
        }
        trace.weights = self.values(StateKind::Weight)?;
        Ok(trace)
    }
}

/// `‖a - b‖ / ‖b‖`.
pub fn distance(a: &[f32], b: &[f32]) -> f64 {
    assert_eq!(a.len(), b.len());
    let norm = |values: &mut dyn Iterator<Item = f64>| values.map(|x| x * x).sum::<f64>().sqrt();
    let difference = norm(&mut a.iter().zip(b).map(|(a, b)| f64::from(*a) - f64::from(*b)));
    match norm(&mut b.iter().map(|b| f64::from(*b))) {
        // If the expected norm is zero, the distance is finite only if there is no difference.
        0.0 if difference == 0.0 => 0.0,
        0.0 => f64::INFINITY,
        size => difference / size,
    }
}

/// Fails unless `actual` is `expected` within [`TOLERANCE`], tensor by tensor.
pub fn assert_values_close(what: &str, actual: &Values, expected: &Values) {
    assert_values_within(TOLERANCE, what, actual, expected);
}

fn assert_values_within(tolerance: f64, what: &str, actual: &Values, expected: &Values) {
    let names = |values: &Values| values.keys().cloned().collect::<Vec<_>>();
    assert_eq!(names(actual), names(expected), "{what}");
    for (name, expected) in expected {
        let distance = distance(&actual[name], expected);
        assert!(distance <= tolerance, "{what}: `{name}` is off by {distance:.2e}");
    }
}

/// Fails unless the scalars agree within [`TOLERANCE`].
pub fn assert_scalars_close(what: &str, actual: &[f64], expected: &[f64]) {
    assert_scalars_within(TOLERANCE, what, actual, expected);
}

fn assert_scalars_within(tolerance: f64, what: &str, actual: &[f64], expected: &[f64]) {
    assert_eq!(actual.len(), expected.len(), "{what}");
    for (step, (actual, expected)) in actual.iter().zip(expected).enumerate() {
        let off = (actual - expected).abs() / expected.abs();
        assert!(off <= tolerance, "{what} {}: {actual} instead of {expected}", step + 1);
    }
}

/// Fails unless the two runs agree within [`TOLERANCE`] in everything.
pub fn assert_close(what: &str, actual: &Trace, expected: &Trace) {
    assert_within(TOLERANCE, what, actual, expected);
}

/// Fails unless the two runs agree within `tolerance` in everything.
pub fn assert_within(tolerance: f64, what: &str, actual: &Trace, expected: &Trace) {
    let scalars = |name: &str, actual: &[f64], expected: &[f64]| {
        assert_scalars_within(tolerance, &format!("{what}: {name}"), actual, expected);
    };
    let values = |name: String, actual: &Values, expected: &Values| {
        assert_values_within(tolerance, &format!("{what}: {name}"), actual, expected);
    };
    scalars("loss", &actual.losses, &expected.losses);
    assert_eq!(actual.gradients.len(), expected.gradients.len(), "{what}");
    for (step, (actual, expected)) in actual.gradients.iter().zip(&expected.gradients).enumerate() {
        values(format!("gradient {}", step + 1), actual, expected);
    }
    scalars("norm", &actual.norms, &expected.norms);
    values("weights".to_owned(), &actual.weights, &expected.weights);
}

/// Returns the built-in block.
pub fn block(init: LayerInit) -> AnyLayer {
    Layers::default()
        .make_block(LayerInit { model: &ModelConfig { block: None, ..init.model.clone() }, ..init })
        .expect("built-in layers")
}
