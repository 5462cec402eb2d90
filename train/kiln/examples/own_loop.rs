//! A custom training loop: ranks, shards, batches, forward, backward, clipping, update, log and checkpoint. A
//! second run resumes from the checkpoint, under any strategy.
//!
//!     cargo run --release -- data prepare --input README.md docs --out runs/data/loop --vocab-size 512
//!     cargo run --release --example own_loop -- runs/data/loop runs/own-loop FULL_SHARD 20
//!     cargo run --release --example own_loop -- runs/data/loop runs/own-loop NO_SHARD 40
//!     cargo run --release -- eval runs/own-loop --data runs/data/loop

use std::env::args;
use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use burn::tensor::Device;
use kiln::checkpoint::{Checkpoint, CheckpointState, SaveContext, SaveOptions, Saver, checkpoints_folder};
use kiln::data::{BatchSource, Split, TokenFile, read_tokenizer_of, slice_for};
use kiln::device::tokens;
use kiln::process::CountingAllocator;
use kiln::sharded::ShardedDecoder;
use kiln::weights::AllowMissing;
use kiln_collectives::Communicator;
use kiln_model::decoder::{self, Decoder};
use kiln_model::layers::Layers;
use kiln_model::{Context, Key, ModelConfig};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{AdamW, EngineBuilder, Policy};

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

const RANKS: usize = 2;
/// Sequences per step, over all ranks.
const BATCH: u64 = 8;
/// Tokens per sequence.
const SEQ: usize = 64;
const SEED: u64 = 0;

fn main() -> Outcome<()> {
    kiln::process::start()?;
    let arguments: Vec<String> = args().skip(1).collect();
    let [data, out, strategy, steps] = &arguments[..] else {
        return Err("name a folder of prepared data, one for the run, a strategy, and the last step".into());
    };
    let policy = Policy { strategy: strategy.parse()?, ..Policy::default() };
    let steps = steps.parse()?;
    // Every rank is a thread that computes alone.
    run_ranks(RANKS, 1, |world| train(world, policy.clone(), Path::new(data), Path::new(out), steps))?;
    Ok(())
}

/// Trains on one rank. All ranks make the same calls in the same order.
fn train(world: Arc<dyn Communicator>, policy: Policy, data: &Path, out: &Path, steps: u64) -> Outcome<()> {
    let (rank, ranks) = (world.rank() as u64, world.world_size() as u64);
    let file = TokenFile::open(data, Split::Train, SEQ)?;
    let shape = ModelConfig {
        vocab_size: file.info().vocab_size,
        layers: 2,
        d_model: 64,
        d_ff: 128,
        ..ModelConfig::preset("10m").ok_or("there is no preset 10m")?
    };
    let batches = BatchSource::new(file, true, SEED)?;
    let device = Device::flex();
    let training = device.clone().autodiff();
    let decoder = Decoder::new(&Layers::default(), &shape, Key::new(SEED), &device)?;
    let builder = EngineBuilder::new(world, policy, None)?.optimizer(AdamW::default());
    let model = ShardedDecoder::new(decoder, builder)?;
    let (engine, rows) = (model.engine(), BATCH / ranks);
    let mut done = 0;
    if Checkpoint::is_in(out) {
        let checkpoint = Checkpoint::open(&Checkpoint::find_latest(out)?)?;
        let (reader, nothing) = (checkpoint.reader(), AllowMissing::default());
        reader.load_weights(engine, &nothing)?;
        reader.load_optimizer(engine, &nothing)?;
        done = checkpoint.state().step;
    }
    for step in done..steps {
        let first = slice_for(step, BATCH, rank, ranks, 0, rows);
        let batch = batches.fetch(first, rows as usize)?;
        let inputs = tokens(batch.inputs, batch.rows, SEQ, &training);
        let targets = tokens(batch.targets, batch.rows, SEQ, &training);
        let context = Context::training(Key::new(SEED).fork_index(step), first, 0.0);
        engine.begin_step();
        // The losses of all ranks are summed, so each rank divides by the number of tokens of all ranks.
        let scale = 1.0 / (BATCH as usize * SEQ) as f64;
        let loss = decoder::loss(&model.pass(&training), inputs, targets, scale, &context);
        engine.check()?;
        engine.backward(loss, true)?;
        let outcome = engine.outcome(engine.update(3e-3, 1.0)?)?;
        if rank == 0 {
            println!("step {:2}  loss {:.9}  norm {:.9}", step + 1, outcome.loss, outcome.grad_norm);
        }
    }
    let state = CheckpointState {
        step: steps,
        skipped: 0,
        loss_scale: None,
        next_sample: steps * BATCH,
        tokens: steps * BATCH * SEQ as u64,
        seed: SEED,
        model: shape,
        context_length: SEQ,
        data_sha256: None,
    };
    let files = vec![("tokenizer.json".to_owned(), read_tokenizer_of(data)?.into())];
    let context = SaveContext { files, ..SaveContext::new(state) };
    let mut saver = Saver::new(SaveOptions::new(checkpoints_folder(out)), rank as usize);
    saver.begin(engine, context)?;
    let saved = saver.settle(engine)?;
    if let Some(folder) = saved.filter(|_| rank == 0) {
        println!("saved {}", folder.display());
    }
    Ok(())
}
