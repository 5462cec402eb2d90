//! The steps of a run, from the first to the last.

use std::path::Path;
use std::time::Instant;

use kiln_model::layers::Records;

use super::state::Rank;
use super::step::{DataBatches, Issued, StepLog, StepSync};
use crate::checkpoint::{self, Format};
use crate::data::Tokenizer;
use crate::error::{Result, TrainError};
use crate::generate::{self, Sampling};
use crate::metrics::{EvalMetrics, Reporter, say};
use crate::run::RecordedStep;
use crate::run::evaluate::evaluate_while;
use crate::run::folder::metrics_of_run;
use crate::run::options::Summary;
use crate::run::plan::Plan;
use crate::run::step::optimizer_step;
use crate::schedule::learning_rates;
use crate::values::Values;
use crate::words::number_of;

impl Rank<'_> {
    /// Says if checkpoints that earlier starts have kept are about to be removed.
    fn announce_removals(&self) {
        let options = self.plan.save_options();
        let (there, surplus) = checkpoint::surplus(&options.folder, options.keep, self.state.step);
        if surplus > 0 && self.state.step < self.plan.config.train.steps {
            say(&format!(
                "checkpoint.keep = {}: the next save removes {surplus} of the {} in {}; to keep them all, \
                 set checkpoint.keep = 0",
                options.keep.newest,
                number_of(there, "checkpoint"),
                options.folder.display()
            ));
        }
    }

    /// What rank 0 reports to; `None` on the others.
    fn reporter(&self) -> Result<Option<Reporter>> {
        if self.rank != 0 {
            return Ok(None);
        }
        let path = metrics_of_run(&self.plan.out);
        match &self.plan.claim {
            // Nothing in the folder changes, or it would say that the run has fewer steps than it has.
            Some(_) if self.state.step > self.plan.config.train.steps => say(&format!(
                "nothing to train: the run has done {} steps, and train.steps is {}; its folder stays as it \
                 is. To go on, raise train.steps; to go back, name an earlier checkpoint with --resume",
                self.state.step, self.plan.config.train.steps
            )),
            Some(claim) => claim.begin(&self.plan.message.config, self.state.step)?,
            None => {}
        }
        self.announce_removals();
        let reporter = Reporter::new(&path, self.state.step, self.plan.config.train.steps);
        reporter.map(Some).map_err(TrainError::io("write", &path))
    }

    /// Takes the steps of the run, up to its last.
    pub(in crate::run) fn run(mut self) -> Result<Summary> {
        let mut reporter = self.reporter()?;
        let Plan { config, .. } = self.plan;
        let steps = config.train.steps;
        let (mut loss, mut val_loss) = (None, None);
        let mut issued = None;
        if self.state.step < steps && self.asked_to_stop()? {
            return self.stop(reporter.as_ref(), loss);
        }
        while self.state.step < steps {
            let Some((now, StepSync { stop, saving, .. })) = self.train_step()? else {
                if let Some(ripe) = issued.take() {
                    loss = Some(self.settle_step(ripe, reporter.as_mut())?);
                }
                return self.stop(reporter.as_ref(), loss);
            };
            let last = self.state.step == steps;
            let (evaluate, save) = (
                last || due(self.state.step, config.eval.every),
                last || due(self.state.step, config.checkpoint.every),
            );
            // A metric of the program may look at the weights, which must be those of its step.
            let is_looked_at = now.log.is_some() && !self.plan.registry.metrics().is_empty();
            // What a GPU has made of a step is read when it has the next one to work on, unless
            // something else has to be known first.
            let before = issued.replace(now);
            let known = !self.plan.device.is_gpu() || stop || evaluate || save || is_looked_at;
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
                let section = &self.plan.config.checkpoint;
                let in_background = section.background && section.format == Format::Sharded;
                if !in_background && self.asked_to_stop()? {
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
        let (steps, val_loss, preempted) = (self.state.step, Some(val_loss), false);
        Ok(Summary { steps, loss, val_loss, checkpoint, sample, preempted })
    }

    /// Issues one optimizer step. Nothing in it waits for a GPU. `None` if the ranks were asked to stop
    /// in the middle of it: all is as it was after the step before.
    fn train_step(&mut self) -> Result<Option<(Issued, StepSync)>> {
        let start = Instant::now();
        let config = &self.plan.config;
        let step = self.state.step + 1;
        if let Some(drill) = &self.drill {
            drill.begin_step(step);
        }
        self.position.begin_step(step);
        let log = &config.log;
        let records = log.is_logged(step, config.train.steps).then(|| Records::new(log.activations));
        let mut batches = DataBatches {
            plan: self.plan,
            engine: self.model.engine(),
            source: &self.train,
            first_sample: self.state.next_sample,
            drill: self.drill.as_deref(),
            pace: &mut self.pace,
            grace: &mut self.grace,
            records: records.clone(),
            grad_norms: Values::default(),
        };
        let rates = learning_rates(&config.optim, step, config.train.steps);
        let lr = rates.of(0);
        let update = optimizer_step(&self.model, config, &self.device, rates, &mut batches)?;
        let Some(update) = update else { return Ok(None) };
        let grad_norms = batches.grad_norms;
        let recorded =
            records.map(|records| RecordedStep::start(self.model.engine(), &records)).transpose()?;
        let sync = self.sync(recorded.as_ref().is_some_and(|recorded| !recorded.is_empty()))?;
        let any_recorded = sync.any_recorded;
        let log = recorded.map(|recorded| StepLog { recorded, any_recorded, grad_norms });
        self.pace.told(sync.longest_pass);
        let step_s = start.elapsed().as_secs_f64();
        self.grace.mind(sync.longest_pass, Some(step_s), self.rank);

        self.state.step = step;
        self.state.next_sample += config.train.global_batch as u64;
        self.state.tokens += (config.train.global_batch * config.data.seq_len) as u64;
        let (peak_bytes, tokens) = (sync.peak_bytes, self.state.tokens);
        Ok(Some((Issued { step, update, lr, start, peak_bytes, tokens, log }, sync)))
    }

    /// The validation loss; `None` if the ranks were asked to stop meanwhile and `may_stop`.
    fn evaluate(&mut self, reporter: Option<&mut Reporter>, may_stop: bool) -> Result<Option<f64>> {
        let Rank { plan, model, device, validation, pace, .. } = self;
        model.engine().set_activity("evaluation");
        let (samples, rows) = (plan.config.eval.samples, plan.config.micro_batch());
        pace.begin();
        let go_on = || {
            let stop = pace.end() && pace.ask(model.engine(), &plan.stop)?.0;
            Ok(!(stop && may_stop))
        };
        let Some((val_loss, val_tokens)) = evaluate_while(model, device, validation, samples, rows, go_on)?
        else {
            return Ok(None);
        };
        if let Some(reporter) = reporter {
            let metrics = EvalMetrics { step: self.state.step, val_loss, val_tokens };
            let path = metrics_of_run(&self.plan.out);
            reporter.evaluation(&metrics).map_err(TrainError::io("write", &path))?;
        }
        Ok(Some(val_loss))
    }

    /// Text from the trained model. All ranks compute it together; rank 0 shows it.
    fn sample(&self) -> Result<Option<String>> {
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
        let text = generate::text(&pass, &self.device, &tokenizer, &section.prompt, &sampling, || {
            self.model.engine().finish_evaluation()
        });
        match text {
            // The run is done, and its last save is not.
            Err(error @ TrainError::NotANumber { .. }) => {
                tracing::warn!("no sample: {error}");
                Ok(None)
            }
            text => text.map(Some),
        }
    }

    fn conclude(&self, reporter: &Reporter, val_loss: f64, checkpoint: &Path, sample: Option<&str>) {
        reporter.finish();
        let unigram = self
            .plan
            .message
            .data
            .unigram_entropy
            .map_or_else(String::new, |unigram| format!(" (unigram entropy {:.4})", unigram.validation));
        say(&format!(
            "done: {}, validation loss {:.4}{unigram}, {:.1} s, checkpoint {}",
            number_of(self.state.step, "step"),
            val_loss,
            self.started.elapsed().as_secs_f64(),
            checkpoint.display()
        ));
        if let Some(sample) = sample {
            say(&format!("sample: {sample}"));
        }
    }
}

fn due(step: u64, every: u64) -> bool {
    every > 0 && step.is_multiple_of(every)
}
