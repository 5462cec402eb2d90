//! Gathers and reductions of the `local` backend over buffer sizes.
//!
//!     cargo bench -p kiln-benches --bench collectives

use std::sync::Arc;
use std::time::{Duration, Instant};

use criterion::{BenchmarkId, Criterion, Throughput, criterion_group, criterion_main};
use kiln_collectives::{Buffer, Communicator, DType, Label, LocalGroup, Phase};

const RANKS: usize = 2;
const PATIENCE: Duration = Duration::from_secs(60);

/// Returns the time of `iterations` collectives of all ranks, on rank 0.
fn time(iterations: u64, call: impl Fn(&dyn Communicator) + Sync) -> Duration {
    let elapsed = std::thread::scope(|scope| {
        let ranks: Vec<_> = LocalGroup::new(RANKS)
            .into_iter()
            .map(|communicator| {
                let call = &call;
                scope.spawn(move || {
                    let start = Instant::now();
                    for _ in 0..iterations {
                        call(&communicator);
                    }
                    start.elapsed()
                })
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().expect("a rank panicked")).collect::<Vec<_>>()
    });
    elapsed[0]
}

fn collectives(criterion: &mut Criterion) {
    let label = || Label::new("bench", Phase::Other);
    for (name, reduce) in [("all_gather", false), ("reduce_scatter", true)] {
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10);
        for elements in [1 << 8, 1 << 14, 1 << 20, 1 << 24] {
            group.throughput(Throughput::Bytes(4 * elements as u64));
            group.bench_function(BenchmarkId::from_parameter(4 * elements), |bencher| {
                bencher.iter_custom(|iterations| {
                    let whole = Arc::new(Buffer::zeros(DType::F32, elements));
                    let shard = Arc::new(Buffer::zeros(DType::F32, elements / RANKS));
                    time(iterations, |communicator| {
                        let work = if reduce {
                            let output = Buffer::zeros(DType::F32, elements / RANKS);
                            communicator.reduce_scatter(label(), whole.clone(), output)
                        } else {
                            let output = Buffer::zeros(DType::F32, elements);
                            communicator.all_gather(label(), shard.clone(), output)
                        };
                        work.wait(PATIENCE).expect("the collective succeeds");
                    })
                });
            });
        }
        group.finish();
    }
}

criterion_group!(benches, collectives);
criterion_main!(benches);
