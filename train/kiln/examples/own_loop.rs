//! A custom training loop: ranks, shards, batches, passes, update, log and checkpoint. A second run resumes from the
//! checkpoint, under any strategy.
//!
//!     cargo run --release -- data prepare --input README.md docs --out runs/data/loop --vocab-size 512
//!     cargo run --release --example own_loop -- runs/data/loop runs/own-loop FULL_SHARD 20
//!     cargo run --release --example own_loop -- runs/data/loop runs/own-loop NO_SHARD 40
//!     cargo run --release -- eval runs/own-loop --data runs/data/loop

use std::error::Error;
use std::path::Path;
use std::sync::Arc;

use kiln::prelude::*;

kiln::allocator!();

type Done = Result<(), Box<dyn Error + Send + Sync>>;

fn main() -> Done {
    kiln::process::start()?;
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let [data, out, strategy, steps] = &arguments[..] else {
        return Err("name a folder of prepared data, one for the run, a strategy, and the last step".into());
    };
    let policy = Policy { strategy: strategy.parse()?, ..Policy::default() };
    let steps = steps.parse()?;
    // Two ranks, each a thread that computes alone.
    run_ranks(2, 1, |world| train(world, policy.clone(), Path::new(data), Path::new(out), steps))?;
    Ok(())
}

/// Trains on one rank. All ranks make the same calls in the same order.
fn train(world: Arc<dyn Communicator>, policy: Policy, data: &Path, out: &Path, steps: u64) -> Done {
    let (batch_size, seq_len, seed) = (8, 64, 0);
    let batches = Batches::open(data, seq_len, batch_size, seed)?;
    let preset = ModelConfig::preset("10m").ok_or("there is no preset 10m")?;
    let vocab_size = batches.info().vocab_size;
    let shape = ModelConfig { vocab_size, layers: 2, d_model: 64, d_ff: 128, ..preset };
    let (key, device) = (Key::new(seed), Device::flex());
    let decoder = Decoder::new(&Layers::default(), &shape, key.fork("init"), &device)?;
    let builder = EngineBuilder::new(world.clone(), policy, None)?.optimizer(AdamW::default());
    let (model, training) = (ShardedDecoder::new(decoder, builder)?, device.autodiff());
    let done = checkpoint::resume(model.engine(), out)?.map_or(0, |state| state.step);
    for step in done..steps {
        let batch = batches.for_rank(step, &*world, &training)?;
        let context = Context::training(key.fork("dropout"), batch.first_sample, shape.dropout);
        let loss = |pass: &Pass| decoder::loss(pass, batch.inputs, batch.targets, batch.scale, &context);
        let outcome = model.step(3e-3, 1.0, &training, loss)?;
        if world.rank() == 0 {
            println!("step {:2}  loss {:.9}  norm {:.9}", step + 1, outcome.loss, outcome.grad_norm);
        }
    }
    let state = CheckpointState { seed, ..CheckpointState::new(shape, seq_len).at(steps, batch_size) };
    let tokenizer = ("tokenizer.json".to_owned(), read_tokenizer_of(data)?.into());
    let saved = checkpoint::save(model.engine(), out, state, vec![tokenizer])?;
    if world.rank() == 0 {
        println!("saved {}", saved.display());
    }
    Ok(())
}
