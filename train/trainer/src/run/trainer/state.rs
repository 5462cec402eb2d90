//! The state of a rank during a run, its construction, and the queries for training loops.

use std::collections::BTreeSet;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::{Duration, Instant};

use burn::tensor::Device;
use kiln_collectives::Communicator;
use kiln_model::decoder::Decoder;
use kiln_model::layers::is_adapter;
use kiln_observe::run::Sample;
use kiln_observe::tensorboard::{TensorBoard, TensorBoardOptions};
use kiln_shard::{Engine, EngineBuilder, Recompute};

use super::groups::GroupTable;
use super::issued::{ClockReading, IssuedStep};
use super::pace::{Grace, Pace};
use super::start::{introduce, started_as};
use crate::error::{Result, TrainError};
use crate::fault::Drill;
use crate::flight;
use crate::logged::check_name;
use crate::metrics::{Reporter, StepMetrics, print_line};
use crate::passes::RunLoss;
use crate::process::output::ProgressLine;
use crate::process::{keep_crashes, position};
use crate::run::events::EventKind;
use crate::run::folder::metrics_of_run;
use crate::run::memory::lay_out_memory;
use crate::run::observe::{Controls, ObservedRank, Observers, Reach};
use crate::run::plan::Plan;
use crate::run::startup::StartTimes;
use crate::values::Values;
use kiln_checkpoint::sharded::{ShardedDecoder, parameter_shapes};
use kiln_checkpoint::{self as checkpoint, Architecture, CheckpointState, Saver};
use kiln_config::Config;
use kiln_config::device::Peak;
use kiln_data::{BatchSource, Samples, Split};
use kiln_sys::words::number_of;

/// One rank in the middle of a run: the interface for training loops, such as [`Trainer::run`]. A program supplies
/// a custom loop through [`Registry::training_loop`](crate::registry::Registry::training_loop).
///
/// All ranks must call the same methods in the same order: each method is collective unless it only reads.
/// Losses are the same on all ranks, times are not. Ranks that decide by a value that differs must first agree through
/// [`Engine::sum_over_ranks`](kiln_shard::Engine::sum_over_ranks).
///
/// Variables of the loop itself are not saved, and start anew when the run is resumed.
///
/// ```
/// use kiln_train::run::{LoopResult, Trainer};
///
/// fn my_loop(mut trainer: Trainer<'_>) -> LoopResult {
///     while trainer.train_step()? {
///         if trainer.step().is_multiple_of(100) {
///             trainer.evaluate()?;
///             trainer.save()?;
///         }
///     }
///     Ok(trainer.finish()?)
/// }
/// ```
pub struct Trainer<'a> {
    pub(super) plan: &'a Plan,
    pub(super) rank: usize,
    pub(super) ranks: usize,
    pub(super) model: ShardedDecoder,
    pub(super) loss: Arc<RunLoss>,
    /// The loss of the last step, which a loop may choose itself.
    pub(super) last_loss: Arc<RunLoss>,
    pub(super) device: Device,
    pub(super) data: Splits,
    pub(super) state: CheckpointState,
    pub(super) progress: Progress,
    pub(super) speed: SpeedMeter,
    pub(super) saves: Saves,
    pub(super) watchers: Watchers,
    pub(super) stops: StopChecks,
    pub(super) reporter: Option<Reporter>,
}

pub(super) struct Splits {
    pub(super) train: BatchSource,
    pub(super) validation: BatchSource,
}

pub(super) struct Progress {
    pub(super) first_step: u64,
    pub(super) first_tokens: u64,
    pub(super) has_trained: bool,
    /// The last step, while its outcome is not known yet.
    pub(super) issued: Option<IssuedStep>,
    pub(super) metrics: Option<StepMetrics>,
    /// Values that the loop has recorded for the next step.
    pub(super) values: Values,
    pub(super) skipped_in_a_row: u64,
    pub(super) evaluated: Option<(u64, f64)>,
    pub(super) sampled: Option<(u64, Vec<Text>)>,
    pub(super) is_stopping: bool,
}

pub(super) struct SpeedMeter {
    pub(super) flops_per_token: f64,
    pub(super) peak: Option<Peak>,
    /// End of the last step whose values are known.
    pub(super) settled: ClockReading,
    pub(super) in_steps: f64,
    pub(super) start_took: Duration,
    pub(super) start_times: Option<StartTimes>,
}

pub(super) struct Saves {
    pub(super) saver: Saver,
    pub(super) begun: Option<u64>,
    pub(super) last: Option<PathBuf>,
}

pub(super) struct Watchers {
    pub(super) observers: Observers,
    pub(super) controls: Controls,
    /// Reports the rank's position in the run if a signal ends the process.
    pub(super) position: position::RankPosition,
    pub(super) drill: Option<Arc<Drill>>,
}

pub(super) struct StopChecks {
    pub(super) pace: Pace,
    pub(super) grace: Grace,
}

#[derive(Clone, Debug)]
pub(super) struct Text {
    pub(super) whole: String,
    pub(super) sample: Sample,
}

impl<'a> Trainer<'a> {
    /// Creates a rank of `plan` before its first step, with its weights. Collective.
    pub(in crate::run) fn start(
        plan: &'a Plan,
        world: Arc<dyn Communicator>,
        drill: Option<Arc<Drill>>,
    ) -> Result<Self> {
        let started = Instant::now();
        world.recorder().set_activity("start");
        keep_crashes();
        let position = position::RankPosition::new(&plan.out, world.view(), flight::made_later(&world));
        let Plan { config, model, .. } = plan;
        let (rank, ranks) = (world.rank(), world.world_size());
        let data = |split, shuffle| {
            let (section, sources) = (&config.data, plan.registry.sources());
            let samples = Samples::open(&section.path, split, section.seq_len, sources)?;
            BatchSource::new(samples, shuffle, config.train.seed)
        };
        let train = data(Split::Train, config.data.shuffle)?;
        let validation = data(Split::Validation, false)?;
        let device = plan.device.device();
        let builder = EngineBuilder::new(world.clone(), config.policy(), config.shard.shard_size)?
            .optimizer(plan.optimizer.clone())
            .freeze(config.frozen());
        let allow_missing = plan.allow_missing.clone();
        let is_loaded = plan.source.is_some();
        let has_adapters = plan.source.as_ref().is_some_and(|source| source.model().lora.is_some());
        let builder = builder.load_later(move |name| {
            is_loaded && !allow_missing.allows(name) && (has_adapters || !is_adapter(name))
        });
        let decoder = Decoder::new(plan.registry.layers(), model, plan.key().fork("init"), &device)?;
        // Computed from the unsharded decoder: a sharded one has only placeholders.
        let flops_per_token = decoder.flops_per_token(config.data.seq_len);
        if rank == 0 {
            let shapes = parameter_shapes(&decoder);
            let numbers = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>());
            introduce(plan, numbers.sum(), ranks, &train)?;
        }
        if plan.device.is_gpu() {
            lay_out_memory(config, model, &decoder, &plan.optimizer, &device);
        }
        let mut start = plan.start.clone();
        let model = start.time("weights", || {
            let what = if is_loaded { "allocating the weights" } else { "initialising the weights" };
            let line = (rank == 0).then(|| ProgressLine::start(what, "the first module"));
            ShardedDecoder::with_progress(decoder, builder, |done, all| {
                let set = |line: &ProgressLine| {
                    line.set(format!("{done} of {all} modules"), done as u64, all as u64);
                };
                line.iter().for_each(set);
            })
        })?;
        if rank == 0 {
            let table =
                GroupTable::from_engine(model.engine(), plan.config.shard.offload && plan.device.is_gpu());
            print_line(&table.summary());
            table.lines().iter().for_each(|line| tracing::info!("{line}"));
        }
        let layers = plan.registry.layers();
        let loss = Arc::new(RunLoss::load(plan.loss.clone(), layers, config, &world, &device)?);
        let mut state = CheckpointState {
            seed: config.train.seed,
            data_sha256: plan.message.data.train.sha256.clone(),
            ..CheckpointState::new(plan.model.clone(), plan.inherited.context_length)
        };
        let mut absent = BTreeSet::new();
        if let Some(checkpoint) = &plan.resume {
            start.time("load", || -> Result<()> {
                let reader = checkpoint.reader();
                let _line = (rank == 0).then(|| ProgressLine::for_bytes("loading", reader.meter()));
                absent = match &plan.source {
                    Some(source) if checkpoint.manifest().base.is_some() => {
                        source.load_weights(model.engine(), &plan.allow_missing)?
                    }
                    _ => reader.load_weights(model.engine(), &plan.allow_missing)?,
                };
                Ok(reader.load_optimizer(model.engine(), &plan.allow_missing)?)
            })?;
            let CheckpointState { step, skipped, loss_scale, next_sample, tokens, .. } = *checkpoint.state();
            state = CheckpointState { step, skipped, loss_scale, next_sample, tokens, ..state };
            position.saved(step);
        } else if let Some(source) = &plan.source {
            if rank == 0 {
                print_line(&format!("loading the weights of {}", source.folder().display()));
            }
            absent = start.time("load", || source.load_weights(model.engine(), &plan.allow_missing))?;
        }
        // Adapters of a model without are always new.
        absent.retain(|name| !is_adapter(name));
        if rank == 0 && !absent.is_empty() {
            let names: Vec<_> = absent.into_iter().collect();
            print_line(&format!("not in the checkpoint, kept as initialised: {}", names.join(", ")));
        }
        if let (0, Some(source), false) = (rank, &plan.source, plan.allow_missing.is_empty()) {
            let weights = source.weights();
            let mut unused = weights.shapes();
            model.engine().layout().parameters().for_each(|(_, parameter)| {
                unused.remove(parameter.name.as_str());
            });
            if !unused.is_empty() {
                let names: Vec<_> = unused.into_keys().collect();
                print_line(&format!("not in the model, left out: {}", names.join(", ")));
            }
        }
        let controls = Controls::default();
        let observers = plan.tools.as_ref().map_or_else(Vec::new, |tools| {
            tools.observers(ObservedRank {
                rank,
                device: plan.device.clone(),
                controls: controls.clone(),
                stop: plan.stop.clone(),
                tokenizer: plan.tokenizer.clone(),
                seq_len: config.data.seq_len,
                rows: config.micro_batch(),
                out: plan.out.clone(),
                reach: Reach {
                    steps: state.step + 1..=config.train.steps,
                    layers: plan.model.layers,
                    has_own_places: Architecture::from_model(&plan.model) != Architecture::decoder(),
                    recomputes: matches!(config.shard.recompute(), Recompute::Block | Recompute::Every(_)),
                },
            })
        });
        let mut trainer = Trainer {
            plan,
            rank,
            ranks,
            model,
            last_loss: loss.clone(),
            loss,
            device,
            data: Splits { train, validation },
            progress: Progress {
                first_step: state.step,
                first_tokens: state.tokens,
                has_trained: false,
                issued: None,
                metrics: None,
                values: Values::default(),
                skipped_in_a_row: 0,
                evaluated: None,
                sampled: None,
                is_stopping: false,
            },
            state,
            speed: SpeedMeter {
                flops_per_token,
                peak: plan.message.peak.clone(),
                settled: ClockReading { at: started, held: Duration::ZERO, times: Vec::new() },
                in_steps: 0.0,
                start_took: Duration::ZERO,
                start_times: (rank == 0).then_some(start),
            },
            saves: Saves { saver: Saver::new(plan.save_options(), rank), begun: None, last: None },
            watchers: Watchers { observers: Observers::new(observers), controls, position, drill },
            stops: StopChecks { pace: Pace::new(), grace: Grace::new()? },
            reporter: None,
        };
        trainer.reporter = trainer.begin_log()?;
        trainer.progress.is_stopping = !trainer.is_complete() && trainer.asked_to_stop()?;
        Ok(trainer)
    }

    fn begin_log(&self) -> Result<Option<Reporter>> {
        if self.rank != 0 {
            return Ok(None);
        }
        let path = metrics_of_run(&self.plan.out);
        let steps = self.plan.config.train.steps;
        match &self.plan.claim {
            // The folder stays unchanged: its configuration must not have fewer steps than the run has done.
            Some(_) if self.state.step > steps => print_line(&format!(
                "nothing to train: the run has done {} steps, and train.steps is {steps}; its folder is \
                 unchanged. To continue, raise train.steps; to go back, name an earlier checkpoint with \
                 --resume",
                self.state.step
            )),
            Some(claim) => {
                claim.begin(&self.plan.message.config, self.plan.device.name(), self.state.step)?;
                if self.state.step == steps && self.plan.resume.is_some() {
                    print_line(&format!(
                        "nothing to train: all {steps} steps are done. To train on, raise train.steps, as with --set \
                         train.steps={}",
                        steps.saturating_mul(2)
                    ));
                }
            }
            None => {}
        }
        self.announce_removals();
        if let Some(claim) = self.plan.claim.as_ref().filter(|_| !self.is_complete()) {
            let (events, step) = (claim.events(), self.state.step);
            events
                .open(&self.plan.out, step)
                .map_err(TrainError::io("write events.jsonl in", &self.plan.out))?;
            let kind = if self.plan.resume.is_some() { EventKind::Resume } else { EventKind::Start };
            events.note(kind, step, &started_as(self.plan, self.ranks));
        }
        let reporter =
            Reporter::new(&path, self.state.step, steps, self.ranks, self.saves.saver.meter().clone());
        let reporter = reporter.map_err(TrainError::io("write", &path))?;
        let folder = self.plan.config.log.tensorboard.path(&self.plan.out);
        let tensorboard = folder.and_then(|folder| {
            let config = self.plan.message.config.clone();
            TensorBoard::start(TensorBoardOptions { folder, metrics: path, config, done: self.state.step })
        });
        Ok(Some(reporter.with_tensorboard(tensorboard)))
    }

    /// Records an event of the run, on rank 0 only.
    pub(super) fn note(&self, kind: EventKind, step: u64, text: &str) {
        let claim = self.plan.claim.as_ref().filter(|_| self.rank == 0);
        claim.into_iter().for_each(|claim| claim.events().note(kind, step, text));
    }

    pub(super) fn reached(&self) {
        let step = self.progress.metrics.as_ref().map(|metrics| metrics.step);
        if let (0, Some(claim), Some(step)) = (self.rank, &self.plan.claim, step) {
            claim.events().reach(step);
        }
    }

    fn announce_removals(&self) {
        let options = self.plan.save_options();
        let (there, surplus) = checkpoint::surplus(&options.folder, options.keep, self.state.step);
        if surplus > 0 && !self.is_complete() {
            print_line(&format!(
                "checkpoint.keep = {}: the next save removes {surplus} of the {} in {}; to keep them all, \
                 set checkpoint.keep = 0",
                options.keep.newest,
                number_of(there, "checkpoint"),
                options.folder.display()
            ));
        }
    }

    pub(super) fn is_complete(&self) -> bool {
        self.state.step >= self.plan.config.train.steps
    }

    /// Returns the configuration of the run, with all defaults resolved.
    pub fn config(&self) -> &Config {
        &self.plan.config
    }

    /// Returns the number of optimizer steps since the run began, including those before it was resumed.
    pub fn step(&self) -> u64 {
        self.state.step
    }

    /// Returns the metrics of the last step whose outcome is known: on a GPU, usually the second-to-last step.
    /// Loss, norm and learning rate are the same on all ranks; times and custom metrics are those of this rank.
    pub fn metrics(&self) -> Option<&StepMetrics> {
        self.progress.metrics.as_ref()
    }

    /// Returns the decoder, sharded over the ranks.
    pub fn model(&self) -> &ShardedDecoder {
        &self.model
    }

    /// Returns the engine of the ranks: weights, gradients, collectives.
    pub fn engine(&self) -> &Engine {
        self.model.engine()
    }

    /// Returns the device that the rank computes on, for [`ShardedDecoder::pass`].
    pub fn device(&self) -> &Device {
        &self.device
    }

    /// Logs `value` with the next step, as `name` in `metrics.jsonl`, if that step is logged. Metrics of the registry find
    /// it in [`StepMetrics::values`]. The value of rank 0 is written. Not collective.
    ///
    /// ```
    /// use kiln_train::run::{LoopResult, Trainer};
    ///
    /// fn my_loop(mut trainer: Trainer<'_>) -> LoopResult {
    ///     while trainer.train_step()? {
    ///         let norms = trainer.engine().weight_norms()?;
    ///         let largest = norms.iter().fold(0.0, |largest: f64, (_, norm)| largest.max(*norm));
    ///         trainer.record("largest_norm", largest);
    ///     }
    ///     Ok(trainer.finish()?)
    /// }
    /// ```
    ///
    /// # Panics
    ///
    /// If the name is empty, contains a dot, or is the name of another key.
    pub fn record(&mut self, name: &str, value: f64) {
        check_name(name);
        self.progress.values.set(name, value);
    }

    /// Prints a line on rank 0, next to the progress bar if there is one.
    pub fn print_line(&self, text: &str) {
        self.reporter.iter().for_each(|reporter| reporter.line(text));
    }
}
