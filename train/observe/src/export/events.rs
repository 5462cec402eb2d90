//! Metrics as event files of TensorBoard.

use std::path::{Path, PathBuf};

use super::error::ExportError;
use super::run::{Exported, each};
use crate::tensorboard::{EventWriter, sample_tag};

/// Writes an event file for each of the runs in `folders`, in a folder of the run's name in `out`. Returns these
/// folders.
///
/// # Errors
///
/// If a folder is no run or has no metrics, or nothing can be written.
pub fn tensorboard(folders: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>, ExportError> {
    each(folders, |run: Exported| {
        let folder = out.join(&run.name);
        if folder.exists() {
            return Err(ExportError::Taken(folder));
        }
        let mut file = EventWriter::create(&folder, 0).map_err(ExportError::io("write to", &folder))?;
        file.settings(run.time(0), run.config.clone());
        for (index, line) in run.lines.iter().enumerate() {
            file.metrics(line, run.time(index));
        }
        let mut index = 0;
        for (nth, sample) in run.samples.iter().enumerate() {
            // Several prompts of a step follow each other.
            let is_next = nth > 0 && run.samples[nth - 1].step == sample.step;
            index = if is_next { index + 1 } else { 0 };
            let at = run.lines.partition_point(|line| line.step < sample.step).min(run.lines.len() - 1);
            let text = format!("{}{}", sample.prompt, sample.text);
            file.text(run.time(at), sample.step, &sample_tag(index), &text);
        }
        Ok(folder)
    })
}
