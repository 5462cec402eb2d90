//! The run folder: which one, whether it is free, and whose it is.

use std::fs;
use std::path::{Path, PathBuf};

use super::{Resume, RunOptions, TrainError};
use crate::checkpoint::{self, Checkpoint};
use crate::flight;
use crate::metrics::write_beside;

/// Name of the job that a folder belongs to, where ranks are processes. A job that is started again
/// knows its folder by it.
const JOB_FILE: &str = "job";

/// Where a run is written to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunFolder {
    /// This folder.
    At(PathBuf),
    /// `runs/<name>`, or the first free `runs/<name>-2`, `-3`, … for a new run. A resumed run goes
    /// on in the last one taken.
    Next(String),
}

impl RunFolder {
    /// The folder of a run of the configuration `config` when none is named.
    pub fn of_config(config: &Path) -> Self {
        let name = config.file_stem().map_or("run".into(), |name| name.to_string_lossy());
        RunFolder::Next(name.into_owned())
    }
}

impl Default for RunFolder {
    fn default() -> Self {
        RunFolder::Next("run".to_owned())
    }
}

impl From<PathBuf> for RunFolder {
    fn from(path: PathBuf) -> Self {
        RunFolder::At(path)
    }
}

/// A run folder that is free for this run, and the checkpoint in it to go on from.
pub(super) struct Taken {
    pub(super) out: PathBuf,
    pub(super) resume: Option<Checkpoint>,
    job: Option<String>,
    restarts: u64,
}

/// Finds the folder of a run and what it goes on from. Writes nothing.
pub(super) fn find(options: &RunOptions) -> Result<Taken, TrainError> {
    let place = options.place.as_ref();
    let job = place.map(|place| place.job.clone());
    let restarts = place.map_or(0, |place| place.restarts);
    let is_ours = |out: &Path| restarts > 0 && job.is_some() && job_of(out) == job;
    let out = match &options.out {
        RunFolder::At(out) => out.clone(),
        RunFolder::Next(name) => next(name, options.resume.is_some(), is_ours),
    };
    let again = if is_ours(&out) { checkpoint_of_last_life(&out, options)? } else { None };
    let resume = match (&options.resume, again) {
        (_, Some(checkpoint)) => Some(checkpoint),
        (None, None) => None,
        (Some(Resume::Latest), None) => Some(Checkpoint::latest(&out)?),
        (Some(Resume::Path(path)), None) => Some(Checkpoint::open(path)?),
    };
    if !is_ours(&out) {
        check_free(&out, resume.as_ref())?;
    }
    Ok(Taken { out, resume, job, restarts })
}

impl Taken {
    /// Creates what a run needs in its folder, and puts aside what a failed one has left there.
    pub(super) fn claim(&self) -> Result<(), TrainError> {
        // Not when the first checkpoint is due, which may be hours from here.
        let checkpoints = checkpoint::folder_of_run(&self.out);
        fs::create_dir_all(&checkpoints).map_err(TrainError::io("create", &checkpoints))?;
        checkpoint::remove_partial(&checkpoints);
        if let Some(job) = &self.job {
            let path = self.out.join(JOB_FILE);
            write_beside(&path, job.as_bytes()).map_err(TrainError::io("write", &path))?;
        }
        let flights = flight::folder_of_run(&self.out);
        if !flights.exists() {
            return Ok(());
        }
        // Why the last life ended is worth knowing while this one runs.
        if self.restarts > 0 {
            let aside = self.out.join(format!("flight-before-restart-{}", self.restarts));
            if !aside.exists() {
                return fs::rename(&flights, &aside).map_err(TrainError::io("rename to", &aside));
            }
        }
        fs::remove_dir_all(&flights).map_err(TrainError::io("remove", &flights))
    }
}

fn next(name: &str, resume: bool, is_ours: impl Fn(&Path) -> bool) -> PathBuf {
    let folder = |index: u64| match index {
        1 => Path::new("runs").join(name),
        index => Path::new("runs").join(format!("{name}-{index}")),
    };
    let taken =
        (1..).take_while(|index| folder(*index).join("metrics.jsonl").exists()).count() as u64;
    let stays = resume || (taken > 0 && is_ours(&folder(taken)));
    folder(if stays { taken.max(1) } else { taken + 1 })
}

fn job_of(out: &Path) -> Option<String> {
    fs::read_to_string(out.join(JOB_FILE)).ok()
}

/// Where a job that was started again goes on: at the newest complete checkpoint of its folder,
/// unless it was told to start from another one in there.
fn checkpoint_of_last_life(
    out: &Path,
    options: &RunOptions,
) -> Result<Option<Checkpoint>, TrainError> {
    let inside = |path: &Path| match (path.canonicalize(), out.canonicalize()) {
        (Ok(path), Ok(out)) => path.starts_with(out),
        _ => false,
    };
    match &options.resume {
        Some(Resume::Path(path)) if inside(path) => Ok(None),
        _ if !Checkpoint::is_in(out) => Ok(None),
        _ => Ok(Some(Checkpoint::latest(out)?)),
    }
}

/// Fails unless the run folder is new, or is the one that the checkpoint to go on from is in.
fn check_free(out: &Path, resume: Option<&Checkpoint>) -> Result<(), TrainError> {
    let same = |a: &Path, b: &Path| match (a.canonicalize(), b.canonicalize()) {
        (Ok(a), Ok(b)) => a == b,
        _ => false,
    };
    let own = resume.and_then(|checkpoint| checkpoint.folder().parent());
    let own = own.is_some_and(|folder| same(folder, &checkpoint::folder_of_run(out)));
    if out.join("metrics.jsonl").exists() && !own {
        return Err(TrainError::Occupied { out: out.to_owned() });
    }
    if out.exists() && !out.is_dir() {
        return Err(TrainError::usage(format!(
            "--out {} is a file: name a folder for the run",
            out.display()
        )));
    }
    Ok(())
}
