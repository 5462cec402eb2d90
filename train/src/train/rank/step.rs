//! One optimizer step: issuing it, and finding out what became of it.

use std::sync::atomic::Ordering;
use std::time::Instant;

use kiln_collectives::Phase;
use kiln_model::Context;
use kiln_model::decoder;
use kiln_model::layers::Layer;
use kiln_shard::{LossScale, Outcome, Update};

use super::Rank;
use crate::checkpoint::Progress;
use crate::config::NonFinite;
use crate::data::{Batch, slice_for};
use crate::device;
use crate::error::TrainError;
use crate::error::in_gradient;
use crate::metrics::{Reporter, SkipMetrics, StepMetrics};
use crate::schedule::learning_rate;
use crate::train::{MAX_SKIPPED, Plan};

/// A step that has been given to the device. Of a GPU, nothing of it is known yet.
pub(super) struct Issued {
    step: u64,
    update: Update,
    lr: f64,
    start: Instant,
    peak_bytes: u64,
    /// Tokens trained on up to here.
    tokens: u64,
}

/// What the ranks tell each other after every step.
pub(super) struct Together {
    peak_bytes: u64,
    /// The longest micro-batch of any rank, in seconds.
    longest_pass: f64,
    /// Whether some rank has been asked to stop.
    pub(super) stop: bool,
    /// How far the save in the background is.
    pub(super) saving: Progress,
}

impl<B: Layer> Rank<'_, B> {
    /// Issues one optimizer step. Nothing in it waits for a GPU. `None` if the ranks were asked to stop
    /// in the middle of it: all is as it was after the step before.
    pub(super) fn train_step(&mut self) -> Result<Option<(Issued, Together)>, TrainError> {
        let start = Instant::now();
        let Plan { config, model, .. } = self.plan;
        let engine = self.model.engine();
        let (global_batch, micro_batch) = (config.train.global_batch, config.micro_batch());
        let tokens = (global_batch * config.data.seq_len) as u64;
        let training = self.device.clone().autodiff();
        let step = self.step + 1;
        let dropout = self.plan.key().fork("dropout");

        self.begin_step(step);
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
            self.pace.begin();
            let batch = self.fetch(first)?;
            engine.set_activity("forward");
            let inputs = device::tokens(batch.inputs, micro_batch, batch.seq_len, &training);
            let targets = device::tokens(batch.targets, micro_batch, batch.seq_len, &training);
            let context = Context::training(dropout, first, model.dropout);
            let pass = self.model.pass(&training);
            let loss = decoder::loss(&pass, inputs, targets, 1.0 / tokens as f64, &context);
            engine.check()?;
            engine.set_activity("backward");
            let last = index + 1 == self.micro_batches();
            engine.backward(loss, last)?;
            if self.pace.end() && !last {
                let (stop, longest) = self.pace.ask(engine, &self.plan.stop)?;
                if stop {
                    // Gradients of a step that does not end, and weights that are gathered for it.
                    engine.begin_step();
                    engine.finish_evaluation()?;
                    return Ok(None);
                }
                self.grace.mind(longest, None, self.rank);
            }
        }
        engine.set_activity("optimizer");
        let lr = learning_rate(&config.optim, step, config.train.steps);
        let update = engine.update(&config.optim.adamw(), lr, config.optim.grad_clip)?;
        let together = self.over_ranks()?;
        self.pace.told(together.longest_pass);
        let step_s = start.elapsed().as_secs_f64();
        self.grace.mind(together.longest_pass, Some(step_s), self.rank);

        self.step = step;
        self.next_sample += global_batch as u64;
        self.tokens += tokens;
        let (peak_bytes, tokens) = (together.peak_bytes, self.tokens);
        Ok(Some((Issued { step, update, lr, start, peak_bytes, tokens }, together)))
    }

    /// Finds out what became of a step, and reports it: its loss.
    pub(super) fn settle_step(
        &mut self,
        issued: Issued,
        reporter: Option<&mut Reporter>,
    ) -> Result<f64, TrainError> {
        let Issued { step, update, lr, start, peak_bytes, tokens } = issued;
        let outcome = self.model.engine().outcome(update)?;
        let now = Instant::now();
        let step_s = (now - self.settled.max(start)).as_secs_f64();
        self.settled = now;
        self.loss_scale = outcome.loss_scale;
        let left_out = self.why_left_out(step, &outcome)?;
        self.skipped += u64::from(left_out.is_some());

        let Outcome { loss, grad_norm, .. } = outcome;
        let of_step = (self.plan.config.train.global_batch * self.plan.config.data.seq_len) as f64;
        let tokens_per_s = of_step / step_s;
        if let Some(reporter) = reporter {
            let reported = match left_out {
                Some(why) => {
                    let (skipped, parameter) = (self.skipped, outcome.non_finite);
                    reporter.skip(&SkipMetrics { step, skipped, parameter }, &why)
                }
                None => {
                    let log = step == self.plan.config.train.steps
                        || step.is_multiple_of(self.plan.config.log.every)
                        || step == 1;
                    let metrics = StepMetrics {
                        step,
                        loss,
                        grad_norm,
                        lr,
                        tokens_per_s,
                        tokens,
                        mfu: self.peak.share(tokens_per_s * self.flops_per_token),
                        peak_bytes,
                        step_s,
                    };
                    reporter.step(&metrics, log)
                }
            };
            let path = self.plan.out.join("metrics.jsonl");
            reported.map_err(TrainError::io("write", &path))?;
        }
        Ok(loss)
    }

    fn begin_step(&self, step: u64) {
        if let Some(drill) = &self.drill {
            drill.begin_step(step);
        }
        self.position.begin_step(step);
        self.model.engine().begin_step();
    }

    /// The micro-batch that starts at sample `first` of the global order.
    fn fetch(&self, first: u64) -> Result<Batch, TrainError> {
        self.model.engine().set_activity("data loading");
        if let Some(drill) = &self.drill {
            drill.data_loading().map_err(TrainError::Drill)?;
        }
        Ok(self.train.fetch(first, self.plan.config.micro_batch())?)
    }

    /// The peak of memory and the time of a micro-batch maximised, whether anyone is to stop, and how far
    /// a save in the background is, in one reduction over the ranks.
    fn over_ranks(&self) -> Result<Together, TrainError> {
        let stop = f64::from(u8::from(self.plan.stop.load(Ordering::Relaxed)));
        let [written, done, failed] = self.saver.progress().to_values();
        let mut values = vec![stop, written, done, failed];
        let first_peak = values.len();
        let first_pass = first_peak + self.ranks;
        values.resize(first_pass + self.ranks, 0.0);
        values[first_peak + self.rank] = self.model.engine().peak_bytes() as f64;
        values[first_pass + self.rank] = self.pace.longest();
        let sums = self.model.engine().all_reduce_f64(Phase::Other, "progress", &values)?;
        let largest = |values: &[f64]| values.iter().copied().fold(0.0, f64::max);
        Ok(Together {
            peak_bytes: largest(&sums[first_peak..first_pass]) as u64,
            longest_pass: largest(&sums[first_pass..]),
            stop: sums[0] > 0.0,
            saving: Progress::from_values([sums[1], sums[2], sums[3]]),
        })
    }

    /// Why the update of a step was left out, if it was, in words; an error if that ends the run. Loss
    /// and norm are the same on every rank, so all ranks go on, or stop, together.
    fn why_left_out(&mut self, step: u64, outcome: &Outcome) -> Result<Option<String>, TrainError> {
        let Outcome { loss, grad_norm, applied, overflowed, ref non_finite, loss_scale } = *outcome;
        if applied {
            self.skipped_in_a_row = 0;
            return Ok(None);
        }
        if let (true, Some(LossScale { scale, .. })) = (overflowed, loss_scale) {
            return Ok(Some(format!(
                "a gradient is too large for f16, the loss scale is now {scale}"
            )));
        }
        let (what, value) = match loss.is_finite() {
            true => ("the gradient norm", grad_norm),
            false => ("the loss", loss),
        };
        let parameter = non_finite.clone();
        self.skipped_in_a_row += 1;
        match self.plan.config.train.nonfinite {
            NonFinite::Abort => Err(TrainError::NonFinite { step, what, value, parameter }),
            NonFinite::Skip if self.skipped_in_a_row >= MAX_SKIPPED => {
                Err(TrainError::TooManySkipped { step, what, value, parameter })
            }
            NonFinite::Skip => Ok(Some(format!("{what} is {value}{}", in_gradient(&parameter)))),
        }
    }
}
