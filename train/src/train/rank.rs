//! What one rank does from the first to the last step.

mod grace;
mod pace;
mod save;
mod start;
mod step;
mod stop;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use burn::tensor::Device;
use kiln_collectives::Communicator;
use kiln_model::decoder::Decoder;
use kiln_model::layers::Layer;
use kiln_model::{Key, ModelConfig};
use kiln_shard::{EngineBuilder, LossScale};

use super::evaluate::evaluate_while;
use super::folder::metrics_of_run;
use super::{Plan, Summary, TrainError, policy};
use crate::checkpoint::{self, Saver};
use crate::data::{BatchSource, Split, TokenFile, Tokenizer};
use crate::device::Peak;
use crate::fault::Drill;
use crate::generate::{self, Sampling};
use crate::metrics::{EvalMetrics, Reporter, say};
use crate::process::position;
use crate::sharded::{ShardedDecoder, parameter_shapes};
use crate::source::ModelSource;
use crate::words::number_of;
use grace::Grace;
use pace::Pace;
use start::LongTask;

/// Makes the decoder of a run, weights not yet initialised.
pub(super) type MakeDecoder<'a, B> = dyn Fn(&ModelConfig, Key, &Device) -> Decoder<B> + Sync + 'a;

/// A rank in the middle of a run.
struct Rank<'a, B> {
    plan: &'a Plan,
    rank: usize,
    ranks: usize,
    model: ShardedDecoder<B>,
    device: Device,
    train: BatchSource,
    validation: BatchSource,
    /// Steps done, and where in the data the next one starts.
    step: u64,
    next_sample: u64,
    tokens: u64,
    /// Steps whose update was left out, in total and in a row up to now.
    skipped: u64,
    skipped_in_a_row: u64,
    /// What the loss is multiplied by, if gradients are `f16`.
    loss_scale: Option<LossScale>,
    /// When the values of a step were last known.
    settled: Instant,
    flops_per_token: f64,
    /// What `mfu` is held against.
    peak: Peak,
    saver: Saver,
    /// The last checkpoint of this run that is complete.
    saved: Option<PathBuf>,
    drill: Option<Arc<Drill>>,
    /// When the ranks ask each other whether to stop.
    pace: Pace,
    grace: Grace,
    /// Tells where this rank is if a signal ends the process.
    position: position::Present,
    started: Instant,
}

/// Runs one rank of `plan`.
pub(super) fn run<B: Layer>(
    plan: &Plan,
    world: Arc<dyn Communicator>,
    drill: Option<Arc<Drill>>,
    make_decoder: &MakeDecoder<'_, B>,
) -> Result<Summary, TrainError> {
    let rank = Rank::start(plan, world, drill, make_decoder)?;
    let reporter = match rank.rank {
        0 => {
            let path = metrics_of_run(&plan.out);
            match &plan.claim {
                Some(_) if rank.step > plan.config.train.steps => rank.announce_no_steps(),
                Some(claim) => claim.begin(&plan.config_text, rank.step)?,
                None => {}
            }
            rank.announce_removals();
            let reporter = Reporter::new(&path, rank.step, plan.config.train.steps);
            Some(reporter.map_err(TrainError::io("write", &path))?)
        }
        _ => None,
    };
    rank.train(reporter)
}

impl<'a, B: Layer> Rank<'a, B> {
    fn start(
        plan: &'a Plan,
        world: Arc<dyn Communicator>,
        drill: Option<Arc<Drill>>,
        make_decoder: &MakeDecoder<'_, B>,
    ) -> Result<Self, TrainError> {
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
            .freeze(move |name| freeze.iter().any(|prefix| name.starts_with(prefix.as_str())));
        let decoder = make_decoder(model, plan.key().fork("init"), &device);
        // Of the decoder as it was made: a sharded one has only placeholders.
        let active_parameters = decoder.active_parameters();
        if rank == 0 {
            let shapes = parameter_shapes(&decoder);
            let numbers = shapes.iter().map(|(_, shape)| shape.iter().product::<usize>());
            start::introduce(plan, numbers.sum(), ranks, &train)?;
        }
        let mut making = LongTask::begin("making the first weights", Instant::now());
        let model = ShardedDecoder::with_progress(decoder, builder, |done, all| {
            let text = making.at(Instant::now(), done, all).filter(|_| rank == 0);
            text.iter().for_each(|text| say(text));
        })?;
        let (mut step, mut next_sample, mut tokens, mut skipped) = (0, 0, 0, 0);
        let mut loss_scale = None;
        let mut absent = BTreeSet::new();
        if let Some(checkpoint) = &plan.resume {
            absent = checkpoint.load_weights(model.engine(), &plan.allow_missing)?;
            checkpoint.load_optimizer(model.engine(), &plan.allow_missing)?;
            let state = checkpoint.state();
            (step, next_sample, tokens) = (state.step, state.next_sample, state.tokens);
            position.saved(step);
            (skipped, loss_scale) = (state.skipped, state.loss_scale);
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
        let flops_per_token = plan.model.flops_per_token(active_parameters, config.data.seq_len);
        Ok(Rank {
            plan,
            rank,
            ranks,
            model,
            device,
            train,
            validation,
            step,
            next_sample,
            tokens,
            skipped,
            skipped_in_a_row: 0,
            loss_scale,
            settled: started,
            flops_per_token,
            peak: plan.peak,
            saver: Saver::new(save::options(plan), rank),
            saved: None,
            drill,
            pace: Pace::new(),
            grace: Grace::new()?,
            position,
            started,
        })
    }

    /// Says that the run has come further than the configuration asks: nothing in its folder changes, or it
    /// would say that the run has fewer steps than it has.
    fn announce_no_steps(&self) {
        say(&format!(
            "nothing to train: the run has done {} steps, and train.steps is {}; its folder stays as it is. To \
             go on, raise train.steps; to go back, name an earlier checkpoint with --resume",
            self.step, self.plan.config.train.steps
        ));
    }

    /// Says if checkpoints that earlier starts have kept are about to be removed.
    fn announce_removals(&self) {
        let options = save::options(self.plan);
        let (there, surplus) = checkpoint::surplus(&options.folder, options.keep, self.step);
        if surplus > 0 && self.step < self.plan.config.train.steps {
            say(&format!(
                "checkpoint.keep = {}: the next save removes {surplus} of the {} in {}; to keep them all, \
                 set checkpoint.keep = 0",
                options.keep.newest,
                number_of(there, "checkpoint"),
                options.folder.display()
            ));
        }
    }

    fn train(mut self, mut reporter: Option<Reporter>) -> Result<Summary, TrainError> {
        let Plan { config, .. } = self.plan;
        let steps = config.train.steps;
        let (mut loss, mut val_loss) = (None, None);
        let mut issued = None;
        if self.step < steps && self.asked_to_stop()? {
            return self.stop(reporter.as_ref(), loss);
        }
        while self.step < steps {
            let Some((now, step::Together { stop, saving, .. })) = self.train_step()? else {
                if let Some(ripe) = issued.take() {
                    loss = Some(self.settle_step(ripe, reporter.as_mut())?);
                }
                return self.stop(reporter.as_ref(), loss);
            };
            let last = self.step == steps;
            let (evaluate, save) = (
                last || due(self.step, config.eval.every),
                last || due(self.step, config.checkpoint.every),
            );
            // What a GPU has made of a step is read when it has the next one to work on, unless
            // something else has to be known first.
            let before = issued.replace(now);
            let known = !self.plan.device.is_gpu() || stop || evaluate || save;
            for ripe in before.into_iter().chain(if known { issued.take() } else { None }) {
                loss = Some(self.settle_step(ripe, reporter.as_mut())?);
            }
            self.advance_save(saving)?;
            if stop && !last {
                // Whoever asked may not give us the time for more than that.
                return self.stop(reporter.as_ref(), loss);
            }
            if last {
                // Nothing is lost if the evaluation takes longer than we are given.
                self.save(true)?;
            }
            if evaluate {
                val_loss = self.evaluate(reporter.as_mut(), !stop)?;
                if val_loss.is_none() {
                    return self.stop(reporter.as_ref(), loss);
                }
            }
            if save && !last {
                self.save(false)?;
                if !self.saves_in_background() && self.asked_to_stop()? {
                    return self.stop(reporter.as_ref(), loss);
                }
            }
        }
        // A run that had nothing left to do still says where it stands.
        let val_loss = match val_loss {
            Some(val_loss) => val_loss,
            None => match self.evaluate(None, true)? {
                Some(val_loss) => val_loss,
                None => return self.stop(reporter.as_ref(), loss),
            },
        };
        let sample = self.sample()?;
        self.settle_save()?;
        let checkpoint = self
            .saved
            .clone()
            .or_else(|| self.plan.resume.as_ref().map(|resumed| resumed.folder().to_owned()))
            .unwrap_or_else(|| self.plan.checkpoints());
        if let Some(reporter) = &reporter {
            self.conclude(reporter, val_loss, &checkpoint, sample.as_deref());
        }
        let (steps, val_loss, preempted) = (self.step, Some(val_loss), false);
        Ok(Summary { steps, loss, val_loss, checkpoint, sample, preempted })
    }

    /// The validation loss; `None` if the ranks were asked to stop meanwhile and `may_stop`.
    fn evaluate(
        &mut self,
        reporter: Option<&mut Reporter>,
        may_stop: bool,
    ) -> Result<Option<f64>, TrainError> {
        let Rank { plan, model, device, validation, pace, .. } = self;
        model.engine().set_activity("evaluation");
        let (samples, rows) = (plan.config.eval.samples, plan.config.micro_batch());
        pace.begin();
        let go_on = || {
            let stop = pace.end() && pace.ask(model.engine(), &plan.stop)?.0;
            Ok(!(stop && may_stop))
        };
        let Some((val_loss, val_tokens)) =
            evaluate_while(model, device, validation, samples, rows, go_on)?
        else {
            return Ok(None);
        };
        if let Some(reporter) = reporter {
            let metrics = EvalMetrics { step: self.step, val_loss, val_tokens };
            let path = metrics_of_run(&self.plan.out);
            reporter.evaluation(&metrics).map_err(TrainError::io("write", &path))?;
        }
        Ok(Some(val_loss))
    }

    /// Text from the trained model. All ranks compute it together; rank 0 shows it.
    fn sample(&self) -> Result<Option<String>, TrainError> {
        let section = &self.plan.config.sample;
        if section.prompt.is_empty() {
            return Ok(None);
        }
        self.model.engine().set_activity("sampling");
        let sampling = Sampling {
            max_tokens: section.max_tokens,
            temperature: section.temperature,
            top_k: 0,
            top_p: 1.0,
            key: self.plan.key().fork("sample"),
            context_length: self.plan.config.data.seq_len,
            end_ids: Vec::new(),
        };
        let path = self.plan.config.data.path.join("tokenizer.json");
        let tokenizer = Tokenizer::from_file(self.plan.tokenizer.to_vec(), &path)?;
        let pass = self.model.pass(&self.device);
        let text = generate::text_with(
            &pass,
            &self.device,
            &tokenizer,
            &section.prompt,
            &sampling,
            || self.model.engine().finish_evaluation(),
        );
        match text {
            // The run is done, and its last save is not.
            Err(error @ TrainError::NotANumber { .. }) => {
                tracing::warn!("no sample: {error}");
                Ok(None)
            }
            text => text.map(Some),
        }
    }

    fn conclude(
        &self,
        reporter: &Reporter,
        val_loss: f64,
        checkpoint: &Path,
        sample: Option<&str>,
    ) {
        reporter.finish();
        let unigram = self.plan.data.unigram_entropy.map_or_else(String::new, |unigram| {
            format!(" (unigram entropy {:.4})", unigram.validation)
        });
        say(&format!(
            "done: {}, validation loss {:.4}{unigram}, {:.1} s, checkpoint {}",
            number_of(self.step, "step"),
            val_loss,
            self.started.elapsed().as_secs_f64(),
            checkpoint.display()
        ));
        if let Some(sample) = sample {
            say(&format!("sample: {sample}"));
        }
    }

    fn micro_batches(&self) -> usize {
        let config = &self.plan.config;
        config.train.global_batch / self.ranks / config.micro_batch()
    }
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
