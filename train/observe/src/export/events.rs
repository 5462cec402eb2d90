//! Metrics as TensorBoard event files.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use kiln_sys::durable::parent_of;

use super::{ExportError, Exported, runs};
use crate::tensorboard::{EventWriter, event, sample_tag};

/// Writes an event file for each run into its own new folder in `out`. Returns these folders.
/// A run that is named by a path gets a folder name with `-` for each `/`.
///
/// # Errors
///
/// If a folder is not a run or has no metrics, or if writing fails.
pub fn tensorboard(folders: &[PathBuf], out: &Path) -> Result<Vec<PathBuf>, ExportError> {
    let export = |run: Result<Exported, ExportError>| {
        let run = run?;
        let folder = out.join(run.name.trim_start_matches('/').replace('/', "-"));
        fs::create_dir_all(parent_of(&folder)).map_err(ExportError::io("create", &folder))?;
        match fs::create_dir(&folder) {
            Err(error) if error.kind() == ErrorKind::AlreadyExists => return Err(ExportError::Taken(folder)),
            created => created.map_err(ExportError::io("create", &folder))?,
        }
        if let Err(error) = write(&run, &folder) {
            // An incomplete export would look complete. Only the first error is reported.
            let _ = fs::remove_dir_all(&folder);
            return Err(ExportError::io("write to", &folder)(error));
        }
        Ok(folder)
    };
    runs(folders).map(export).collect()
}

fn write(run: &Exported, folder: &Path) -> io::Result<()> {
    let mut file = EventWriter::create(folder, 0)?;
    file.write(&event::settings(run.times[0], run.config.clone()));
    for (line, time) in run.lines.iter().zip(&run.times) {
        event::metrics(line, *time).iter().for_each(|event| file.write(event));
    }
    for samples in run.samples.chunk_by(|one, next| one.step == next.step) {
        for (index, sample) in samples.iter().enumerate() {
            let at = run.lines.partition_point(|line| line.step < sample.step).min(run.lines.len() - 1);
            let text = format!("{}{}", sample.prompt, sample.text);
            file.write(&event::text(run.times[at], sample.step, &sample_tag(index), &text));
        }
    }
    file.finish()
}
