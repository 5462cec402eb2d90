//! Reports: a folder with the page of [`crate::page`] as one self-contained file, and curves as SVG files.

use std::fs;
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

use kiln_sys::StagingFolder;
use kiln_sys::durable::{parent_of, sync_folder, write as write_file};
use serde::Serialize;

use crate::page::{Snapshot, TimelinesAt, page_of_strategies};
use crate::plot::{Axis, Curve, Curves};
use crate::run::Series;
use crate::status::LookAt;

/// The reason why a report was not written.
#[derive(Debug, thiserror::Error)]
pub enum ReportError {
    /// The output path already exists.
    #[error(
        "{} exists and is not empty; reports overwrite nothing: name a new folder with {flag} DIR, or remove that one",
        .path.display()
    )]
    Exists {
        /// The output path.
        path: PathBuf,
        /// The flag that named it.
        flag: &'static str,
    },
    /// A file operation failed.
    #[error("cannot write the report {}: {source}", .path.display())]
    Io {
        /// The output path.
        path: PathBuf,
        /// The cause.
        source: io::Error,
    },
    /// The data cannot be written as JSON.
    #[error("cannot write the data of the report: {0}")]
    Json(#[from] serde_json::Error),
}

/// The files of a report.
#[derive(Clone, Debug)]
pub struct Report {
    page: String,
    /// File names and SVG texts.
    curves: Vec<(String, String)>,
}

impl Report {
    /// Creates a report of the runs in `paths`, which are run folders or folders of run folders.
    /// `program` is the version of the program that writes the report.
    ///
    /// # Errors
    ///
    /// If the data cannot be written as JSON.
    pub fn from_runs(
        paths: Vec<PathBuf>,
        look_at: LookAt,
        timelines_at: Option<TimelinesAt>,
        program: &str,
    ) -> Result<Self, ReportError> {
        let runs = Snapshot::new(paths, look_at, timelines_at);
        let curves = CURVES.iter().filter_map(|(file, key, title, unit, axis, is_noisy)| {
            let curves = curves_of(&runs, key, title, axis(unit), *is_noisy);
            let drawn = || curves.draw(720.0, 340.0).file(file);
            (!curves.is_empty()).then(|| (format!("{file}.svg"), drawn()))
        });
        Ok(Report { page: runs.page(program)?, curves: curves.collect() })
    }

    /// Creates a report of the measurements of `kiln bench strategies`.
    ///
    /// # Errors
    ///
    /// If the data cannot be written as JSON.
    pub fn from_strategies(measured: &impl Serialize, program: &str) -> Result<Self, ReportError> {
        Ok(Report { page: page_of_strategies(measured, program)?, curves: Vec::new() })
    }

    /// Writes `report.html` and the curves into the folder `place`, which the user named with `flag`.
    /// The folder appears complete or not at all.
    ///
    /// # Errors
    ///
    /// If `place` already exists and is not an empty folder, or a file operation fails.
    pub fn write(&self, place: &Path, flag: &'static str) -> Result<(), ReportError> {
        check_place(place, flag)?;
        let io = |source: io::Error| match source.kind() {
            // The folder was created after it was checked.
            ErrorKind::DirectoryNotEmpty | ErrorKind::AlreadyExists | ErrorKind::NotADirectory => {
                ReportError::Exists { path: place.to_owned(), flag }
            }
            _ => ReportError::Io { path: place.to_owned(), source },
        };
        fs::create_dir_all(parent_of(place)).map_err(io)?;
        let staging = StagingFolder::create(place).map_err(io)?;
        let page = [("report.html".to_owned(), self.page.clone())];
        for (name, text) in page.iter().chain(&self.curves) {
            write_file(&staging.path().join(name), text.as_bytes()).map_err(io)?;
        }
        sync_folder(staging.path()).map_err(io)?;
        // Replaces only an empty folder.
        fs::rename(staging.path(), place).map_err(io)?;
        staging.gone();
        sync_folder(parent_of(place)).map_err(io)
    }
}

/// Checks that `place`, which the user named with `flag`, does not exist or is an empty folder.
///
/// # Errors
///
/// If `place` already exists and is not an empty folder, or a file operation fails.
pub fn check_place(place: &Path, flag: &'static str) -> Result<(), ReportError> {
    let exists = || ReportError::Exists { path: place.to_owned(), flag };
    match fs::read_dir(place) {
        Ok(mut entries) => entries.next().map_or(Ok(()), |_| Err(exists())),
        Err(error) if error.kind() == ErrorKind::NotFound && !place.is_symlink() => Ok(()),
        Err(error) if error.kind() == ErrorKind::NotADirectory => Err(exists()),
        Err(source) => Err(ReportError::Io { path: place.to_owned(), source }),
    }
}

/// A curve's file name without extension, metric, title, unit, axis, and true if its moving average is drawn.
type FileOfMetric = (&'static str, &'static str, &'static str, &'static str, fn(&str) -> Axis, bool);

const CURVES: [FileOfMetric; 6] = [
    ("loss", "loss", "Training loss", "nats per token", Axis::linear, true),
    ("validation-loss", "val_loss", "Validation loss", "nats per token", Axis::linear, false),
    ("answer-loss", "answer_loss", "Loss of answers", "nats per token", Axis::linear, false),
    ("gradient-norm", "grad_norm", "Gradient norm", "2-norm before clipping", Axis::log, true),
    ("learning-rate", "lr", "Learning rate", "learning rate", Axis::linear, false),
    ("throughput", "tokens_per_s", "Throughput", "tokens/s", Axis::from_zero, true),
];

const POINTS: usize = 500;

const AVERAGED: usize = 20;

fn curves_of(runs: &Snapshot, key: &str, title: &str, y: Axis, is_noisy: bool) -> Curves {
    let (mut pale, mut strong, mut names, mut series) = (Vec::new(), Vec::new(), Vec::new(), 0);
    runs.each(|name, run| {
        if let Some(values) = run.metrics().get(key) {
            let count = values.values().len();
            let curve = |points| Curve { name: name.to_owned(), series, points, ..Curve::default() };
            if is_noisy {
                pale.push(Curve { is_faint: true, ..curve(thinned(values)) });
                let weight = 1.0 - 1.0 / (count / AVERAGED).max(1) as f64;
                strong.push(curve(thinned(&values.smoothed(weight))));
            } else {
                strong.push(Curve { has_marks: count <= 60, ..curve(thinned(values)) });
            }
            names.push(name.to_owned());
        }
        series += 1;
    });
    pale.append(&mut strong);
    let description = format!("{title} over optimizer steps, a curve for each of: {}.", names.join(", "));
    Curves { title: title.to_owned(), description, x: Axis::linear("optimizer step"), y, curves: pale }
}

fn thinned(series: &Series) -> Vec<(f64, f64)> {
    let count = series.values().len();
    let stride = count.div_ceil(POINTS).max(1);
    let kept = (0..count).filter(|index| index.is_multiple_of(stride) || *index == count - 1);
    kept.map(|index| (series.steps()[index] as f64, series.values()[index])).collect()
}
