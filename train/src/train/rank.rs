//! What one rank does from the first to the last step.

mod save;

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use burn::tensor::Device;
use kiln_collectives::Communicator;
use kiln_model::decoder::{self, Decoder};
use kiln_model::layers::Layer;
use kiln_model::{Context, Key, ModelConfig};
use kiln_shard::optimizer::clip_factor;
use kiln_shard::{EngineBuilder, memory};

use super::error::in_gradient;
use super::{MAX_SKIPPED, Plan, Summary, TrainError, evaluate, policy};
use crate::checkpoint::{Progress, Saver};
use crate::config::NonFinite;
use crate::data::{Batch, BatchSource, Split, TokenFile, slice_for};
use crate::device;
use crate::fault::Drill;
use crate::generate::{self, Sampling};
use crate::metrics::{EvalMetrics, Reporter, SkipMetrics, StepMetrics, say};
use crate::schedule::learning_rate;
use crate::sharded::ShardedDecoder;
use crate::source::ModelSource;

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
    flops_per_token: f64,
    saver: Saver,
    /// The last checkpoint of this run that is complete.
    saved: Option<PathBuf>,
    drill: Option<Arc<Drill>>,
    started: Instant,
}

/// What a step has come to.
struct Step {
    metrics: StepMetrics,
    /// Set if the update was left out.
    skipped: Option<Skipped>,
    /// Whether some rank has been asked to stop.
    stop: bool,
    /// How far the save in the background is, over all ranks.
    saving: Progress,
}

/// Why an update was left out.
struct Skipped {
    /// Loss or gradient norm.
    what: &'static str,
    value: f64,
    /// The first parameter with such a gradient.
    parameter: Option<String>,
}

/// What the ranks tell each other after every step.
struct Together {
    loss: f64,
    peak_bytes: u64,
    stop: bool,
    saving: Progress,
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
            let path = plan.out.join("metrics.jsonl");
            rank.introduce();
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
        let Plan { config, model, .. } = plan;
        let (rank, ranks) = (world.rank(), world.world_size());
        let data = |split, shuffle| {
            let file = TokenFile::open(&config.data.path, split, config.data.seq_len)?;
            BatchSource::new(file, shuffle, config.train.seed)
        };
        let train = data(Split::Train, config.data.shuffle)?;
        let validation = data(Split::Validation, false)?;
        let device = device::plain();
        let freeze = config.train.freeze.clone();
        let builder = EngineBuilder::new(world, policy(config), config.shard.shard_size)?
            .freeze(move |name| freeze.iter().any(|prefix| name.starts_with(prefix.as_str())));
        let decoder = make_decoder(model, plan.key().fork("init"), &device);
        let model = ShardedDecoder::new(decoder, builder)?;
        let (mut step, mut next_sample, mut tokens, mut skipped) = (0, 0, 0, 0);
        let mut absent = BTreeSet::new();
        if let Some(checkpoint) = &plan.resume {
            absent = checkpoint.load_weights(model.engine(), &plan.allow_missing)?;
            checkpoint.load_optimizer(model.engine(), &plan.allow_missing)?;
            let state = checkpoint.state();
            (step, next_sample, tokens) = (state.step, state.next_sample, state.tokens);
            skipped = state.skipped;
        } else if !config.init.from.as_os_str().is_empty() {
            let source = ModelSource::open(&config.init.from)?;
            absent = source.load_weights(model.engine(), &plan.allow_missing)?;
        }
        if rank == 0 && !absent.is_empty() {
            let names: Vec<_> = absent.into_iter().collect();
            say(&format!("not in the checkpoint, kept as initialised: {}", names.join(", ")));
        }
        let num_parameters = model.engine().layout().num_parameters();
        let flops_per_token = plan.model.flops_per_token(num_parameters, config.data.seq_len);
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
            flops_per_token,
            saver: Saver::new(save::options(plan), rank),
            saved: None,
            drill,
            started,
        })
    }

    /// Says what is about to happen.
    fn introduce(&self) {
        let Plan { config, model, data, threads, .. } = self.plan;
        let engine = self.model.engine();
        let train = &config.train;
        say(&format!(
            "model: {:.2}M parameters, vocabulary {}, d_model {}, {} layers, {} heads / {} kv, d_ff {}{}",
            engine.layout().num_parameters() as f64 / 1e6,
            model.vocab_size,
            model.d_model,
            model.layers,
            model.heads,
            model.kv_heads,
            model.d_ff,
            if model.tie_embeddings { ", tied" } else { "" }
        ));
        say(&format!(
            "ranks: {} x {threads} threads, mesh {}, {}, recompute {:?}",
            self.ranks,
            engine.mesh(),
            config.shard.strategy,
            config.shard.recompute
        ));
        say(&format!(
            "dtypes: master f32, compute {}, reduce {}, accumulate f32",
            engine.policy().compute_dtype,
            engine.policy().reduce_dtype
        ));
        say(&format!(
            "batch: {} sequences x {} tokens per step = {} ranks x {} micro-batches x {}; {} steps = {:.2} epochs of {} samples",
            train.global_batch,
            config.data.seq_len,
            self.ranks,
            self.micro_batches(),
            train.micro_batch,
            train.steps,
            (train.steps * train.global_batch as u64) as f64
                / self.train.order().num_samples() as f64,
            self.train.order().num_samples(),
        ));
        if let Some(unigram) = &data.unigram_entropy {
            say(&format!(
                "unigram entropy of the validation text: {:.4} nats per token",
                unigram.validation
            ));
        }
    }

    fn train(mut self, mut reporter: Option<Reporter>) -> Result<Summary, TrainError> {
        let Plan { config, .. } = self.plan;
        let steps = config.train.steps;
        let path = self.plan.out.join("metrics.jsonl");
        let (mut loss, mut val_loss) = (None, None);
        while self.step < steps {
            let step = self.train_step()?;
            loss = Some(step.metrics.loss);
            let last = self.step == steps;
            if let Some(reporter) = &mut reporter {
                self.report(reporter, &step, last).map_err(TrainError::io("write", &path))?;
            }
            self.advance_save(step.saving)?;
            if step.stop && !last {
                // Whoever asked may not give us the time for more than that.
                return self.stop(reporter.as_ref(), loss);
            }
            if last || due(self.step, config.eval.every) {
                val_loss = Some(self.evaluate(reporter.as_mut())?);
            }
            if last || due(self.step, config.checkpoint.every) {
                self.save(last)?;
            }
        }
        // A run that had nothing left to do still says where it stands.
        let val_loss = match val_loss {
            Some(val_loss) => val_loss,
            None => self.evaluate(None)?,
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

    /// Saves a checkpoint and ends the run before its end.
    fn stop(
        &mut self,
        reporter: Option<&Reporter>,
        loss: Option<f64>,
    ) -> Result<Summary, TrainError> {
        self.save(true)?;
        self.settle_save()?;
        let checkpoint = self.saved.clone().unwrap_or_else(|| self.plan.checkpoints());
        if let Some(reporter) = reporter {
            reporter.finish();
            say(&format!(
                "stopped as asked: {} of {} steps, checkpoint {}; go on with --resume latest",
                self.step,
                self.plan.config.train.steps,
                checkpoint.display()
            ));
        }
        let (steps, val_loss, sample, preempted) = (self.step, None, None, true);
        Ok(Summary { steps, loss, val_loss, checkpoint, sample, preempted })
    }

    /// One optimizer step.
    fn train_step(&mut self) -> Result<Step, TrainError> {
        let start = Instant::now();
        let Plan { config, model, .. } = self.plan;
        let engine = self.model.engine();
        let (global_batch, micro_batch) = (config.train.global_batch, config.train.micro_batch);
        let tokens = (global_batch * config.data.seq_len) as u64;
        let training = self.device.clone().autodiff();
        let step = self.step + 1;
        let dropout = self.plan.key().fork("dropout");

        self.begin_step(step);
        let mut loss_sum = 0.0;
        for index in 0..self.micro_batches() {
            let offset = slice_for(
                0,
                global_batch as u64,
                self.rank as u64,
                self.ranks as u64,
                index as u64,
                micro_batch as u64,
            );
            let first = self.next_sample + offset;
            let batch = self.fetch(first)?;
            engine.set_activity("forward");
            let inputs = device::tokens(batch.inputs, micro_batch, batch.seq_len, &training);
            let targets = device::tokens(batch.targets, micro_batch, batch.seq_len, &training);
            let context = Context::training(dropout, first, model.dropout);
            let pass = self.model.pass(&training);
            let loss = decoder::loss(&pass, inputs, targets, 1.0 / tokens as f64, &context);
            engine.check()?;
            loss_sum += f64::from(loss.clone().into_scalar::<f32>());
            engine.set_activity("backward");
            engine.backward(loss, index + 1 == self.micro_batches())?;
        }
        engine.set_activity("optimizer");
        let Together { loss, peak_bytes, stop, saving } = self.over_ranks(loss_sum)?;
        let grad_norm = engine.grad_norm()?;
        let lr = learning_rate(&config.optim, step, config.train.steps);
        let skipped = self.check_finite(step, loss, grad_norm)?;
        if skipped.is_none() {
            let clip = clip_factor(grad_norm, config.optim.grad_clip);
            engine.step(&config.optim.adamw(), step - self.skipped, lr, clip)?;
        }

        self.skipped += u64::from(skipped.is_some());
        self.skipped_in_a_row = if skipped.is_some() { self.skipped_in_a_row + 1 } else { 0 };
        self.step = step;
        self.next_sample += global_batch as u64;
        self.tokens += tokens;
        let step_s = start.elapsed().as_secs_f64();
        let tokens_per_s = tokens as f64 / step_s;
        let metrics = StepMetrics {
            step,
            loss,
            grad_norm,
            lr,
            tokens_per_s,
            tokens: self.tokens,
            mfu: tokens_per_s * self.flops_per_token / self.plan.peak_flops.max(1.0),
            peak_bytes,
            step_s,
        };
        Ok(Step { metrics, skipped, stop, saving })
    }

    fn begin_step(&self, step: u64) {
        if let Some(drill) = &self.drill {
            drill.begin_step(step);
        }
        self.model.engine().begin_step();
    }

    /// The micro-batch that starts at sample `first` of the global order.
    fn fetch(&self, first: u64) -> Result<Batch, TrainError> {
        self.model.engine().set_activity("data loading");
        if let Some(drill) = &self.drill {
            drill.data_loading()?;
        }
        Ok(self.train.fetch(first, self.plan.config.train.micro_batch)?)
    }

    /// The loss summed, the peak of memory maximised, whether anyone is to stop, and how far a save
    /// in the background is, in one reduction over the ranks.
    fn over_ranks(&self, loss: f64) -> Result<Together, TrainError> {
        let stop = f64::from(u8::from(self.plan.stop.load(Ordering::Relaxed)));
        let Progress { done, failed } = self.saver.progress();
        let mut values = vec![loss, stop, done, failed];
        let first_peak = values.len();
        values.resize(first_peak + self.ranks, 0.0);
        values[first_peak + self.rank] = memory::peak_bytes(self.rank) as f64;
        let sums = self.model.engine().sum_over_ranks("loss", &values)?;
        let peak = sums[first_peak..].iter().copied().fold(0.0, f64::max);
        Ok(Together {
            loss: sums[0],
            peak_bytes: peak as u64,
            stop: sums[1] > 0.0,
            saving: Progress { done: sums[2], failed: sums[3] },
        })
    }

    /// Whether the update is to be left out. Loss and norm are the same on every rank, so all ranks
    /// leave it out, or stop, together.
    fn check_finite(
        &self,
        step: u64,
        loss: f64,
        grad_norm: f64,
    ) -> Result<Option<Skipped>, TrainError> {
        let bad = [("the loss", loss), ("the gradient norm", grad_norm)];
        let Some((what, value)) = bad.into_iter().find(|(_, value)| !value.is_finite()) else {
            return Ok(None);
        };
        let parameter = self.model.engine().first_non_finite_gradient()?;
        match self.plan.config.train.nonfinite {
            NonFinite::Abort => Err(TrainError::NonFinite { step, what, value, parameter }),
            NonFinite::Skip if self.skipped_in_a_row + 1 >= MAX_SKIPPED => {
                Err(TrainError::TooManySkipped { step, what, value, parameter })
            }
            NonFinite::Skip => Ok(Some(Skipped { what, value, parameter })),
        }
    }

    fn report(&self, reporter: &mut Reporter, step: &Step, last: bool) -> std::io::Result<()> {
        let Step { metrics, skipped, .. } = step;
        if let Some(Skipped { what, value, parameter }) = skipped {
            let (step, skipped) = (metrics.step, self.skipped);
            let why = format!("{what} is {value}{}", in_gradient(parameter));
            let metrics = SkipMetrics { step, skipped, parameter: parameter.clone() };
            return reporter.skip(&metrics, &why);
        }
        let every = self.plan.config.log.every;
        let log = last || self.step.is_multiple_of(every) || self.step == 1;
        reporter.step(metrics, log)
    }

    fn evaluate(&self, reporter: Option<&mut Reporter>) -> Result<f64, TrainError> {
        self.model.engine().set_activity("evaluation");
        let section = &self.plan.config.eval;
        let rows = self.plan.config.train.micro_batch;
        let (val_loss, val_tokens) =
            evaluate(&self.model, &self.device, &self.validation, section.samples, rows)?;
        if let Some(reporter) = reporter {
            let metrics = EvalMetrics { step: self.step, val_loss, val_tokens };
            let path = self.plan.out.join("metrics.jsonl");
            reporter.evaluation(&metrics).map_err(TrainError::io("write", &path))?;
        }
        Ok(val_loss)
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
        let tokenizer = self.plan.config.data.path.join("tokenizer.json");
        let pass = self.model.pass(&self.device);
        let text =
            generate::text(&pass, &self.device, &tokenizer, &section.prompt, &sampling, || {
                self.model.engine().finish_evaluation()
            })?;
        Ok(Some(text))
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
            "done: {} steps, validation loss {:.4}{unigram}, {:.1} s, checkpoint {}",
            self.step,
            val_loss,
            self.started.elapsed().as_secs_f64(),
            checkpoint.display()
        ));
        if let Some(sample) = sample {
            say(&format!("sample: {sample}"));
        }
    }

    fn micro_batches(&self) -> usize {
        let train = &self.plan.config.train;
        train.global_batch / self.ranks / train.micro_batch
    }
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
