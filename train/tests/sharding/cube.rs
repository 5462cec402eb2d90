//! The engine on CubeCL's tensors and buffers, with ranks as threads on one device: wgpu, which any
//! Vulkan driver will do for, one that computes on the CPU too.

use burn::tensor::{Device, DeviceKind};
use kiln_shard::{Recompute, Reshard, Strategy};

use crate::reference;
use crate::support::{Run, Trace, assert_within};

/// Another order of sums, and other functions for roots and exponentials, than the CPU's.
const TOLERANCE: f64 = 1e-4;

/// Steps; each moves all weights by its gradient.
const STEPS: u64 = 2;

fn wgpu() -> Device {
    Device::wgpu(DeviceKind::DefaultDevice)
}

fn on_wgpu(strategy: Strategy, ranks: usize) -> Run {
    Run { device: wgpu, ..Run::new(strategy, ranks).steps(STEPS) }
}

fn expected(run: &Run) -> Trace {
    reference::train(&Run { device: Device::flex, ..run.clone() })
}

fn check(run: Run) {
    assert_within(TOLERANCE, &run.name(), &run.train(), &expected(&run));
}

#[test]
fn every_strategy_trains_as_on_the_cpu() {
    for ranks in [2, 4] {
        for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
            check(on_wgpu(strategy, ranks));
        }
    }
    for strategy in [Strategy::HybridShard, Strategy::HybridShardGradOp] {
        check(on_wgpu(strategy, 4).shard_size(2));
    }
}

#[test]
fn recomputed_blocks_and_micro_batches() {
    for recompute in [Recompute::None, Recompute::Block] {
        check(on_wgpu(Strategy::FullShard, 2).recompute(recompute).accumulation(2).tied(true));
    }
    check(on_wgpu(Strategy::FullShard, 2).reshard(Reshard::Always));
}

#[test]
fn one_rank_alone() {
    check(on_wgpu(Strategy::FullShard, 1));
}

#[test]
fn frozen_parameters_stay() {
    let frozen = |name: &str| name.starts_with("layers.1.");
    check(on_wgpu(Strategy::FullShard, 2).frozen(frozen));
}
