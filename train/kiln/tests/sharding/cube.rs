//! The engine on CubeCL's tensors and buffers, with ranks as threads on one device: wgpu, for which any
//! Vulkan driver is sufficient, also one that computes on the CPU; or an NVIDIA GPU if `KILN_TEST_DEVICE` is
//! `cuda`.

use burn::tensor::{Device, DeviceKind};
use kiln_collectives::DType;
use kiln_shard::{Accumulate, LossScale, Muon, Recompute, Reshard, StateKind, Strategy};

use crate::bits::assert_same_bits;
use crate::reference;
use crate::support::{LEARNING_RATE, Rank, Run, Trace, assert_within};

/// Tolerance for a different order of sums, and different functions for roots and exponentials, than on the CPU.
const TOLERANCE: f64 = 1e-4;

/// Muon's directions come from burn's matrix products, which round f32 to TF32 on NVIDIA GPUs, by up to 2⁻¹¹
/// of each operand; and the second step starts from the result of the first.
const CUDA_MUON_TOLERANCE: f64 = 1e-2;

/// Tolerance for bf16, with eight significant bits, through three blocks forward and backward.
const BF16_TOLERANCE: f64 = 3e-2;

fn is_cuda() -> bool {
    std::env::var("KILN_TEST_DEVICE").as_deref() == Ok("cuda")
}

/// Number of steps; each moves all weights by their gradients.
const STEPS: u64 = 2;

fn device() -> Device {
    match std::env::var("KILN_TEST_DEVICE").as_deref() {
        Err(_) | Ok("wgpu") => Device::wgpu(DeviceKind::DefaultDevice),
        #[cfg(feature = "cuda")]
        Ok("cuda") => {
            kiln_nvidia::prepare_compiler();
            Device::cuda(0)
        }
        Ok(other) => panic!("KILN_TEST_DEVICE={other}: must be wgpu, or cuda in a build with it"),
    }
}

fn on_gpu(strategy: Strategy, ranks: usize) -> Run {
    Run { device, ..Run::new(strategy, ranks).steps(STEPS) }
}

fn expected(run: &Run) -> Trace {
    reference::train(&Run { device: Device::flex, ..run.clone() })
}

fn check(run: Run) {
    check_within(TOLERANCE, &run);
}

fn check_within(tolerance: f64, run: &Run) {
    assert_within(tolerance, &run.name(), &run.train(), &expected(run));
}

#[test]
fn every_strategy_trains_as_on_the_cpu() {
    for ranks in [2, 4] {
        for strategy in [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard] {
            check(on_gpu(strategy, ranks));
        }
    }
    for strategy in [Strategy::HybridShard, Strategy::HybridShardGradOp] {
        check(on_gpu(strategy, 4).shard_size(2));
    }
}

#[test]
fn recomputed_blocks_and_micro_batches() {
    for recompute in [Recompute::None, Recompute::Selective, Recompute::Block] {
        check(on_gpu(Strategy::FullShard, 2).recompute(recompute).accumulation(2).tied(true));
    }
    check(on_gpu(Strategy::FullShard, 2).reshard(Reshard::Always));
    for (strategy, accumulate) in [
        (Strategy::FullShard, Accumulate::Unsharded),
        (Strategy::NoShard, Accumulate::Sharded),
        (Strategy::HybridShard, Accumulate::Sharded),
    ] {
        let mut run = on_gpu(strategy, 4).accumulation(3).accumulate(accumulate);
        run.shard_size = strategy.is_hybrid().then_some(2);
        check(run);
    }
}

/// Returns a run with heads of width 64, which the attention kernels process whole, on tensor cores in half
/// precision; the sequence length is odd.
fn with_wide_heads(strategy: Strategy, ranks: usize) -> Run {
    let mut run = Run { batch: 8, seq: 9, ..on_gpu(strategy, ranks) };
    run.model.heads = 2;
    run.model.kv_heads = 1;
    run.model.head_dim = Some(64);
    run
}

const PURE: [Strategy; 3] = [Strategy::FullShard, Strategy::ShardGradOp, Strategy::NoShard];

#[test]
fn strategies_and_recomputation_agree_bit_for_bit() {
    for (ranks, recomputes) in [(2, &[Recompute::None, Recompute::Block][..]), (4, &[Recompute::Block])] {
        let first = with_wide_heads(PURE[0], ranks).train();
        assert_within(TOLERANCE, "wide heads", &first, &expected(&with_wide_heads(PURE[0], ranks)));
        for strategy in PURE {
            for &recompute in recomputes {
                let run = with_wide_heads(strategy, ranks).recompute(recompute);
                assert_same_bits(&run.name(), &run.train(), &first);
            }
        }
    }
}

/// bf16, which training on NVIDIA GPUs uses, is not available through wgpu.
#[test]
fn bf16_trains_alike_on_cuda() {
    if !is_cuda() {
        eprintln!("SKIPPED: KILN_TEST_DEVICE is not cuda");
        return;
    }
    let in_bf16 = |strategy, ranks| {
        let mut run = with_wide_heads(strategy, ranks);
        run.policy.compute_dtype = DType::BF16;
        run
    };
    let expected = expected(&with_wide_heads(Strategy::FullShard, 1));
    for ranks in [2, 4] {
        let first = in_bf16(PURE[0], ranks).train();
        assert_within(BF16_TOLERANCE, "bf16", &first, &expected);
        for strategy in &PURE[1..] {
            let run = in_bf16(*strategy, ranks);
            assert_same_bits(&run.name(), &run.train(), &first);
        }
        if ranks == 2 {
            let run = in_bf16(PURE[0], ranks).recompute(Recompute::Block);
            assert_same_bits(&run.name(), &run.train(), &first);
        }
    }
    for strategy in [Strategy::HybridShard, Strategy::HybridShardGradOp] {
        let run = in_bf16(strategy, 4).shard_size(2);
        assert_within(BF16_TOLERANCE, &run.name(), &run.train(), &expected);
    }
}

/// Muon's directions, whole matrices and updates are on the device; tested also with state on the host.
#[test]
fn muon_trains_as_on_the_cpu() {
    let muon = Some(Muon { learning_rate: 20.0, ..Muon::default() });
    for (strategy, ranks) in [(Strategy::FullShard, 1), (Strategy::FullShard, 2), (Strategy::NoShard, 2)] {
        for offload in [false, true] {
            let mut run = Run { muon, ..on_gpu(strategy, ranks) };
            run.policy.offload = offload;
            check_within(if is_cuda() { CUDA_MUON_TOLERANCE } else { TOLERANCE }, &run);
        }
    }
}

#[test]
fn one_rank_alone() {
    check(on_gpu(Strategy::FullShard, 1));
}

#[test]
fn state_on_the_host_trains_alike() {
    for (strategy, ranks) in [(Strategy::FullShard, 2), (Strategy::FullShard, 1), (Strategy::NoShard, 2)] {
        let mut run = on_gpu(strategy, ranks).accumulation(2);
        run.policy.offload = true;
        check(run);
    }
}

fn in_half_precision() -> Run {
    let mut run = on_gpu(Strategy::FullShard, 2);
    run.policy.compute_dtype = DType::F16;
    run
}

/// The loss is scaled; the reported values are not.
#[test]
fn half_precision_trains_alike() {
    let run = in_half_precision();
    // Until the update, gradients are those of the scaled loss.
    let without_gradients = |trace: Trace| Trace { gradients: Vec::new(), ..trace };
    let expected = without_gradients(expected(&on_gpu(Strategy::FullShard, 2)));
    // Tolerance for eleven significant bits, through three blocks forward and backward.
    assert_within(2e-2, &run.name(), &without_gradients(run.train()), &expected);
}

/// A scale that is too large skips updates until it is small enough.
#[test]
fn the_loss_scale_adapts() {
    let run = in_half_precision();
    run.on_ranks(|world| {
        let rank = Rank::start(&run, world)?;
        let engine = rank.engine();
        let start = 2f64.powi(24);
        engine.resume(0, Some(LossScale { scale: start, steps: 7 }));
        let before = rank.values(StateKind::Weight)?;
        let mut left_out = 0;
        let outcome = loop {
            rank.gradients(1)?;
            let update = engine.update(LEARNING_RATE, run.max_norm)?;
            let outcome = engine.outcome(update)?;
            if outcome.applied {
                break outcome;
            }
            left_out += 1;
            assert!(outcome.overflowed && outcome.non_finite.is_none(), "{outcome:?}");
            let scale = start / 2f64.powi(left_out);
            assert_eq!(outcome.loss_scale, Some(LossScale { scale, steps: 0 }));
            assert!(rank.values(StateKind::Weight)? == before, "weights stay as they are");
        };
        assert!(left_out > 0, "2^24 overflows");
        let scale = start / 2f64.powi(left_out);
        assert_eq!(outcome.loss_scale, Some(LossScale { scale, steps: 1 }));
        assert!(rank.values(StateKind::Weight)? != before, "weights move");
        Ok(())
    });
}

#[test]
fn frozen_parameters_stay() {
    let frozen = |name: &str| name.starts_with("layers.1.");
    check(on_gpu(Strategy::FullShard, 2).frozen(frozen));
}
