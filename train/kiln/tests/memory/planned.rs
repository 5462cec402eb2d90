//! The plan of a step, compared with executed steps: a rank's memory within bounds, and its sent bytes
//! exactly.

use burn::module::Module;
use burn::tensor::{Bool, Tensor, activation::softmax};
use kiln::bench::{default_config, step};
use kiln::config::{Choice, Config, LoraSection, Precision};
use kiln::losses::Loss;
use kiln::passes::RunLoss;
use kiln::planner::{Axis, Gathers, PlannedStep, RankShape, Speed};
use kiln::sharded::ShardedDecoder;
use kiln_model::decoder::Decoder;
use kiln_model::layers::{Context, Layer, LayerInit, Linear};
use kiln_model::meta::{MetaTape, MetaTensor};
use kiln_model::{Key, Layers, LoraConfig, MOE, ModelConfig, MoeConfig, PARALLEL_RESIDUAL};
use kiln_shard::memory;
use kiln_shard::ranks::run_ranks;
use kiln_shard::{
    Accumulate, EngineBuilder, Muon, Optimizer, Recompute, Rule, ShardError, ShardRun, Strategy, UpdateStep,
};

use super::{Device, ONE_AT_A_TIME, PoisonError};

/// Largest overestimate of a plan, as a share of the measured value.
const ABOVE: f64 = 0.05;
/// Largest underestimate of a plan, as a share of the measured value.
const BELOW: f64 = 0.02;
/// Largest error in both directions for the benchmark presets with a reduction in every micro-batch.
const CLOSE: f64 = 0.01;

/// A run to plan and to measure.
#[derive(Clone)]
struct Case {
    name: String,
    config: Config,
    model: ModelConfig,
    optimizer: Optimizer,
}

fn odd() -> ModelConfig {
    ModelConfig {
        vocab_size: 1_003,
        d_model: 144,
        layers: 3,
        heads: 6,
        kv_heads: 2,
        d_ff: 400,
        tie_embeddings: false,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

impl Case {
    fn new(model: &str, strategy: Strategy, ranks: usize) -> Self {
        let name = format!("{model} {strategy} on {ranks}");
        let mut config = default_config();
        let model = match model {
            "odd" => odd(),
            preset => ModelConfig::preset(preset).expect("a preset"),
        };
        config.shard.strategy = strategy;
        config.shard.shard_size = strategy.is_hybrid().then_some(2);
        config.train.ranks = ranks;
        config.data.seq_len = 96;
        Case { name, config, model, optimizer: Optimizer::default() }.batch(2, 1)
    }

    fn batch(mut self, micro_batch: usize, micro_batches: usize) -> Self {
        self.config.train.micro_batch = Choice::Is(micro_batch);
        self.config.train.global_batch = micro_batch * micro_batches * self.config.train.ranks;
        self.name = format!("{}, {micro_batches} x {micro_batch}", self.name);
        self
    }

    fn seq_len(mut self, seq_len: usize) -> Self {
        self.config.data.seq_len = seq_len;
        self
    }

    fn selective(mut self) -> Self {
        self.config.shard.recompute = Recompute::Selective.into();
        self.name.push_str(", selective");
        self
    }

    fn recompute(mut self) -> Self {
        self.config.shard.recompute = Recompute::Block.into();
        self.name.push_str(", recompute");
        self
    }

    fn accumulate(mut self, accumulate: Accumulate) -> Self {
        self.config.shard.accumulate = Some(accumulate);
        self.name = format!("{}, {accumulate}", self.name);
        self
    }

    fn bf16_on_the_wire(mut self) -> Self {
        self.config.precision.reduce = Precision::Bf16;
        self.name.push_str(", bf16 on the wire");
        self
    }

    fn bf16(mut self) -> Self {
        self.config.precision.compute = Choice::Is(Precision::Bf16);
        self.name.push_str(", bf16");
        self
    }

    fn lora(mut self, lora: LoraConfig) -> Self {
        let LoraConfig { rank, alpha, dropout, ref targets } = lora;
        self.config.lora = LoraSection { rank, alpha, dropout, targets: targets.clone() };
        self.model.lora = Some(lora);
        self.name.push_str(", adapters");
        self
    }

    fn muon(mut self) -> Self {
        self.optimizer = Muon::default().into();
        self.name.push_str(", Muon");
        self
    }

    /// A rule with more state of whole matrices than the matrices have elements.
    fn owned_slots(mut self) -> Self {
        self.optimizer = Optimizer::default().with_rule(Squares, |_, shape| shape.len() == 2);
        self.name.push_str(", owned slots");
        self
    }

    fn model(mut self, change: impl FnOnce(&mut ModelConfig)) -> Self {
        change(&mut self.model);
        self.name = format!("{}, {}/{}", self.name, self.model.feed_forward, self.model.dropout);
        self
    }

    fn plan(&self) -> PlannedStep {
        let decoder = decoder(&self.model);
        let Case { config, model, optimizer, .. } = self;
        let shape = RankShape::from_config(config, model, &decoder, optimizer, Gathers::Shared, true);
        shape.expect("a mesh").step(&Speed::INSTANT)
    }

    /// Returns the peak of a rank in its third step, and the bytes that the rank sent in this step.
    fn run(&self) -> (u64, u64) {
        let Case { config, optimizer, .. } = self;
        let measured = run_ranks(config.train.ranks, 1, |world| -> Result<(u64, u64), ShardError> {
            let (rank, recorder) = (world.rank(), world.recorder().clone());
            let before = memory::live_bytes(rank);
            let builder = EngineBuilder::new(world, config.policy(), config.shard.shard_size)?
                .optimizer(optimizer.clone())
                .freeze(config.frozen());
            let model = ShardedDecoder::new(decoder(&self.model), builder)?;
            let loss = RunLoss::from(Loss::CrossEntropy);
            let step = |number| step(config, &model, &Device::flex(), &loss, number).expect("a step");
            step(1);
            step(2);
            memory::reset_peak(rank);
            recorder.reset_totals();
            step(3);
            let peak = memory::peak_bytes(rank).saturating_sub(before);
            Ok((peak as u64, recorder.bytes_sent()))
        });
        let measured = measured.expect("all ranks succeed");
        measured.into_iter().fold((0, 0), |(peak, sent), rank| (peak.max(rank.0), sent.max(rank.1)))
    }

    fn check(&self) {
        self.check_within(BELOW, ABOVE);
    }

    fn check_within(&self, below: f64, above: f64) {
        // Allocations of concurrent tests would be counted too.
        let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
        let (planned, (peak, sent)) = (self.plan(), self.run());
        let difference = planned.peak.bytes as f64 / peak as f64 - 1.0;
        println!("{:60} {peak:>12} {:>12} {:+.2} %", self.name, planned.peak.bytes, 100.0 * difference);
        let all = [Axis::Shard, Axis::Replicate, Axis::World].map(|axis| planned.sent(axis));
        assert_eq!(all.into_iter().sum::<u64>(), sent, "{}: bytes sent, by axis {all:?}", self.name);
        assert!((-below..=above).contains(&difference), "{}: {difference}\n{planned:#?}", self.name);
    }
}

fn decoder(model: &ModelConfig) -> Decoder {
    let layers = Layers::default().attention("plain", |init| Ok(PlainAttention::new(&init)));
    Decoder::new(&layers, model, Key::new(1), &Device::flex()).expect("layers")
}

/// Attention in plain burn, with the whole matrix of scores: a custom layer with `meta_forward`.
#[derive(Module, Debug)]
struct PlainAttention {
    q_proj: Linear,
    k_proj: Linear,
    v_proj: Linear,
    o_proj: Linear,
    #[module(skip)]
    heads: usize,
}

impl PlainAttention {
    fn new(init: &LayerInit) -> Self {
        let (d, std) = (init.model.d_model, init.model.init_std);
        let linear = |name| Linear::new(d, d, std, init.key.fork(name), init.device);
        let [q_proj, k_proj, v_proj, o_proj] = ["q_proj", "k_proj", "v_proj", "o_proj"].map(linear);
        PlainAttention { q_proj, k_proj, v_proj, o_proj, heads: init.model.heads }
    }
}

impl Layer for PlainAttention {
    fn forward(&self, x: Tensor<3>, _: &Context) -> Tensor<3> {
        let [batch, seq, d] = x.dims();
        let head_dim = d / self.heads;
        let heads =
            |map: &Linear| map.forward(x.clone()).reshape([batch, seq, self.heads, head_dim]).swap_dims(1, 2);
        let [q, k, v] = [&self.q_proj, &self.k_proj, &self.v_proj].map(heads);
        let scores = q.matmul(k.swap_dims(2, 3)) / (head_dim as f64).sqrt();
        let mask = Tensor::<2, Bool>::tril_mask([seq, seq], 0, &x.device());
        let scores = scores.mask_fill(mask.unsqueeze::<4>(), f64::NEG_INFINITY);
        let mixed = softmax(scores, 3).matmul(v).swap_dims(1, 2).reshape([batch, seq, d]);
        self.o_proj.forward(mixed)
    }

    fn meta_forward(&self, x: MetaTensor, tape: &MetaTape<'_>) -> MetaTensor {
        let d = x.width();
        let [q, k, v] = [(); 3].map(|()| tape.linear(x.clone(), d));
        drop(x);
        let scores = tape.product(q, k, self.heads * tape.batch().seq_len as usize);
        let mixed = tape.product(tape.softmax(tape.masked(scores)), v, d);
        tape.linear(mixed, d)
    }
}

#[derive(Debug)]
struct Squares;

impl Rule for Squares {
    fn name(&self) -> &str {
        "squares"
    }

    fn owned_slots(&self) -> &[&'static str] {
        &["rows", "columns"]
    }

    fn owned_shape(&self, slot: &str, shape: &[usize]) -> Vec<usize> {
        // The embedding has too many rows.
        match shape[usize::from(slot == "columns")] {
            side if side > 1_000 => vec![0],
            side => vec![side, side],
        }
    }

    fn update(&self, step: &UpdateStep, run: ShardRun<'_>) {
        for (weight, update) in run.weights.iter_mut().zip(run.gradient) {
            *weight -= step.learning_rate as f32 * update;
        }
    }
}

const STRATEGIES: [Strategy; 3] = [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard];

#[test]
fn strategies_ranks_recompute_and_accumulation() {
    for strategy in STRATEGIES {
        for ranks in [1, 2, 4] {
            let case = |micro_batches| Case::new("odd", strategy, ranks).batch(2, micro_batches);
            case(1).check();
            case(1).recompute().check();
            case(1).selective().check();
            for accumulate in [Accumulate::Sharded, Accumulate::Unsharded] {
                case(3).accumulate(accumulate).check();
                case(2).accumulate(accumulate).recompute().bf16().check();
            }
        }
        Case::new("odd", strategy, 2).batch(2, 3).accumulate(Accumulate::Sharded).bf16_on_the_wire().check();
    }
}

/// The benchmark presets, whose steps reduce every micro-batch.
#[test]
fn micro_batches_that_are_reduced() {
    let sharded = |case: Case| case.accumulate(Accumulate::Sharded).check_within(CLOSE, CLOSE);
    for ranks in [2, 4] {
        for strategy in [Strategy::FullShard, Strategy::ShardGradOp] {
            let case = Case::new("10m", strategy, ranks).batch(1, 3);
            sharded(case.clone());
            sharded(case.recompute().bf16());
        }
        sharded(Case::new("90m", Strategy::FullShard, ranks).seq_len(32).batch(1, 2).recompute());
    }
}

#[test]
fn hybrids_and_rules_on_matrices() {
    for strategy in [Strategy::HybridShard, Strategy::HybridShardGradOp] {
        Case::new("odd", strategy, 4).check();
        Case::new("odd", strategy, 4).batch(1, 2).recompute().check();
        Case::new("odd", strategy, 4).batch(1, 3).bf16_on_the_wire().check();
        Case::new("odd", strategy, 4).muon().check();
    }
    for strategy in STRATEGIES {
        Case::new("odd", strategy, 2).muon().batch(1, 1).check();
        Case::new("odd", strategy, 2).owned_slots().check();
        Case::new("odd", strategy, 4).owned_slots().check();
    }
    let moe = MoeConfig { experts: 6, expert_d_ff: 112, ..MoeConfig::default() };
    let experts = |model: &mut ModelConfig| (model.feed_forward, model.moe) = (MOE.to_owned(), Some(moe));
    Case::new("odd", Strategy::NoShard, 2).model(experts).muon().batch(1, 1).check();
}

#[test]
fn presets() {
    for strategy in STRATEGIES {
        Case::new("10m", strategy, 2).seq_len(256).check();
        Case::new("10m", strategy, 2).seq_len(256).bf16().check();
        Case::new("10m", strategy, 2).seq_len(256).batch(4, 2).recompute().check();
        Case::new("10m", strategy, 2).seq_len(256).batch(4, 2).selective().check();
        Case::new("10m", strategy, 2).seq_len(256).selective().bf16().check();
        Case::new("90m", strategy, 2).seq_len(64).batch(1, 1).check();
    }
    Case::new("90m", Strategy::FullShard, 4).seq_len(32).batch(1, 1).bf16().check();
    Case::new("90m", Strategy::FullShard, 2).seq_len(64).batch(1, 2).selective().check();
}

#[test]
fn adapters() {
    let all = LoraConfig::default();
    let few = LoraConfig { rank: 4, dropout: 0.1, targets: vec!["q_proj".to_owned()], ..all.clone() };
    for strategy in [Strategy::FullShard, Strategy::NoShard] {
        let case = |lora: &LoraConfig| Case::new("10m", strategy, 2).seq_len(256).lora(lora.clone());
        case(&all).check_within(CLOSE, CLOSE);
        case(&all).selective().check_within(CLOSE, CLOSE);
        case(&all).recompute().bf16().check_within(CLOSE, CLOSE);
        case(&few).check_within(CLOSE, CLOSE);
    }
}

/// The plan of a custom layer that describes the products of its activations.
#[test]
fn products_of_activations() {
    for ranks in [1, 2] {
        let case = |seq_len| {
            let plain = |model: &mut ModelConfig| model.attention = "plain".to_owned();
            Case::new("odd", Strategy::FullShard, ranks).model(plain).seq_len(seq_len)
        };
        case(96).check();
        case(192).check();
        case(192).recompute().check();
        case(96).bf16().check();
    }
}

#[test]
fn other_layers() {
    let case = || Case::new("odd", Strategy::FullShard, 2);
    let selective = || Case::new("odd", Strategy::FullShard, 2).selective();
    for case in [case as fn() -> Case, selective] {
        case().model(|model| model.feed_forward = "geglu".to_owned()).check();
        case().model(|model| model.feed_forward = "squared_relu".to_owned()).check();
        case().model(|model| model.qk_norm = true).check();
        case().model(|model| model.dropout = 0.1).check();
        case().model(|model| model.block = Some(PARALLEL_RESIDUAL.to_owned())).check();
    }
    for shared_expert_d_ff in [None, Some(96)] {
        let moe = MoeConfig { experts: 6, expert_d_ff: 112, shared_expert_d_ff, ..MoeConfig::default() };
        let experts = |model: &mut ModelConfig| {
            (model.feed_forward, model.moe) = (MOE.to_owned(), Some(moe.clone()));
        };
        case().model(experts).check();
        case().model(experts).recompute().check();
        case().model(experts).selective().check();
        case().model(experts).bf16().check();
        Case::new("odd", Strategy::NoShard, 2).model(experts).batch(2, 2).check();
    }
}
