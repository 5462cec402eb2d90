//! Recorded allocations, compared with counted bytes.

use std::sync::PoisonError;

use burn::tensor::Device;
use kiln::sharded::ShardedDecoder;
use kiln_model::{Context, decoder};
use kiln_shard::memory::{self, MemoryOwner};
use kiln_shard::ranks::run_ranks;
use kiln_shard::{EngineBuilder, Policy, ShardError, Strategy};

use super::{ONE_AT_A_TIME, RANKS, config, ids};

#[test]
fn a_profile_has_the_bytes_of_the_counters() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    for strategy in [Strategy::FullShard, Strategy::NoShard] {
        let policy = Policy { strategy, ..Policy::default() };
        run_ranks(RANKS, 1, |world| -> Result<(), ShardError> {
            let rank = world.rank();
            let plain = Device::flex();
            let training = plain.clone().autodiff();
            let builder = EngineBuilder::new(world.clone(), policy.clone(), None)?;
            let model = ShardedDecoder::new(super::decoder(&config(false), &plain), builder)?;
            let engine = model.engine();
            let step = || -> Result<(), ShardError> {
                engine.begin_step();
                let context = Context::evaluation();
                let loss =
                    decoder::loss(&model.pass(&training), ids(&training), ids(&training), 1.0, &context);
                engine.backward(loss, true)?;
                let update = engine.update(1e-3, 1.0)?;
                engine.outcome(update)?;
                Ok(())
            };
            step()?;
            engine.sum_over_ranks("before", &[1.0])?;
            memory::reset_peak(rank);
            let profiler = memory::begin_profile(rank).expect("it is counted");
            step()?;
            // After this sum, no transfer of this rank is in progress.
            engine.sum_over_ranks("after", &[1.0])?;
            let profile = profiler.end();
            let peak = memory::peak_bytes(rank) as i64;

            let mut now: i64 = profile.held.iter().map(|bytes| *bytes as i64).sum();
            let mut most = now;
            for change in &profile.changes {
                now += change.bytes;
                most = most.max(now);
            }
            assert_eq!((now, profile.missing), (profile.held_at_end as i64, 0), "{strategy}");
            // Threads may count and record in different orders.
            assert!((most - peak).abs() <= peak / 100, "{strategy}: {most} recorded, {peak} counted");
            for owner in [
                MemoryOwner::Activations,
                MemoryOwner::Weights,
                MemoryOwner::OptimizerState,
                MemoryOwner::Gradients,
                MemoryOwner::GatheredWeights,
            ] {
                assert!(profile.holders.iter().any(|holder| holder.owner == owner), "{strategy}: {owner:?}");
            }
            let modules = profile.holders.iter().filter_map(|holder| holder.module.as_deref());
            assert!(modules.filter(|module| module.starts_with("layers.")).count() >= 6, "{strategy}");
            Ok(())
        })
        .expect("all ranks succeed");
    }
}
