//! Saves the checkpoints of a rank, and handles failed saves.

use std::path::PathBuf;

use super::state::Trainer;
use crate::error::Result;
use crate::metrics::Reporter;
use crate::run::events::EventKind;
use crate::run::plan::Plan;
use kiln_checkpoint::{self as checkpoint, CheckpointError, Format, Progress, SaveContext};
use kiln_config::OnFailure;

impl Trainer<'_> {
    /// Saves a checkpoint of the last completed step, in the background if the configuration says so. Collective.
    /// Does nothing if that step is saved, or once the ranks were asked to stop: then [`Trainer::finish`] saves.
    ///
    /// # Errors
    ///
    /// If this or the previous save fails and `checkpoint.on_failure` is `abort`, or if the ranks lose contact.
    pub fn save(&mut self) -> Result<()> {
        self.settle_step()?;
        if self.progress.is_stopping || !self.is_unsaved() {
            return Ok(());
        }
        self.begin_save(false)?;
        let section = &self.plan.config.checkpoint;
        let in_background = section.background && section.format == Format::Sharded;
        self.progress.is_stopping = !in_background && self.asked_to_stop()?;
        Ok(())
    }

    pub(super) fn is_unsaved(&self) -> bool {
        self.progress.has_trained && self.saves.begun != Some(self.state.step)
    }

    /// Begins to save. A failure is an error if this is the run's `last` save, or if the configuration says so.
    pub(super) fn begin_save(&mut self, last: bool) -> Result<()> {
        // Settled first, so that a failure of the earlier save is not mistaken for one of this save.
        self.settle_earlier_save()?;
        let Plan { message, inherited, .. } = self.plan;
        self.model.engine().set_activity("checkpoint");
        let context = SaveContext {
            config: Some(message.config.clone()),
            // Contents as of the start: data and weights may be replaced while the run continues.
            files: inherited.files.clone(),
            base: self.plan.base.clone(),
            ..SaveContext::new(self.state.clone())
        };
        let shown = self.reporter.as_ref().map(Reporter::saving);
        let begun = self.saves.saver.begin(self.model.engine(), context);
        drop(shown);
        if begun.is_ok() {
            self.saves.begun = Some(self.state.step);
        }
        self.note_save(begun, last)
    }

    pub(super) fn settle_earlier_save(&mut self) -> Result<()> {
        let settled = self.wait_for_save();
        self.note_save(settled, false)
    }

    pub(super) fn advance_save(&mut self, saving: Progress) -> Result<()> {
        let advanced = self.saves.saver.advance(self.model.engine(), saving);
        self.note_save(advanced, false)
    }

    pub(super) fn settle_save(&mut self) -> Result<()> {
        let settled = self.wait_for_save();
        self.note_save(settled, true)
    }

    fn wait_for_save(&mut self) -> Result<Option<PathBuf>, CheckpointError> {
        if !self.saves.saver.is_pending() {
            return Ok(None);
        }
        self.model.engine().set_activity("checkpoint");
        let _shown = self.reporter.as_ref().map(Reporter::saving);
        self.saves.saver.settle(self.model.engine())
    }

    /// Records a completed checkpoint. A failure is an error if the save is the `last` one or the run cannot continue.
    fn note_save(&mut self, outcome: Result<Option<PathBuf>, CheckpointError>, last: bool) -> Result<()> {
        let goes_on = !last && self.plan.config.checkpoint.on_failure == OnFailure::Continue;
        match outcome {
            Ok(None) => {}
            Ok(Some(saved)) => {
                let step = saved.file_name().and_then(checkpoint::step_of);
                if let Some(step) = step {
                    self.watchers.position.saved(step);
                    self.note(EventKind::Checkpoint, step, &format!("complete: {}", saved.display()));
                }
                self.saves.last = Some(saved);
            }
            Err(error)
                if !goes_on
                    // The ranks have lost contact, or the run has nowhere to save.
                    || matches!(
                        error,
                        CheckpointError::Shard(_) | CheckpointError::NotHeld { .. }
                    ) =>
            {
                return Err(error.into());
            }
            Err(error) if error.is_consequence() => {}
            Err(error) => tracing::warn!("{error}; training continues without this checkpoint"),
        }
        Ok(())
    }
}
