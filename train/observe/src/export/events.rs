//! Metrics as TensorBoard event files.

use std::io;
use std::path::{Path, PathBuf};

use super::error::ExportError;
use super::folder::fill;
use super::run::{Exported, runs};
use crate::tensorboard::{EventWriter, sample_tag};

/// Writes an event file for each of the runs in `folders`, in a folder of the run's name in `out`, where each
/// `/` of a path becomes a `-`. Returns these folders.
///
/// # Errors
///
/// If a folder is not a run or has no metrics, or if not everything can be written.
pub fn tensorboard(folders: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>, ExportError> {
    let of_run = |run: Result<Exported, ExportError>| {
        let run = run?;
        let name = run.name.trim_start_matches('/').replace('/', "-");
        fill(out.join(name), |folder| write(&run, folder))
    };
    runs(folders).map(of_run).collect()
}

fn write(run: &Exported, folder: &Path) -> io::Result<()> {
    let mut file = EventWriter::create(folder, 0)?;
    file.settings(run.time(0), run.config.clone());
    for (index, line) in run.lines.iter().enumerate() {
        file.metrics(line, run.time(index));
    }
    let mut index = 0;
    for (nth, sample) in run.samples.iter().enumerate() {
        // Several prompts of the same step follow each other.
        let is_next = nth > 0 && run.samples[nth - 1].step == sample.step;
        index = if is_next { index + 1 } else { 0 };
        let at = run.lines.partition_point(|line| line.step < sample.step).min(run.lines.len() - 1);
        let text = format!("{}{}", sample.prompt, sample.text);
        file.text(run.time(at), sample.step, &sample_tag(index), &text);
    }
    file.finish()
}
