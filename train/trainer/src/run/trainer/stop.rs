//! The early end of a run after a requested stop.

use std::sync::atomic::Ordering;

use kiln_collectives::Phase;

use super::state::Trainer;
use crate::error::Result;
use crate::metrics::print_line;
use crate::process::{self, quoted, stop_signal, was_interrupted};
use crate::run::Summary;
use crate::run::events::EventKind;
use kiln_checkpoint::{self as checkpoint, Checkpoint};
use kiln_sys::words::number_of;

impl Trainer<'_> {
    pub(super) fn asked_to_stop(&mut self) -> Result<bool> {
        Ok(self.stops.pace.ask(self.model.engine(), &self.plan.stop)?.0)
    }

    pub(super) fn stop(&mut self) -> Result<Summary> {
        self.settle_earlier_save()?;
        if !self.is_saved()? {
            if was_interrupted() {
                let step = self.state.step;
                self.print_line(&format!("interrupted: saving step {step}; Ctrl-C again ends at once"));
            }
            self.begin_save(true)?;
            self.settle_save()?;
        }
        let checkpoint = checkpoint::checkpoint_path(&self.plan.checkpoints(), self.state.step);
        let (steps, loss) = (self.state.step, self.loss());
        let who = match stop_signal() {
            Some(signal) => signal,
            None if self.plan.stop.load(Ordering::Relaxed) => "rank 0, not by a signal",
            None => "another rank",
        };
        let of = number_of(self.plan.config.train.steps, "step");
        let told = format!("asked by {who}: {steps} of {of}, checkpoint {}", checkpoint.display());
        self.note(EventKind::Stop, steps, &told);
        // The log is finished first because a hanging disk may delay other output.
        if let Some(mut reporter) = self.reporter.take() {
            reporter.finish();
            self.conclusion(&reporter, None).lines().iter().for_each(|line| print_line(line));
            let out = quoted(&self.plan.out);
            let resume = match process::command() {
                Some(program) if self.model.engine().world().is_one_process() => {
                    format!("resume with: {program} train --resume {out}")
                }
                Some(_) => format!("resume with the same launcher and: train --resume {out}"),
                None => "resume with --resume latest".to_owned(),
            };
            print_line(&format!(
                "stopped on request: {} of {}, checkpoint {}; {resume}",
                self.state.step,
                number_of(self.plan.config.train.steps, "step"),
                checkpoint.display()
            ));
        }
        Ok(Summary { steps, loss, val_loss: None, checkpoint, sample: None, preempted: true })
    }

    /// Returns whether `latest` names a checkpoint of the last completed step. Collective.
    fn is_saved(&self) -> Result<bool> {
        let place = checkpoint::checkpoint_path(&self.plan.checkpoints(), self.state.step);
        let resumed = self.plan.resume.as_ref().map(Checkpoint::folder);
        if self.saves.last.as_deref() != Some(&*place) && resumed != Some(&*place) {
            return Ok(false);
        }
        // A run that went back to an earlier checkpoint may have later checkpoints.
        let is_latest =
            self.rank == 0 && Checkpoint::find_latest(&self.plan.out).is_ok_and(|latest| latest == place);
        let is_latest = [f64::from(u8::from(is_latest))];
        Ok(self.model.engine().all_reduce_f64(Phase::Checkpoint, "save", &is_latest)?[0] > 0.0)
    }
}
