//! A step of a run: its passes and its update, the exchange between ranks after it, and its outcome.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::Instant;

use kiln_collectives::Phase;
use kiln_model::Context;
use kiln_model::layers::Records;
use kiln_shard::{Engine, LearningRates, LossScale, Outcome};

use super::issued::{IssuedStep, StepLog, end_of_step};
use super::state::{Trainer, Watchers};
use crate::error::{Result, TrainError, in_gradient};
use crate::logged::LoggedStep;
use crate::losses::Loss;
use crate::metrics::{SkipMetrics, StepMetrics, StepTimes};
use crate::objective::Objective;
use crate::passes::{MicroBatch, RunLoss, forward_backward, micro_batches, tokens_of_step};
use crate::process::position::StepOutcome;
use crate::run::events::EventKind;
use crate::run::nonfinite::NonFiniteFinder;
use crate::run::observe::{Moment, Observers, Pass};
use crate::run::{MAX_SKIPPED, Plan, RecordedStep};
use crate::values::Values;
use kiln_checkpoint::Progress;
use kiln_config::schedule::learning_rates;
use kiln_config::{Config, NonFinite, OptimSection};
use kiln_data::{Batch, slice_for};
use kiln_sys::words::number_of;

pub(super) struct StepSync {
    pub(super) peak_bytes: u64,
    pub(super) longest_pass: f64,
    pub(super) stop: bool,
    pub(super) saving: Progress,
    pub(super) any_recorded: bool,
    pub(super) has_request: bool,
}

/// This rank's samples of a step, and the sum of the weights of the whole step.
struct Weighted {
    batch: Batch,
    counted: f64,
}

impl Weighted {
    /// Returns micro-batch `index` of `rows` samples.
    fn rows(&self, index: usize, rows: usize) -> Batch {
        let Batch { inputs, targets, weights, seq_len, first_global_index, .. } = &self.batch;
        let first = index * rows;
        let range = first * seq_len..(first + rows) * seq_len;
        Batch {
            inputs: inputs[range.clone()].to_vec(),
            targets: targets[range.clone()].to_vec(),
            weights: weights.as_ref().map(|weights| weights[range].to_vec()),
            rows,
            seq_len: *seq_len,
            first_global_index: first_global_index + first as u64,
        }
    }
}

/// Returns the gradient's 2-norm by module before clipping, as in `grad_norm.layers.3`. Collective.
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
    /// Takes one optimizer step on the next batch, and logs it if the configuration says so. Collective.
    /// Returns false, without a step, after the configured last step and after a stop request: a loop must then call
    /// [`Trainer::finish`]. On a GPU, waits for this step only if its outcome is needed at once.
    ///
    /// # Errors
    ///
    /// If data cannot be read, a non-finite loss ends the run, a background save has failed, or the ranks lose contact.
    pub fn train_step(&mut self) -> Result<bool> {
        self.take_step(self.loss.clone())
    }

    /// Takes one optimizer step like [`Trainer::train_step`], with `loss` instead of the loss of the configuration: a
    /// function of the model, the batch and a context, as in [`Objective::loss`]. Collective.
    ///
    /// # Errors
    ///
    /// As for [`Trainer::train_step`].
    pub fn train_step_with(&mut self, loss: impl Objective + 'static) -> Result<bool> {
        self.take_step(Arc::new(RunLoss::from(Loss::Objective(Arc::new(loss), Vec::new()))))
    }

    fn take_step(&mut self, loss: Arc<RunLoss>) -> Result<bool> {
        if self.progress.is_stopping || self.is_complete() {
            return Ok(false);
        }
        // Nothing up to the update waits for a GPU.
        let (plan, engine) = (self.plan, self.model.engine().clone());
        let (config, step) = (&plan.config, self.state.step + 1);
        let (start, observers) = (self.read_clocks(), self.watchers.observers.clone());
        self.begin_step(step);
        let records =
            config.log.is_logged(step, config.train.steps).then(|| Records::new(config.log.activations));
        let micro_batches = micro_batches(config, self.ranks);
        engine.begin_step();
        let weighted = self.fetch_weighted(self.state.next_sample)?;
        let counted = weighted.as_ref().map_or(tokens_of_step(config), |weighted| weighted.counted);
        for index in 0..micro_batches {
            let records = records.as_ref();
            let batch =
                self.fetch(step, self.state.next_sample, index, weighted.as_ref(), &observers, records)?;
            let last = index + 1 == micro_batches;
            forward_backward(&self.model, &loss, config, &self.device, batch, counted, last)?;
            if self.stops_after_pass(last)? {
                // The state remains that after the previous step.
                self.drop_step()?;
                self.progress.is_stopping = true;
                self.settle_step()?;
                return Ok(false);
            }
        }
        engine.set_activity("optimizer");
        observers.on_gradients(&engine, step)?;
        let mut values = std::mem::take(&mut self.progress.values);
        if records.is_some() && config.log.gradients {
            values.extend(grad_norms(&engine)?);
        }
        let grad_histograms =
            config.log.has_histograms(step).then(|| engine.grad_histograms()).transpose()?;
        let (rates, grad_clip) = self.rates(step);
        let lr = rates.of(0);
        let update = engine.update(rates, grad_clip)?;
        if let Some(gradients) = grad_histograms {
            let weights = engine.weight_histograms()?;
            if let Some(reporter) = &mut self.reporter {
                reporter.histograms(step, "weights", weights);
                reporter.histograms(step, "gradients", gradients);
            }
        }
        let recorded = records.map(|records| RecordedStep::start(&engine, &records)).transpose()?;
        let sync = self.sync(recorded.as_ref().is_some_and(|recorded| !recorded.is_empty()))?;
        observers.on_step_end(&engine, step);
        let any_recorded = sync.any_recorded;
        let log = recorded.map(|recorded| StepLog { recorded, any_recorded, values });
        let end = self.read_clocks();
        self.stops.pace.synced(sync.longest_pass);
        let step_s = (end.at - start.at).saturating_sub(end.held - start.held).as_secs_f64();
        self.stops.grace.check(sync.longest_pass, Some(step_s), self.rank);

        self.state.step = step;
        self.state.next_sample += config.train.global_batch as u64;
        self.state.tokens += (config.train.global_batch * config.data.seq_len) as u64;
        self.progress.has_trained = true;
        let (peak_bytes, tokens) = (sync.peak_bytes, self.state.tokens);
        self.last_loss = loss;
        let issued = IssuedStep { step, update, lr, start, end, peak_bytes, tokens, log };
        self.after_step(issued, sync)?;
        Ok(true)
    }

    /// Reports the previous step, and the issued one if its outcome is needed; then serves requests. Collective.
    fn after_step(&mut self, issued: IssuedStep, sync: StepSync) -> Result<()> {
        // A custom metric may look at the weights, which must be those of its step.
        let is_looked_at = issued.log.is_some() && !self.plan.registry.metrics().is_empty();
        let is_looked_at = is_looked_at || self.watchers.observers.is_observing(issued.step);
        // On a GPU, the outcome of a step is read once the next step is issued, unless it is needed earlier.
        self.settle_step()?;
        self.progress.issued = Some(issued);
        if !self.plan.device.is_gpu() || sync.stop || is_looked_at || self.is_complete() {
            self.settle_step()?;
        }
        self.advance_save(sync.saving)?;
        if sync.has_request {
            self.settle_step()?;
            self.watchers.observers.serve_requests(self.model.engine(), self.state.step)?;
        }
        if self.watchers.controls.take_save() && !self.is_complete() {
            self.save()?;
        }
        self.progress.is_stopping |= sync.stop;
        Ok(())
    }

    fn begin_step(&self, step: u64) {
        let Watchers { observers, position, drill, .. } = &self.watchers;
        drill.iter().for_each(|drill| drill.begin_step(step));
        position.begin_step(step);
        observers.on_step_begin(self.model.engine(), step);
        let (lr, first_sample) = (self.rates(step).0.of(0), self.state.next_sample);
        tracing::debug!(of = step, lr, first_sample, "a step begins");
    }

    /// Reads this rank's samples of the step that begins with `first_sample`, and sums the weights of the whole step, if
    /// the data have weights. Collective.
    fn fetch_weighted(&self, first_sample: u64) -> Result<Option<Weighted>> {
        let (train, config) = (&self.data.train, &self.plan.config);
        if !train.is_weighted() {
            return Ok(None);
        }
        self.model.engine().set_activity("data loading");
        let rows = config.train.global_batch / self.ranks;
        let batch = train.fetch(first_sample + (self.rank * rows) as u64, rows)?;
        let own: f64 = batch.weights.iter().flatten().map(|weight| f64::from(*weight)).sum();
        let sums = self.model.engine().all_reduce_f64(Phase::Other, "weights", &[own])?;
        Ok(Some(Weighted { batch, counted: sums[0] }))
    }

    /// Returns this rank's micro-batch `index` of a step that begins with `first_sample` of the global order.
    fn fetch(
        &mut self,
        step: u64,
        first_sample: u64,
        index: usize,
        weighted: Option<&Weighted>,
        observers: &Observers,
        records: Option<&Records>,
    ) -> Result<MicroBatch> {
        let Plan { config, model, .. } = self.plan;
        let engine = self.model.engine();
        engine.set_activity("data loading");
        let (ranks, samples) = (self.ranks as u64, config.micro_batch() as u64);
        let global_batch = config.train.global_batch as u64;
        let first_sample =
            first_sample + slice_for(0, global_batch, self.rank as u64, ranks, index as u64, samples);
        self.stops.pace.begin(engine.world().holds().total());
        self.watchers.position.begin_micro_batch(index as u64, first_sample, samples);
        tracing::debug!(micro_batch = index, first_sample, samples, "fetching");
        if let Some(drill) = &self.watchers.drill {
            drill.data_loading().map_err(TrainError::Drill)?;
        }
        let batch = match weighted {
            Some(weighted) => weighted.rows(index, config.micro_batch()),
            None => self.data.train.fetch(first_sample, config.micro_batch())?,
        };
        let context = Context::training(self.plan.key().fork("dropout"), first_sample, model.dropout)
            .with_z_loss((config.train.z_loss > 0.0).then_some(config.train.z_loss));
        let context = match records {
            Some(records) => context.recording(records),
            None => context,
        };
        let Batch { inputs, targets, weights, .. } = batch;
        let batch = MicroBatch { inputs, targets, weights, context };
        let at = Moment { step, micro_batch: index, first_sample, pass: Pass::Forward };
        match observers.on_batch(engine, at, &batch)? {
            None => Ok(batch),
            probe => Ok(MicroBatch { context: batch.context.clone().probed(probe), ..batch }),
        }
    }

    /// Returns whether the ranks stop after this pass. False after the `last` one, before [`Self::sync`]. Collective.
    fn stops_after_pass(&mut self, last: bool) -> Result<bool> {
        let engine = self.model.engine();
        if !self.stops.pace.end(engine.world().holds().total()) || last {
            return Ok(false);
        }
        let (stop, longest) = self.stops.pace.ask(engine, &self.plan.stop)?;
        if !stop {
            self.stops.grace.check(longest, None, self.rank);
        }
        Ok(stop)
    }

    /// Returns the learning rates of `step` and its clipping norm, which the user may have changed at a breakpoint.
    fn rates(&self, step: u64) -> (LearningRates, f64) {
        let Config { optim, train, .. } = &self.plan.config;
        let changes = self.watchers.controls.changes();
        let optim = OptimSection { lr: changes.lr.unwrap_or(optim.lr), ..optim.clone() };
        (learning_rates(&optim, step, train.steps), changes.grad_clip.unwrap_or(optim.grad_clip))
    }

    /// Reads and reports the outcome of the last issued step, unless it is known already.
    pub(in crate::run) fn settle_step(&mut self) -> Result<()> {
        let Some(issued) = self.progress.issued.take() else { return Ok(()) };
        let IssuedStep { step, update, lr, start, end, peak_bytes, tokens, log } = issued;
        let asked = Instant::now();
        let outcome = self.model.engine().outcome(update)?;
        let now = self.read_clocks();
        // Work between two steps, such as an evaluation, belongs to neither.
        let before = if self.speed.settled.at > start.at { &self.speed.settled } else { &start };
        let is_followed = self.state.step > step;
        let end = if is_followed { end_of_step(before, end, asked, now) } else { now };
        let (begun, taken) = (before.at, end.at - before.at);
        let was_held = end.held.saturating_sub(before.held);
        let times = StepTimes::between(&before.times, &end.times, was_held);
        let step_s = taken.saturating_sub(was_held).as_secs_f64();
        self.speed.settled = end;
        self.speed.in_steps += step_s;
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
            mfu: self.speed.peak.as_mut().map(|peak| peak.share(tokens_per_s * self.speed.flops_per_token)),
            peak_bytes,
            step_s,
            tflops: tokens_per_s * self.speed.flops_per_token / 1e12,
            times,
            values: Values::default(),
        };
        if let Some(mut start) = self.speed.start_times.take() {
            self.speed.start_took = start.until(begun);
            let what = if self.plan.device.is_gpu() { "first step and compiling" } else { "first step" };
            start.add(what, taken);
            self.print_line(&start.line(self.speed.settled.at));
            if let Some(kernels) = self.plan.device.kernels() {
                self.print_line(&kernels.to_string());
            }
            let measured = self.plan.device.measured_products();
            if measured > 0 {
                let kinds = number_of(measured, "kind");
                self.print_line(&format!(
                    "{kinds} of matrix products with algorithms that kiln warmup has measured"
                ));
            }
        }
        self.watchers.position.settled(StepOutcome { step, loss, tokens_per_s, step_s });
        let is_logged = log.is_some();
        if let (Some(log), None) = (log, &left_out) {
            self.complete(&mut metrics, log)?;
        }
        if let Some(why) = &left_out {
            self.note(EventKind::Skipped, step, &format!("{why}: the update was skipped"));
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
        self.watchers.observers.on_step_done(self.model.engine(), &metrics)?;
        self.progress.metrics = Some(metrics);
        self.reached();
        Ok(())
    }

    fn complete(&self, metrics: &mut StepMetrics, log: StepLog) -> Result<()> {
        let StepLog { recorded, any_recorded, values } = log;
        let engine = self.model.engine();
        if any_recorded {
            metrics.values.extend(recorded.finish(engine, metrics.loss, &self.plan.config.loss.kind)?);
        }
        metrics.values.extend(values);
        let step = LoggedStep { metrics, engine, config: &self.plan.config };
        let added = self.plan.registry.metrics().of(&step)?;
        metrics.values.extend(added);
        Ok(())
    }

    /// Exchanges the values of [`StepSync`] in one reduction. `has_recorded`: this rank's layers recorded values.
    pub(super) fn sync(&self, has_recorded: bool) -> Result<StepSync> {
        let stop = f64::from(u8::from(self.plan.stop.load(Ordering::Relaxed)));
        let [written, done, failed] = self.saves.saver.progress().to_values();
        let flag = |is_set: bool| f64::from(u8::from(is_set));
        let asked = flag(self.watchers.observers.have_request());
        let mut values = vec![stop, written, done, failed, flag(has_recorded), asked];
        let first_peak = values.len();
        let first_pass = first_peak + self.ranks;
        values.resize(first_pass + self.ranks, 0.0);
        let peak_bytes = self.model.engine().peak_bytes();
        self.watchers.position.has_held(peak_bytes);
        values[first_peak + self.rank] = peak_bytes as f64;
        values[first_pass + self.rank] = self.stops.pace.longest();
        let sums = self.model.engine().all_reduce_f64(Phase::Other, "progress", &values)?;
        let largest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        Ok(StepSync {
            peak_bytes: largest(&sums[first_peak..first_pass]) as u64,
            longest_pass: largest(&sums[first_pass..]),
            stop: sums[0] > 0.0,
            saving: Progress::from_values([sums[1], sums[2], sums[3]]),
            any_recorded: sums[4] > 0.0,
            has_request: sums[5] > 0.0,
        })
    }

    /// Repeats the passes of `step`, whose update was skipped, and describes the first non-finite tensor. Collective.
    fn find_non_finite(&mut self, step: u64) -> Result<String> {
        let engine = self.model.engine().clone();
        engine.set_activity("finding the first tensor that is not finite");
        let finder = NonFiniteFinder::default();
        let observers = Observers::new(vec![Box::new(finder.clone())]);
        let config = &self.plan.config;
        let since = (self.state.step + 1 - step) * config.train.global_batch as u64;
        let first_sample = self.state.next_sample - since;
        let micro_batches = micro_batches(config, self.ranks);
        engine.begin_step();
        let weighted = self.fetch_weighted(first_sample)?;
        let counted = weighted.as_ref().map_or(tokens_of_step(config), |weighted| weighted.counted);
        for index in 0..micro_batches {
            let batch = self.fetch(step, first_sample, index, weighted.as_ref(), &observers, None)?;
            let last = index + 1 == micro_batches;
            forward_backward(&self.model, &self.last_loss, config, &self.device, batch, counted, last)?;
        }
        let text = finder.finish(&engine)?;
        self.drop_step()?;
        Ok(text)
    }

    /// Drops the gradients of a step without an update, and the weights gathered for it. Collective.
    fn drop_step(&self) -> Result<()> {
        self.model.engine().begin_step();
        Ok(self.model.engine().finish_evaluation()?)
    }

    /// Returns the reason for which a step's update was skipped, if it was; fails if a non-finite value ends the run.
    /// Loss and norm are the same on every rank, so all ranks continue or stop together.
    fn why_left_out(&mut self, step: u64, outcome: &Outcome) -> Result<Option<String>> {
        let Outcome { loss, grad_norm, applied, overflowed, ref non_finite, loss_scale } = *outcome;
        if applied {
            self.progress.skipped_in_a_row = 0;
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
        self.progress.skipped_in_a_row += 1;
        // Only the first of consecutive bad steps is examined; on a GPU, to avoid waiting, only if it ends the run.
        let ends = self.plan.config.train.nonfinite != NonFinite::Skip;
        let is_looked_for = self.progress.skipped_in_a_row == 1 && (ends || !self.plan.device.is_gpu());
        let origin = if is_looked_for { self.find_non_finite(step)? } else { String::new() };
        match self.plan.config.train.nonfinite {
            NonFinite::Skip if self.progress.skipped_in_a_row < MAX_SKIPPED => {
                Ok(Some(format!("{what} is {value}{}{origin}", in_gradient(&parameter))))
            }
            nonfinite => {
                let is_repeated = nonfinite == NonFinite::Skip;
                Err(TrainError::NonFinite { step, what, value, parameter, origin, is_repeated })
            }
        }
    }
}
