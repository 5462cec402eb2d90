//! Options of a run outside its configuration.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use super::observe::Tools;
use crate::error::{PositionKey, Result, TrainError};
use crate::fault::Fault;
use crate::process::{self, launcher};
use crate::registry::Registry;
use kiln_checkpoint::weights::AllowMissing;
use kiln_launch::place::{self, Flags, Job, RankEnv, Role};

/// Options of a run outside its configuration.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Run folder.
    pub out: RunFolder,
    /// The checkpoint to resume from.
    pub resume: Option<Resume>,
    /// The available layers, optimizers, losses and metrics.
    pub registry: Registry,
    /// Number of ranks, overriding the configuration.
    pub ranks: Option<usize>,
    /// The rank of this process, if a launcher has started one process per rank; else ranks are threads.
    pub place: Option<RankEnv>,
    /// The job of a process that trains alone; a rank's place has its own job.
    pub job: Job,
    /// True if this process trains alone although its environment says that it is one rank of several.
    pub alone: bool,
    /// Once true in any process, all ranks save a checkpoint after their current step, and the run ends.
    pub stop: Arc<AtomicBool>,
    /// Weights that may be missing from the initial checkpoint; they keep their initial values.
    pub allow_missing: AllowMissing,
    /// True to match the initial checkpoint by name and shape, even if it was trained with other parts.
    pub allow_other_parts: bool,
    /// Keys that may differ from the checkpoint to resume from, though they change which samples come next.
    pub allow_changed: Vec<PositionKey>,
    /// Tools that inspect the run.
    pub tools: Option<Arc<dyn Tools>>,
    /// A fault to rehearse.
    pub fault: Option<Fault>,
}

impl RunOptions {
    /// Calls [`process::start`] and reads the place of this process from its environment, as `kiln train` does.
    ///
    /// # Errors
    ///
    /// If the environment contradicts itself, `KILN_LOG` is invalid, or a launcher started one process per node.
    pub fn from_environment() -> Result<RunOptions> {
        let stop = process::start().map_err(|error| TrainError::usage(error.to_string()))?;
        let (place, job) = match place::find_here(&Flags::default())? {
            Role::Alone(job) => (None, job),
            Role::Rank(place) => (Some(place), Job::default()),
            Role::Node(node) if node.nodes == 1 => (None, node.job),
            Role::Node(node) => {
                return Err(TrainError::usage(format!(
                    "{} has started one process per node, and this program needs one per rank: start as \
                     many as each node has ranks, for example with srun --ntasks-per-node or torchrun \
                     --nproc-per-node",
                    node.source
                )));
            }
        };
        Ok(RunOptions { place, job, stop, ..RunOptions::default() })
    }

    pub(super) fn job(&self) -> &Job {
        self.place.as_ref().map_or(&self.job, |place| &place.job)
    }
}

/// Reports missing setup. Fails if this process is one of several and `options` do not set its place.
pub(super) fn check_surroundings(options: &RunOptions) -> Result<()> {
    // A caller that keeps a clone of the flag sets it.
    process::tell_what_is_missing(Arc::strong_count(&options.stop) > 1);
    launcher::grace()?;
    if options.place.is_some() || options.alone {
        return Ok(());
    }
    let (who, count, what) = match place::find_here(&Flags::default())? {
        Role::Rank(place) if place.world_size > 1 => (place.source, place.world_size, "ranks"),
        Role::Node(node) if node.nodes > 1 => (node.source, node.nodes, "nodes"),
        _ => return Ok(()),
    };
    Err(TrainError::usage(format!(
        "{who} has started this process as one of {count} {what}, and each of them would start the whole \
         job: set RunOptions::place, as RunOptions::from_environment does, or RunOptions::alone if this \
         process is to train by itself"
    )))
}

/// The source that a run resumes from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The newest checkpoint in the run folder.
    Latest,
    /// A checkpoint folder.
    Path(PathBuf),
}

/// The folder that a run writes to.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum RunFolder {
    /// This folder.
    At(PathBuf),
    /// `runs/<name>` or the first free `runs/<name>-2`, …; a resumed run continues the last interrupted one.
    Next(String),
}

impl RunFolder {
    /// Returns the default folder of a run with the configuration file `config`.
    pub fn from_config(config: &Path) -> Self {
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

/// The outcome of a run.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// Optimizer steps done in total.
    pub steps: u64,
    /// Loss of the last step; `None` if there was nothing left to do.
    pub loss: Option<f64>,
    /// Validation loss at the end; `None` if the run was stopped before.
    pub val_loss: Option<f64>,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
    /// Generated text, if a prompt was given and the run completed.
    pub sample: Option<String>,
    /// True if the run was stopped early; it can be resumed from `checkpoint`.
    pub preempted: bool,
}
