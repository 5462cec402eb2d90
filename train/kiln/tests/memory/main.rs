//! Memory of one rank, in counted bytes, compared with the bounds that PyTorch FSDP2's own suite checks
//! (fp32; S the rank's shards, U the whole model, K the largest block, R the outer parts):
//!
//! - building: S + K
//! - forward: S + 3K + R, or S + U + K when weights are never resharded
//! - backward: 2S + 3K + R, or S + U + 1.5K when they are never resharded, whose gradient shards replace the
//!   weights that backward frees
//! - after the optimizer step: 4S (weights, gradient, two moments)
//! - at rest after forward and after backward: the bytes held before, within 1 MiB
//! - at rest between micro-batches: 2S, within 1 MiB, where gradients accumulate sharded
//!
//! The batch is a few tokens, so that most counted bytes are weights and gradients; activations are counted
//! too, without an allowance. This is a separate binary that runs one test at a time, because counters belong
//! to ranks, not to tests.

mod blocks;
mod planned;
mod profile;

use std::sync::{Arc, Mutex, PoisonError};

use burn::tensor::{Device, Int, Tensor, TensorData};
use kiln::sharded::ShardedDecoder;
use kiln_collectives::Communicator;
use kiln_model::decoder::{self, Decoder};
use kiln_model::{Context, Key, Layers, ModelConfig};
use kiln_shard::memory::{self, CountingAllocator};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{
    Accumulate, Engine, EngineBuilder, ParamGroupLayout, Policy, Recompute, Reshard, ShardError, Strategy,
};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

static ONE_AT_A_TIME: Mutex<()> = Mutex::new(());

const RANKS: usize = 2;
const TOKENS: usize = 4;
const MIB: usize = 1 << 20;
const F32: usize = size_of::<f32>();

fn decoder(model: &ModelConfig, device: &Device) -> Decoder {
    Decoder::new(&Layers::default(), model, Key::new(1), device).expect("built-in layers")
}

fn config(tied: bool) -> ModelConfig {
    ModelConfig {
        vocab_size: 1_024,
        d_model: 256,
        layers: 6,
        heads: 4,
        kv_heads: 4,
        d_ff: 1_024,
        tie_embeddings: tied,
        ..ModelConfig::preset("10m").expect("a preset")
    }
}

/// Sizes of a model in bytes, as the bounds use them.
#[derive(Clone, Copy, Debug)]
struct Sizes {
    /// Bytes of the rank's shards (S).
    shard: usize,
    /// Bytes of the whole model (U).
    whole: usize,
    /// Bytes of the largest block (K).
    block: usize,
    /// Bytes of the outer parts (R).
    outer: usize,
}

impl Sizes {
    fn of(engine: &Engine) -> Self {
        let layout = engine.layout();
        let bytes = |unit: &ParamGroupLayout| unit.padded_numel() * F32;
        let is_block = |unit: &&ParamGroupLayout| unit.name.starts_with("layers.");
        let blocks = layout.groups.iter().filter(is_block).map(bytes);
        let whole: usize = layout.groups.iter().map(bytes).sum();
        Sizes {
            shard: whole / engine.mesh().shard_size(),
            whole,
            block: blocks.clone().max().unwrap_or(0),
            outer: whole - blocks.sum::<usize>(),
        }
    }
}

/// The bytes that one rank held, beyond those before the model was built.
#[derive(Clone, Copy, Debug)]
struct Measured {
    sizes: Sizes,
    init_peak: usize,
    forward_peak: usize,
    after_forward: usize,
    backward_peak: usize,
    after_backward: usize,
    after_step: usize,
    second_backward_peak: usize,
    peak_unsharded: usize,
}

fn ids(device: &Device) -> Tensor<2, Int> {
    Tensor::from_data(TensorData::new((0..TOKENS as i32).collect::<Vec<_>>(), [1, TOKENS]), device)
}

/// Runs two steps and an evaluation under `policy`. Returns every rank's counts.
fn measure(policy: &Policy, tied: bool) -> Vec<Measured> {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    run_ranks(RANKS, 1, |world| measure_rank(world, policy, tied)).expect("all ranks succeed")
}

fn measure_rank(world: Arc<dyn Communicator>, policy: &Policy, tied: bool) -> Result<Measured, ShardError> {
    let rank = world.rank();
    let plain = Device::flex();
    let training = plain.clone().autodiff();
    let before = memory::live_bytes(rank);
    let live = || memory::live_bytes(rank).saturating_sub(before);
    let peak = || memory::peak_bytes(rank).saturating_sub(before);

    memory::reset_peak(rank);
    let builder = EngineBuilder::new(world.clone(), policy.clone(), None)?;
    let model = ShardedDecoder::new(decoder(&config(tied), &plain), builder)?;
    let engine = model.engine();
    let init_peak = peak();
    // Kernels keep small scratch buffers after their first call; these are not part of the model.
    let loss = |device: &Device| {
        let context = Context::evaluation();
        decoder::loss(&model.pass(device), ids(device), ids(device), 1.0, &context)
    };

    memory::reset_peak(rank);
    let evaluated = loss(&plain);
    let forward_peak = peak();
    drop(evaluated);
    engine.finish_evaluation()?;
    let after_forward = live();

    let step = || -> Result<(usize, usize, usize), ShardError> {
        engine.begin_step();
        let loss = loss(&training);
        engine.check()?;
        memory::reset_peak(rank);
        engine.backward(loss, true)?;
        let backward_peak = peak();
        let after_backward = live();
        memory::reset_peak(rank);
        let update = engine.update(1e-3, 1.0)?;
        engine.outcome(update)?;
        Ok((backward_peak, after_backward, peak()))
    };
    engine.take_peak_unsharded();
    let (backward_peak, after_backward, after_step) = step()?;
    let peak_unsharded = engine.take_peak_unsharded();
    let (second_backward_peak, _, _) = step()?;
    assert!(engine.pinned_groups().is_empty(), "pinned: {:?}", engine.pinned_groups());
    Ok(Measured {
        sizes: Sizes::of(engine),
        init_peak,
        forward_peak,
        after_forward,
        backward_peak,
        after_backward,
        after_step,
        second_backward_peak,
        peak_unsharded,
    })
}

fn within(what: &str, measured: usize, bound: usize, all: &Measured) {
    let mib = |bytes: usize| bytes as f64 / MIB as f64;
    println!("{what:<24} {:>8.2} MiB, bound {:>8.2} MiB", mib(measured), mib(bound));
    assert!(measured <= bound, "{what}: {:.2} MiB, bound {:.2} MiB; {all:?}", mib(measured), mib(bound));
}

fn check_resharding(policy: &Policy, tied: bool) {
    for m in measure(policy, tied) {
        let Sizes { shard, block, outer, .. } = m.sizes;
        println!("{policy:?} tied {tied}: {:?}", m.sizes);
        within("init", m.init_peak, shard + block, &m);
        within("forward", m.forward_peak, shard + 3 * block + outer, &m);
        within("at rest after forward", m.after_forward, shard + MIB, &m);
        within("backward", m.backward_peak, 2 * shard + 3 * block + outer, &m);
        within("at rest after backward", m.after_backward, 2 * shard + MIB, &m);
        within("step", m.after_step, 4 * shard + MIB, &m);
        // Moments exist from the first step on.
        within("second backward", m.second_backward_peak, 4 * shard + 3 * block + outer, &m);
        assert!(m.peak_unsharded <= 2, "{} blocks unsharded at one time", m.peak_unsharded);
    }
}

fn policy(strategy: Strategy, reshard: Reshard, recompute: Recompute) -> Policy {
    Policy { strategy, reshard, recompute, ..Policy::default() }
}

#[test]
fn full_shard_stays_within_its_bounds() {
    for tied in [false, true] {
        for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
            for reshard in [Reshard::Default, Reshard::Always] {
                check_resharding(&policy(Strategy::FullShard, reshard, recompute), tied);
            }
        }
    }
}

#[test]
fn without_resharding_the_whole_weights_are_there_once() {
    let never = [
        policy(Strategy::ShardGradOp, Reshard::Default, Recompute::None),
        policy(Strategy::FullShard, Reshard::Never, Recompute::None),
    ];
    for policy in never {
        for m in measure(&policy, false) {
            let Sizes { shard, whole, block, .. } = m.sizes;
            within("init", m.init_peak, shard + block, &m);
            within("forward", m.forward_peak, shard + whole + block, &m);
            within("at rest after forward", m.after_forward, shard + MIB, &m);
            within("backward", m.backward_peak, shard + whole + block * 3 / 2, &m);
            within("at rest after backward", m.after_backward, 2 * shard + MIB, &m);
            within("step", m.after_step, 4 * shard + MIB, &m);
        }
    }
}

#[test]
fn replicas_hold_four_times_the_model_and_a_block_of_gradients() {
    for m in measure(&policy(Strategy::NoShard, Reshard::Default, Recompute::None), false) {
        let Sizes { shard, whole, block, .. } = m.sizes;
        assert_eq!(shard, whole);
        within("init", m.init_peak, shard + block, &m);
        within("forward", m.forward_peak, shard + block, &m);
        within("backward", m.backward_peak, 2 * shard + 2 * block, &m);
        within("step", m.after_step, 4 * shard + MIB, &m);
    }
}

/// Returns how many bytes a rank holds between two micro-batches, beyond those before the model was built, and the
/// rank's peak in the backward of the last of three micro-batches.
fn between_micro_batches(policy: &Policy) -> Vec<(Sizes, usize, usize)> {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let measured = run_ranks(RANKS, 1, |world| -> Result<_, ShardError> {
        let rank = world.rank();
        let before = memory::live_bytes(rank);
        let plain = Device::flex();
        let training = plain.clone().autodiff();
        let builder = EngineBuilder::new(world.clone(), policy.clone(), None)?;
        let model = ShardedDecoder::new(decoder(&config(false), &plain), builder)?;
        let engine = model.engine();
        let backward = |last: bool| -> Result<(), ShardError> {
            let pass = model.pass(&training);
            let loss = decoder::loss(&pass, ids(&training), ids(&training), 1.0, &Context::evaluation());
            engine.check()?;
            engine.backward(loss, last)
        };
        engine.begin_step();
        backward(false)?;
        backward(false)?;
        let between = memory::live_bytes(rank).saturating_sub(before);
        memory::reset_peak(rank);
        backward(true)?;
        Ok((Sizes::of(engine), between, memory::peak_bytes(rank).saturating_sub(before)))
    });
    measured.expect("all ranks succeed")
}

/// Nothing remains of the whole gradient of a reduced micro-batch.
#[test]
fn sharded_gradients_alone_stay_between_micro_batches() {
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
        let sharded = policy(Strategy::FullShard, Reshard::Always, recompute);
        let unsharded = Policy { accumulate: Accumulate::Unsharded, ..sharded.clone() };
        for (sizes, between, peak) in between_micro_batches(&sharded) {
            let Sizes { shard, block, outer, .. } = sizes;
            assert!(between <= 2 * shard + MIB, "{between} bytes between micro-batches: {sizes:?}");
            // Backward holds the weights of two blocks, the gradients of two, and the shard of a block that is
            // added to the sum.
            let most = 2 * shard + 4 * block + block / RANKS + outer;
            assert!(peak <= most, "{peak} bytes in backward, bound {most}: {sizes:?}");
        }
        for (sizes, between, _) in between_micro_batches(&unsharded) {
            assert!(between >= sizes.shard + sizes.whole, "{between} bytes are no whole gradient: {sizes:?}");
        }
    }
}

#[test]
fn dropping_the_model_frees_everything() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let left = run_ranks(RANKS, 1, |world| -> Result<usize, ShardError> {
        let rank = world.rank();
        let before = memory::live_bytes(rank);
        let plain = Device::flex();
        let decoder = decoder(&config(false), &plain);
        let builder = EngineBuilder::new(world.clone(), Policy::default(), None)?;
        let model = ShardedDecoder::new(decoder, builder)?;
        let training = plain.autodiff();
        let loss = decoder::loss(
            &model.pass(&training),
            ids(&training),
            ids(&training),
            1.0,
            &Context::evaluation(),
        );
        model.engine().backward(loss, true)?;
        drop(model);
        Ok(memory::live_bytes(rank).saturating_sub(before))
    })
    .expect("all ranks succeed");
    assert!(left.iter().all(|bytes| *bytes < MIB), "bytes left: {left:?}");
}
