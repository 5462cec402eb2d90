//! A whole optimizer step of preset 10m under each strategy. `kiln bench strategies` compares the
//! strategies in one alternating run; this one is for finding out what a change does to a step.
//!
//!     cargo bench -p kiln-benches --bench step

use criterion::{Criterion, criterion_group, criterion_main};
use kiln::bench::{StrategiesOptions, strategies};
use std::time::Duration;

fn step(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("step");
    group.sample_size(10);
    for ranks in [1, 2] {
        group.bench_function(format!("10m, FULL_SHARD, {ranks} ranks"), |bencher| {
            bencher.iter_custom(|iterations| {
                let steps = iterations as usize;
                let options = StrategiesOptions { config: None, ranks, steps, rounds: 1 };
                let table = strategies(&options).expect("the default configuration runs");
                let tokens = steps * table.global_batch * table.seq_len;
                Duration::from_secs_f64(tokens as f64 / table.rows[0].tokens_per_s)
            });
        });
    }
    group.finish();
}

criterion_group!(benches, step);
criterion_main!(benches);
