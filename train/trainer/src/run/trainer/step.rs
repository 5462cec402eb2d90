//! The micro-batches of a step, the exchange between ranks after it, and its outcome.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kiln_collectives::Phase;
use kiln_model::Context;
use kiln_model::layers::Records;
use kiln_shard::{Engine, LearningRates, LossScale, Outcome, ValueHistogram};

use super::grace::Grace;
use super::issued::{Issued, StepLog, end_of_step};
use super::pace::Pace;
use super::state::Trainer;
use crate::error::{Result, TrainError, in_gradient};
use crate::fault::Drill;
use crate::logged::LoggedStep;
use crate::metrics::{SkipMetrics, StepMetrics, StepTimes};
use crate::process::position::{Present, StepOutcome};
use crate::run::events::EventKind;
use crate::run::nonfinite::NonFiniteFinder;
use crate::run::observe::Pass;
use crate::run::observe::{Controls, Moment, Observers};
use crate::run::step::run_passes;
use crate::run::{MAX_SKIPPED, MicroBatch, MicroBatches, Plan};
use crate::values::Values;
use kiln_checkpoint::Progress;
use kiln_config::schedule::learning_rates;
use kiln_config::{NonFinite, OptimSection};
use kiln_data::{BatchSource, slice_for};
use kiln_sys::words::number_of;

/// The values that the ranks exchange after every step.
pub(super) struct StepSync {
    pub(super) peak_bytes: u64,
    /// The longest micro-batch of any rank, in seconds.
    pub(super) longest_pass: f64,
    /// True if any rank has been asked to stop.
    pub(super) stop: bool,
    /// Progress of the background save.
    pub(super) saving: Progress,
    /// True if the layers of any rank have recorded a value.
    pub(super) any_recorded: bool,
    /// True if any observer has a request that ranks serve between two steps.
    pub(super) is_asked: bool,
}

/// The micro-batches of a step, from the run's data. Between them, the ranks ask each other whether to stop.
pub(super) struct DataBatches<'a> {
    pub(super) plan: &'a Plan,
    pub(super) engine: &'a Arc<Engine>,
    pub(super) observers: &'a Observers,
    /// The optimizer step.
    pub(super) step: u64,
    pub(super) source: &'a BatchSource,
    /// Position in the global order of the step's first sample.
    pub(super) first_sample: u64,
    pub(super) drill: Option<&'a Drill>,
    pub(super) position: &'a Present,
    pub(super) pace: &'a mut Pace,
    pub(super) grace: &'a mut Grace,
    /// Values that layers record for the log, if the step is logged.
    pub(super) records: Option<Records>,
    /// The norm of the gradient by module, once it is known.
    pub(super) grad_norms: Values,
    /// Histograms of the gradient by module, once they are known.
    pub(super) grad_histograms: Vec<(String, ValueHistogram)>,
    /// Changes to the run by its observers.
    pub(super) controls: &'a Controls,
}

impl MicroBatches for DataBatches<'_> {
    fn fetch(&mut self, index: usize) -> Result<MicroBatch> {
        let Plan { config, model, .. } = self.plan;
        let world = self.engine.world();
        let first = self.first_sample
            + slice_for(
                0,
                config.train.global_batch as u64,
                world.rank() as u64,
                world.world_size() as u64,
                index as u64,
                config.micro_batch() as u64,
            );
        self.pace.begin(world.holds().total());
        let samples = config.micro_batch() as u64;
        self.position.begin_micro_batch(index as u64, first, samples);
        tracing::debug!(micro_batch = index, first_sample = first, samples, "fetching");
        if let Some(drill) = self.drill {
            drill.data_loading().map_err(TrainError::Drill)?;
        }
        let batch = self.source.fetch(first, config.micro_batch())?;
        let context = Context::training(self.plan.key().fork("dropout"), first, model.dropout);
        let context = context.with_z_loss((config.train.z_loss > 0.0).then_some(config.train.z_loss));
        let context = context.with_token_loss(self.plan.loss.clone());
        let context = match &self.records {
            Some(records) => context.recording(records),
            None => context,
        };
        let batch = MicroBatch { inputs: batch.inputs, targets: batch.targets, context };
        let at = Moment { step: self.step, micro_batch: index, first_sample: first, pass: Pass::Forward };
        match self.observers.fetched(self.engine, at, &batch)? {
            None => Ok(batch),
            probe => Ok(MicroBatch { context: batch.context.clone().probed(probe), ..batch }),
        }
    }

    fn go_on(&mut self, last: bool) -> Result<bool> {
        // After the last micro-batch, the ranks exchange this and more.
        if !self.pace.end(self.engine.world().holds().total()) || last {
            return Ok(true);
        }
        let (stop, longest) = self.pace.ask(self.engine, &self.plan.stop)?;
        if !stop {
            self.grace.mind(longest, None, self.engine.world().rank());
        }
        Ok(!stop)
    }

    fn learning_rates(&self) -> Option<LearningRates> {
        let lr = self.controls.changes().lr?;
        let optim = OptimSection { lr, ..self.plan.config.optim.clone() };
        Some(learning_rates(&optim, self.step, self.plan.config.train.steps))
    }

    fn grad_clip(&self) -> Option<f64> {
        self.controls.changes().grad_clip
    }

    fn before_update(&mut self, engine: &Engine) -> Result<()> {
        self.observers.reduced(engine, self.step)?;
        if self.records.is_some() && self.plan.config.log.gradients {
            self.grad_norms = grad_norms(engine)?;
        }
        if self.plan.config.log.has_histograms(self.step) {
            self.grad_histograms = engine.grad_histograms()?;
        }
        Ok(())
    }
}

/// Returns the 2-norm of the gradient of each module before clipping, as in `grad_norm.layers.3`. Collective.
fn grad_norms(engine: &Engine) -> Result<Values> {
    let by_parameter = engine.grad_norms()?;
    let mut by_parameter = by_parameter.iter();
    let mut norms = Values::default();
    for group in engine.layout().groups.iter().filter(|group| group.trainable) {
        let of_group = by_parameter.by_ref().take(group.parameters.len());
        let squares: f64 = of_group.map(|(_, norm)| norm * norm).sum();
        norms.set(format!("grad_norm.{}", group.name), squares.sqrt());
    }
    Ok(norms)
}

impl Trainer<'_> {
    /// Reads and reports the outcome of the last issued step, unless it is known already.
    pub(in crate::run) fn settle_step(&mut self) -> Result<()> {
        let Some(issued) = self.issued.take() else { return Ok(()) };
        let Issued { step, update, lr, start, end, peak_bytes, tokens, log } = issued;
        let asked = Instant::now();
        let outcome = self.model.engine().outcome(update)?;
        let now = self.read_clocks();
        // Work between two steps, such as an evaluation, belongs to neither.
        let before = if self.settled.at > start.at { &self.settled } else { &start };
        let is_followed = self.state.step > step;
        let end = if is_followed { end_of_step(before, end, asked, now) } else { now };
        let (begun, taken) = (before.at, end.at - before.at);
        let was_held = end.held.saturating_sub(before.held);
        let times = StepTimes::between(&before.times, &end.times, was_held);
        let step_s = taken.saturating_sub(was_held).as_secs_f64();
        self.settled = end;
        self.in_steps += step_s;
        self.state.loss_scale = outcome.loss_scale;
        let Outcome { loss, grad_norm, applied, .. } = outcome;
        tracing::debug!(of = step, loss, grad_norm, lr, tokens, applied, step_s, "a step has ended");
        let left_out = self.why_left_out(step, &outcome)?;
        self.state.skipped += u64::from(left_out.is_some());

        let of_step = (self.plan.config.train.global_batch * self.plan.config.data.seq_len) as f64;
        let tokens_per_s = of_step / step_s;
        let mut metrics = StepMetrics {
            step,
            loss,
            grad_norm,
            lr,
            tokens_per_s,
            tokens,
            mfu: self.peak.as_mut().map(|peak| peak.share(tokens_per_s * self.flops_per_token)),
            peak_bytes,
            step_s,
            tflops: tokens_per_s * self.flops_per_token / 1e12,
            times,
            values: Values::default(),
        };
        if let Some(mut start) = self.start_times.take() {
            self.start_took = start.until(begun);
            let what = if self.plan.device.is_gpu() { "first step and compiling" } else { "first step" };
            start.add(what, taken);
            self.say(&start.line(self.settled.at));
            if let Some(kernels) = self.plan.device.kernels() {
                self.say(&kernels.to_string());
            }
            let measured = self.plan.device.measured_products();
            if measured > 0 {
                let kinds = number_of(measured, "kind");
                self.say(&format!(
                    "{kinds} of matrix products with algorithms that kiln warmup has measured"
                ));
            }
        }
        self.position.settled(StepOutcome { step, loss, tokens_per_s, step_s });
        let is_logged = log.is_some();
        if let (Some(log), None) = (log, &left_out) {
            self.complete(&mut metrics, log)?;
        }
        if let Some(why) = &left_out {
            self.note(EventKind::Skipped, step, &format!("{why}: the update was left out"));
        }
        if let Some(reporter) = &mut self.reporter {
            let reported = match left_out {
                Some(why) => {
                    let (skipped, parameter) = (self.state.skipped, outcome.non_finite);
                    reporter.skip(&SkipMetrics { step, skipped, parameter }, &why)
                }
                None => reporter.step(&metrics, is_logged),
            };
            let path = self.plan.out.join("metrics.jsonl");
            reported.map_err(TrainError::io("write", &path))?;
        }
        self.observers.stepped(self.model.engine(), &metrics)?;
        self.metrics = Some(metrics);
        self.reached();
        Ok(())
    }

    /// Adds to `metrics` the values that layers have recorded, and the custom metrics. Collective.
    fn complete(&self, metrics: &mut StepMetrics, log: StepLog) -> Result<()> {
        let StepLog { recorded, any_recorded, grad_norms } = log;
        let engine = self.model.engine();
        if any_recorded {
            metrics.values.extend(recorded.finish(engine, metrics.loss, &self.plan.config.loss.kind)?);
        }
        metrics.values.extend(grad_norms);
        let added = self.plan.registry.metrics().of(&LoggedStep { metrics, engine })?;
        metrics.values.extend(added);
        Ok(())
    }

    /// Exchanges values over the ranks in one reduction: the largest memory peak and micro-batch time, whether
    /// to stop, and the progress of a background save. `has_recorded` says whether layers of this rank recorded
    /// anything in the step.
    pub(super) fn sync(&self, has_recorded: bool) -> Result<StepSync> {
        let stop = f64::from(u8::from(self.plan.stop.load(Ordering::Relaxed)));
        let [written, done, failed] = self.saver.progress().to_values();
        let flag = |is_set: bool| f64::from(u8::from(is_set));
        let asked = flag(self.observers.are_asked());
        let mut values = vec![stop, written, done, failed, flag(has_recorded), asked];
        let first_peak = values.len();
        let first_pass = first_peak + self.ranks;
        values.resize(first_pass + self.ranks, 0.0);
        let peak_bytes = self.model.engine().peak_bytes();
        self.position.has_held(peak_bytes);
        values[first_peak + self.rank] = peak_bytes as f64;
        values[first_pass + self.rank] = self.pace.longest();
        let sums = self.model.engine().all_reduce_f64(Phase::Other, "progress", &values)?;
        let largest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        Ok(StepSync {
            peak_bytes: largest(&sums[first_peak..first_pass]) as u64,
            longest_pass: largest(&sums[first_pass..]),
            stop: sums[0] > 0.0,
            saving: Progress::from_values([sums[1], sums[2], sums[3]]),
            any_recorded: sums[4] > 0.0,
            is_asked: sums[5] > 0.0,
        })
    }

    /// Describes where `step`, whose update was skipped, first has a non-finite value: repeats its passes with
    /// the same weights. Collective.
    fn find_non_finite(&mut self, step: u64) -> Result<String> {
        let Trainer { plan, model, device, train, pace, grace, controls, position, state, .. } = self;
        let engine = model.engine();
        engine.set_activity("finding what is not finite");
        let finder = NonFiniteFinder::default();
        let observers = Observers::new(vec![Box::new(finder.clone())]);
        let since = (state.step + 1 - step) * plan.config.train.global_batch as u64;
        let mut batches = DataBatches {
            plan,
            engine,
            observers: &observers,
            step,
            source: train,
            first_sample: state.next_sample - since,
            drill: None,
            pace,
            grace,
            records: None,
            grad_norms: Values::default(),
            grad_histograms: Vec::new(),
            controls,
            position,
        };
        run_passes(model, &plan.config, device, &mut batches)?;
        let text = finder.finish(engine)?;
        // Drops the gradients, which no update uses.
        engine.begin_step();
        engine.finish_evaluation()?;
        Ok(text)
    }

    /// Returns the reason why the update of a step was skipped, if it was, or an error if that ends the run.
    /// Loss and norm are the same on every rank, so all ranks continue or stop together.
    fn why_left_out(&mut self, step: u64, outcome: &Outcome) -> Result<Option<String>> {
        let Outcome { loss, grad_norm, applied, overflowed, ref non_finite, loss_scale } = *outcome;
        if applied {
            self.skipped_in_a_row = 0;
            return Ok(None);
        }
        if let (true, Some(LossScale { scale, .. })) = (overflowed, loss_scale) {
            return Ok(Some(format!("a gradient is too large for f16, the loss scale is now {scale}")));
        }
        let (what, value) = match loss.is_finite() {
            true => ("the gradient norm", grad_norm),
            false => ("the loss", loss),
        };
        let parameter = non_finite.clone();
        self.skipped_in_a_row += 1;
        // Consecutive bad steps are examined only once. A GPU, which is not waited for, is examined only if the
        // run ends because of it.
        let ends = self.plan.config.train.nonfinite != NonFinite::Skip;
        let is_looked_for = self.skipped_in_a_row == 1 && (ends || !self.plan.device.is_gpu());
        let origin = if is_looked_for { self.find_non_finite(step)? } else { String::new() };
        match self.plan.config.train.nonfinite {
            NonFinite::Skip if self.skipped_in_a_row < MAX_SKIPPED => {
                Ok(Some(format!("{what} is {value}{}{origin}", in_gradient(&parameter))))
            }
            nonfinite => {
                let is_repeated = nonfinite == NonFinite::Skip;
                Err(TrainError::NonFinite { step, what, value, parameter, origin, is_repeated })
            }
        }
    }
}
