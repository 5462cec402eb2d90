//! A rank in the middle of a run, and how it comes to be.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Device;
use kiln_collectives::Communicator;
use kiln_model::decoder::Decoder;
use kiln_shard::EngineBuilder;

use super::grace::Grace;
use super::pace::Pace;
use super::start::{LongTask, introduce};
use crate::checkpoint::{CheckpointState, Saver};
use crate::data::{BatchSource, Split, TokenFile};
use crate::device::Peak;
use crate::error::Result;
use crate::fault::Drill;
use crate::metrics::say;
use crate::process::position;
use crate::run::plan::{Plan, policy};
use crate::sharded::{ShardedDecoder, parameter_shapes};
use crate::source::ModelSource;

/// A rank in the middle of a run.
pub(in crate::run) struct Rank<'a> {
    pub(super) plan: &'a Plan,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) model: ShardedDecoder,
    pub(super) device: Device,
    pub(super) train: BatchSource,
    pub(super) validation: BatchSource,
    /// Where the run stands after the steps that were done.
    pub(super) state: CheckpointState,
    /// Steps in a row, up to now, whose update was left out.
    pub(super) skipped_in_a_row: u64,
    /// When the values of a step were last known.
    pub(super) settled: Instant,
    pub(super) flops_per_token: f64,
    /// What `mfu` is held against.
    pub(super) peak: Peak,
    pub(super) saver: Saver,
    /// The last checkpoint of this run that is complete.
    pub(super) saved: Option<PathBuf>,
    pub(super) drill: Option<Arc<Drill>>,
    /// When the ranks ask each other whether to stop.
    pub(super) pace: Pace,
    pub(super) grace: Grace,
    /// Tells where this rank is if a signal ends the process.
    pub(super) position: position::Present,
    pub(super) started: Instant,
}

impl<'a> Rank<'a> {
    /// A rank of `plan` before its first step, with its weights.
    pub(in crate::run) fn start(
        plan: &'a Plan,
        world: Arc<dyn Communicator>,
        drill: Option<Arc<Drill>>,
    ) -> Result<Self> {
        let started = Instant::now();
        world.recorder().set_activity("start");
        let position = position::Present::new(world.rank(), world.recorder().clone());
        let Plan { config, model, .. } = plan;
        let (rank, ranks) = (world.rank(), world.world_size());
        let data = |split, shuffle| {
            let file = TokenFile::open(&config.data.path, split, config.data.seq_len)?;
            BatchSource::new(file, shuffle, config.train.seed)
        };
        let train = data(Split::Train, config.data.shuffle)?;
        let validation = data(Split::Validation, false)?;
        let device = plan.device.device();
        let freeze = config.train.freeze.clone();
        let builder = EngineBuilder::new(world, policy(config), config.shard.shard_size)?
            .optimizer(plan.optimizer.clone())
            .freeze(move |name| freeze.iter().any(|prefix| name.starts_with(prefix.as_str())));
        let allow_missing = plan.allow_missing.clone();
        let is_loaded = plan.resume.is_some() || !config.init.from.as_os_str().is_empty();
        let builder = builder.load_later(move |name| is_loaded && !allow_missing.allows(name));
        let decoder = Decoder::new(plan.registry.layers(), model, plan.key().fork("init"), &device)?;
        // Of the decoder as it was made: a sharded one has only placeholders.
        let flops_per_token = decoder.flops_per_token(config.data.seq_len);
        if rank == 0 {
            let shapes = parameter_shapes(&decoder);
            let numbers = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>());
            introduce(plan, numbers.sum(), ranks, &train)?;
        }
        let mut making = LongTask::begin("making the first weights", Instant::now());
        let model = ShardedDecoder::with_progress(decoder, builder, |done, all| {
            let text = making.at(Instant::now(), done, all).filter(|_| rank == 0);
            text.iter().for_each(|text| say(text));
        })?;
        let mut state = CheckpointState {
            step: 0,
            skipped: 0,
            loss_scale: None,
            next_sample: 0,
            tokens: 0,
            seed: config.train.seed,
            model: plan.model.clone(),
            context_length: config.data.seq_len,
            data_sha256: plan.message.data.train.sha256.clone(),
        };
        let mut absent = BTreeSet::new();
        if let Some(checkpoint) = &plan.resume {
            absent = checkpoint.reader().load_weights(model.engine(), &plan.allow_missing)?;
            checkpoint.reader().load_optimizer(model.engine(), &plan.allow_missing)?;
            let CheckpointState { step, skipped, loss_scale, next_sample, tokens, .. } = *checkpoint.state();
            state = CheckpointState { step, skipped, loss_scale, next_sample, tokens, ..state };
            position.saved(step);
        } else if !config.init.from.as_os_str().is_empty() {
            let source = ModelSource::open(&config.init.from)?;
            if rank == 0 {
                say(&format!("taking the weights of {}", source.folder().display()));
            }
            absent = source.load_weights(model.engine(), &plan.allow_missing)?;
        }
        if rank == 0 && !absent.is_empty() {
            let names: Vec<_> = absent.into_iter().collect();
            say(&format!("not in the checkpoint, kept as initialised: {}", names.join(", ")));
        }
        Ok(Rank {
            plan,
            rank,
            ranks,
            model,
            device,
            train,
            validation,
            state,
            skipped_in_a_row: 0,
            settled: started,
            flops_per_token,
            peak: plan.message.peak,
            saver: Saver::new(plan.save_options(), rank),
            saved: None,
            drill,
            pace: Pace::new(),
            grace: Grace::new()?,
            position,
            started,
        })
    }
}
