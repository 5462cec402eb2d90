//! The steps of a run, from the first to the last.

use std::collections::BTreeSet;
use std::path::Path;
use std::time::{Duration, Instant};

use kiln_collectives::ActivityTime;
use kiln_model::{Decoder, Key};
use kiln_shard::memory;

use super::conclusion::Conclusion;
use super::issued::ClockReading;
use super::state::Text;
use super::state::Trainer;
use crate::error::{Result, TrainError};
use crate::eval::{Evaluated, evaluate_while, objective_while, passes_of};
use crate::eval::{answer_losses_while, mean_answer_loss};
use crate::metrics::{EvalMetrics, Reporter, print_line};
use crate::process;
use crate::run::events::EventKind;
use crate::run::folder::metrics_of_run;
use crate::run::options::Summary;
use crate::run::plan::Plan;
use kiln_checkpoint::hugging_face;
use kiln_checkpoint::{self as checkpoint, Architecture};
use kiln_config::device;
use kiln_plan::{Gathers, RankShape, Speed};
use kiln_sys::words::number_of;

impl Trainer<'_> {
    /// Trains through the run's last step; evaluates, samples and saves as the configuration says. Collective.
    ///
    /// # Errors
    ///
    /// As for the methods of [`Trainer`] that this loop calls.
    pub fn run(mut self) -> Result<Summary> {
        let Plan { config, .. } = self.plan;
        while self.train_step()? {
            // After the last step, `finish` does all three.
            let is_due =
                |every: u64| every > 0 && !self.is_complete() && self.state.step.is_multiple_of(every);
            let [evaluate, sample, save] =
                [config.eval.every, config.sample.every, config.checkpoint.every].map(is_due);
            if evaluate {
                self.evaluate()?;
            }
            if sample {
                self.sample()?;
            }
            // Saving comes last: a run resumed from here has everything that was written about this step.
            if save {
                self.save()?;
            }
        }
        self.finish()
    }

    /// Ends the run: saves and evaluates the last step unless that is done, and generates samples. Collective.
    /// After a requested stop, only saves, because there may be no time for more.
    ///
    /// # Errors
    ///
    /// As for [`Trainer::evaluate`], and for [`Trainer::save`] regardless of `checkpoint.on_failure`.
    pub fn finish(mut self) -> Result<Summary> {
        self.settle_step()?;
        if self.progress.is_stopping && !self.is_complete() {
            return self.stop();
        }
        // With the save begun first, nothing is lost if the evaluation takes longer than the grace period.
        if self.is_unsaved() {
            self.begin_save(true)?;
        }
        let may_stop = !self.progress.is_stopping;
        let known = self.progress.evaluated.filter(|(step, _)| *step == self.state.step);
        let val_loss = match known {
            Some((_, val_loss)) => Some(val_loss),
            None => self.evaluate_unless(may_stop)?,
        };
        let Some(val_loss) = val_loss else { return self.stop() };
        let texts = self.generate(false)?;
        self.settle_save()?;
        let checkpoint = self
            .saves
            .last
            .clone()
            .or_else(|| self.plan.resume.as_ref().map(|resumed| resumed.folder().to_owned()))
            .unwrap_or_else(|| self.plan.checkpoints());
        let (steps, loss) = (self.state.step, self.loss());
        let told = loss.map_or_else(String::new, |loss| format!(", loss {loss:.4}"));
        let told = format!("{}{told}, validation loss {val_loss:.4}", number_of(steps, "step"));
        self.note(EventKind::End, steps, &told);
        if let Some(mut reporter) = self.reporter.take() {
            reporter.finish();
            self.conclude(&reporter, val_loss, &checkpoint, &texts);
        }
        let sample = texts.into_iter().next().map(|text| text.whole);
        Ok(Summary { steps, loss, val_loss: Some(val_loss), checkpoint, sample, preempted: false })
    }

    /// Waits for the outcome of the last step, and fails as [`Trainer::train_step`] does. Collective.
    pub fn settle(&mut self) -> Result<()> {
        self.settle_step()
    }

    /// Ends the run without saving or evaluating, and fails as [`Trainer::train_step`] does. Collective.
    pub fn abandon(mut self) -> Result<Summary> {
        self.settle_step()?;
        let (steps, loss) = (self.state.step, self.loss());
        let checkpoint = self.plan.checkpoints();
        Ok(Summary {
            steps,
            loss,
            val_loss: None,
            checkpoint,
            sample: None,
            preempted: self.progress.is_stopping,
        })
    }

    pub(super) fn held(&self) -> Duration {
        self.model.engine().world().holds().total()
    }

    pub(super) fn read_clocks(&self) -> ClockReading {
        ClockReading { at: Instant::now(), held: self.held(), times: self.times() }
    }

    pub(super) fn times(&self) -> Vec<ActivityTime> {
        self.model.engine().world().recorder().times()
    }

    pub(super) fn loss(&self) -> Option<f64> {
        self.progress.metrics.as_ref().map(|metrics| metrics.loss)
    }

    /// Returns the validation cross-entropy in nats per token; `None` once the ranks are asked to stop. Collective.
    ///
    /// The first evaluation after a step of this start is logged, with the loss on the answers of `eval.prompts`.
    /// Further results, such as of averaged weights, are only returned.
    ///
    /// # Errors
    ///
    /// If data cannot be read, or the ranks lose contact.
    pub fn evaluate(&mut self) -> Result<Option<f64>> {
        self.settle_step()?;
        if self.progress.is_stopping {
            return Ok(None);
        }
        self.evaluate_unless(true)
    }

    fn evaluate_unless(&mut self, may_stop: bool) -> Result<Option<f64>> {
        let Trainer { plan, model, loss, device, data, stops, reporter, .. } = self;
        let (validation, pace) = (&data.validation, &mut stops.pace);
        model.engine().set_activity("evaluation");
        let (samples, rows) = (plan.config.eval.samples, plan.config.micro_batch());
        let held = || model.engine().world().holds().total();
        pace.begin(held());
        let (mut done, passes) = (0, passes_of(model.engine(), validation, samples, rows));
        let ranks = model.engine().world().world_size();
        let passes = if loss.is_evaluated() { 2 * passes } else { passes };
        let passes = passes + plan.message.answers.len().div_ceil(ranks) as u64;
        let mut show = || {
            reporter.iter().for_each(|reporter| reporter.activity(&format!("evaluation {done}/{passes}")));
            done += 1;
        };
        show();
        let mut go_on = || {
            show();
            let stop = pace.end(held()) && pace.ask(model.engine(), &plan.stop)?.0;
            Ok(!(stop && may_stop))
        };
        let evaluated = evaluate_while(model, device, validation, samples, rows, &mut go_on)?;
        let objective = match evaluated {
            Some(evaluated) if loss.is_evaluated() => {
                let done = (validation, evaluated);
                objective_while(model, loss, device, done, samples, rows, &mut go_on)?.map(Some)
            }
            _ => Some(None),
        };
        let evaluated = evaluated.filter(|_| objective.is_some());
        let answers = match (&plan.message.answers[..], evaluated) {
            ([], _) | (_, None) => Some(None),
            (answers, _) => {
                let losses = answer_losses_while(model, device, answers, go_on)?;
                losses.map(|losses| Some(mean_answer_loss(&losses)))
            }
        };
        let (Some(Evaluated { loss: val_loss, targets: val_tokens, .. }), Some(answer_loss)) =
            (evaluated, answers)
        else {
            self.progress.is_stopping = true;
            return Ok(None);
        };
        // The next pass belongs to a step, and may take longer.
        self.stops.pace.ask_soon();
        let is_first = self.progress.evaluated.is_none_or(|(step, _)| step < self.state.step);
        if !is_first {
            return Ok(Some(val_loss));
        }
        self.progress.evaluated = Some((self.state.step, val_loss));
        // A run with nothing left to do reports its loss, but logs nothing.
        if let Some(reporter) = self.reporter.as_mut().filter(|_| self.progress.has_trained) {
            let val_objective = objective.flatten();
            let metrics =
                EvalMetrics { step: self.state.step, val_loss, val_tokens, val_objective, answer_loss };
            let path = metrics_of_run(&self.plan.out);
            reporter.evaluation(&metrics).map_err(TrainError::io("write", &path))?;
        }
        Ok(Some(val_loss))
    }

    fn conclude(&self, reporter: &Reporter, val_loss: f64, checkpoint: &Path, texts: &[Text]) {
        let conclusion = self.conclusion(reporter, Some(val_loss));
        print_line(&format!(
            "done: {}, validation loss {val_loss:.4}, checkpoint {}",
            number_of(self.state.step, "step"),
            checkpoint.display()
        ));
        conclusion.lines().iter().for_each(|line| print_line(line));
        self.watchers.observers.closing().iter().for_each(|line| print_line(line));
        for text in texts {
            print_line(&format!("sample: {}", text.whole));
        }
        conclusion.next().iter().for_each(|line| print_line(line));
    }

    pub(super) fn conclusion(&self, reporter: &Reporter, val_loss: Option<f64>) -> Conclusion {
        let unigram = self.plan.message.data.unigram_entropy.map(|unigram| unigram.validation);
        let best = reporter.best();
        let best_checkpoint = best
            .filter(|best| best.step != self.state.step)
            .map(|best| checkpoint::checkpoint_path(&self.plan.checkpoints(), best.step))
            .filter(|place| place.exists());
        let tokens = self.state.tokens - self.progress.first_tokens;
        let rate = tokens as f64 / self.speed.in_steps;
        let flops = rate * self.speed.flops_per_token;
        // `kiln` has all built-in parts, so it also serves a program without commands.
        let is_stock = Architecture::from_model(&self.plan.model) == Architecture::decoder();
        let program = process::command().or(is_stock.then_some("kiln"));
        Conclusion {
            out: self.plan.out.clone(),
            elapsed: self.plan.start.elapsed(),
            start: self.speed.start_took,
            times: self.times(),
            ranks: self.ranks,
            steps: self.state.step - self.progress.first_step,
            skipped: self.state.skipped,
            tokens,
            in_steps: self.speed.in_steps,
            flops,
            mfu: self.speed.peak.as_ref().map(|peak| flops / peak.flops()),
            val_loss,
            unigram: unigram.filter(|_| val_loss.is_some()),
            best,
            best_checkpoint,
            peak_bytes: self.progress.metrics.as_ref().map(|metrics| metrics.peak_bytes),
            planned: self.progress.metrics.as_ref().and_then(|_| self.planned()),
            program: program.map(str::to_owned),
            is_exportable: hugging_face::has_architecture(&self.plan.model),
        }
    }

    /// Returns a rank's planned peak in bytes and the undescribed layers, if the plan is comparable with counted bytes.
    fn planned(&self) -> Option<(u64, BTreeSet<&'static str>)> {
        let Plan { config, model, optimizer, registry, device: resolved, .. } = self.plan;
        let decoder = Decoder::new(registry.layers(), model, Key::new(0), &device::plain()).ok()?;
        let engine = self.model.engine();
        let gathers = if engine.world().shares_gathers() { Gathers::Shared } else { Gathers::Pooled };
        let shape =
            RankShape::from_config(config, model, &decoder, optimizer, gathers, !resolved.is_gpu()).ok()?;
        let shape = RankShape { mesh: engine.mesh(), ..shape };
        let step = shape.step(&Speed::INSTANT);
        // On a GPU, the reserved pages are counted.
        let bytes = if resolved.is_gpu() { step.reserved } else { step.peak.bytes };
        memory::is_counting().then_some((bytes, step.undescribed))
    }
}
