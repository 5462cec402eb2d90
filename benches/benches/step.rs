//! Times a whole optimizer step of preset 10m, and its update alone: the norm of the gradient, clipping and
//! AdamW over all parameters. Use it to measure the effect of a change on a step; `kiln bench strategies`
//! compares the strategies in one alternating run.
//!
//!     cargo bench -p kiln-benches --bench step

use std::sync::Arc;
use std::thread::available_parallelism;
use std::time::Duration;

use burn::tensor::Device;
use criterion::{Criterion, criterion_group, criterion_main};
use kiln::bench::{self, StrategiesOptions, default_config, strategies};
use kiln::losses::Loss;
use kiln::passes::RunLoss;
use kiln::registry::Registry;
use kiln::run::TrainError;
use kiln::sharded::ShardedDecoder;
use kiln_collectives::Communicator;
use kiln_model::decoder::Decoder;
use kiln_model::{Key, Layers, ModelConfig};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Policy};

fn step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step");
    group.sample_size(10);
    for ranks in [1, 2] {
        group.bench_function(format!("10m, FULL_SHARD, {ranks} ranks"), |bencher| {
            bencher.iter_custom(|iterations| {
                let steps = iterations as usize;
                let options = StrategiesOptions {
                    config: None,
                    ranks: Some(ranks),
                    place: None,
                    registry: Registry::default(),
                    steps,
                    rounds: 1,
                };
                let table = strategies(&options).expect("the default configuration runs");
                let tokens = steps * table.global_batch * table.seq_len;
                Duration::from_secs_f64(tokens as f64 / table.rows[0].tokens_per_s)
            });
        });
    }
    group.finish();
}

fn update(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("update");
    group.sample_size(10);
    let threads = available_parallelism().map_or(1, usize::from);
    group.bench_function("10m", |bencher| {
        bencher.iter_custom(|count| {
            let times = run_ranks(1, threads, |world| updates(world, count));
            times.expect("one rank has no other to fail").into_iter().sum()
        });
    });
    group.finish();
}

/// Returns the time of `count` updates, without the gradients that they need.
fn updates(world: Arc<dyn Communicator>, count: u64) -> Result<Duration, TrainError> {
    let device = Device::flex();
    let mut config = default_config();
    config.train.global_batch = 1;
    config.data.seq_len = 8;
    let model = ModelConfig::preset("10m").expect("a preset");
    let builder = EngineBuilder::new(world, Policy::default(), None)?;
    let decoder = Decoder::new(&Layers::default(), &model, Key::new(0), &device)?;
    let sharded = ShardedDecoder::new(decoder, builder)?;
    let loss = RunLoss::from(Loss::CrossEntropy);
    let update = |number| Ok(bench::step(&config, &sharded, &device, &loss, number)?.update);
    (0..count).map(update).sum()
}

criterion_group!(benches, step, update);
criterion_main!(benches);
