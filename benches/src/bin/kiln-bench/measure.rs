//! Timed training steps on made-up tokens.

use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Device;
use kiln::bench::step;
#[cfg(feature = "cuda")]
use kiln::config::Backend;
use kiln::config::Config;
use kiln::device::threads_per_rank;
use kiln::losses::Loss;
use kiln::optimizers::Optimizers;
use kiln::passes::RunLoss;
use kiln::run::{TrainError, lay_out_memory};
use kiln::sharded::ShardedDecoder;
use kiln_collectives::Communicator;
#[cfg(feature = "cuda")]
use kiln_collectives::{
    LocalGroup,
    nccl::{self, NcclOptions},
};
use kiln_model::decoder::Decoder;
use kiln_model::{Key, Layers, ModelConfig};
use kiln_shard::ranks::run_ranks;
#[cfg(feature = "cuda")]
use kiln_shard::ranks::run_ranks_on;
use kiln_shard::{EngineBuilder, memory};

use crate::process;

#[derive(Clone, Copy, Debug)]
pub struct Steps {
    pub timed: usize,
    /// Steps before the timed ones, at least one.
    pub warmup: usize,
}

/// Measured steps of a configuration. Times are in seconds, those of the slowest rank.
#[derive(Clone, Debug, Default)]
pub struct Measured {
    /// Each step, until the device has completed all of its work.
    pub steps: Vec<f64>,
    /// The update in each step, until the device has completed it.
    pub updates: Vec<f64>,
    /// Each step until the host had queued it for the device ([`StepTimes::queued`](kiln::bench::StepTimes)).
    pub queued: Vec<f64>,
    /// Time from the start of the process to the end of the first step, if the system reports it.
    pub first_step: Option<f64>,
    pub parameters: usize,
    /// FLOPs of a step per token, by [`Decoder::flops_per_token`].
    pub flops_per_token: f64,
    /// Peak bytes of host memory of each rank, by the counting allocator.
    pub rank_bytes: Vec<u64>,
    /// Peak bytes that the device's allocator reserved; `None` if tensors are in host memory.
    pub device_bytes: Option<u64>,
    pub device_used: Option<u64>,
}

impl Measured {
    /// Combines two ranks: a step is over when it is over on both.
    fn and(mut self, other: Measured) -> Measured {
        for (ours, theirs) in [
            (&mut self.steps, other.steps),
            (&mut self.updates, other.updates),
            (&mut self.queued, other.queued),
        ] {
            ours.iter_mut().zip(theirs).for_each(|(ours, theirs)| *ours = ours.max(theirs));
        }
        self.first_step = self.first_step.into_iter().chain(other.first_step).reduce(f64::max);
        self.rank_bytes.extend(other.rank_bytes);
        self.device_bytes = self.device_bytes.max(other.device_bytes);
        self.device_used = self.device_used.max(other.device_used);
        self
    }
}

/// Runs the steps of `config`, with ranks as threads. On CUDA, a single rank uses NCCL, as in a run of several
/// processes.
pub fn measure(
    config: &Config,
    model: &ModelConfig,
    device: &Device,
    count: Steps,
) -> Result<Measured, TrainError> {
    let ranks = config.train.ranks;
    let optimizer = Optimizers::default().make(&config.optim)?;
    let threads = threads_per_rank(&config.device, ranks);
    // Memory left in the device's allocator by earlier work is not counted.
    let before = reserved(device).unwrap_or(0);
    let body = |world: Arc<dyn Communicator>| -> Result<_, TrainError> {
        let rank = world.rank();
        memory::reset_peak(rank);
        let decoder = Decoder::new(&Layers::default(), model, Key::new(config.train.seed), device)?;
        let flops_per_token = decoder.flops_per_token(config.data.seq_len);
        let builder = EngineBuilder::new(world, config.policy(), config.shard.shard_size)?;
        let builder = builder.optimizer(optimizer.clone());
        lay_out_memory(config, model, &decoder, &optimizer, device);
        let sharded = ShardedDecoder::new(decoder, builder)?;
        let parameters = sharded.engine().layout().num_parameters();
        let mut own = Measured { parameters, flops_per_token, ..Measured::default() };
        let loss = RunLoss::from(Loss::CrossEntropy);
        for index in 0..count.warmup.max(1) + count.timed {
            let start = Instant::now();
            let times = step(config, &sharded, device, &loss, 1 + index as u64)?;
            let waits = Instant::now();
            sync(device)?;
            if index >= count.warmup.max(1) {
                own.steps.push(start.elapsed().as_secs_f64());
                own.updates.push((times.update + waits.elapsed()).as_secs_f64());
                own.queued.push(times.queued.as_secs_f64());
            } else if index == 0 {
                own.first_step = process::age();
            }
            own.device_bytes = own.device_bytes.max(reserved(device));
        }
        own.device_used = device.memory_pool_usage().map(|usage| usage.bytes_in_use);
        own.rank_bytes = vec![memory::peak_bytes(rank) as u64];
        Ok(own)
    };
    let mut measured = on_ranks(config, threads, body)?.into_iter().reduce(Measured::and).unwrap_or_default();
    measured.device_bytes = measured.device_bytes.map(|bytes| bytes.saturating_sub(before));
    Ok(measured)
}

fn on_ranks<T: Send>(
    config: &Config,
    threads: usize,
    body: impl Fn(Arc<dyn Communicator>) -> Result<T, TrainError> + Sync,
) -> Result<Vec<T>, TrainError> {
    #[cfg(feature = "cuda")]
    if config.train.ranks == 1 && config.shard.communicate_alone && config.device.backend == Backend::Cuda {
        let (world, index) = (LocalGroup::new(1).remove(0), 0);
        nccl::attach(&world, &NcclOptions::new(index)).map_err(|source| TrainError::Nccl {
            rank: 0,
            index,
            source: Box::new(source),
        })?;
        return Ok(run_ranks_on(vec![world], threads, body)?);
    }
    Ok(run_ranks(config.train.ranks, threads, body)?)
}

pub fn sync(device: &Device) -> Result<(), TrainError> {
    device.sync().map_err(|error| TrainError::Crash(format!("the device failed: {error}")))
}

fn reserved(device: &Device) -> Option<u64> {
    device.memory_pool_usage().map(|usage| usage.bytes_reserved)
}
