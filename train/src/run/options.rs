//! How a run is started, besides its configuration.

use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use clap::ValueEnum;

use crate::debug::DebugOptions;
use crate::fault::Fault;
use crate::place::{Job, RankEnv};
use crate::registry::Registry;
use crate::weights::AllowMissing;

/// Steps in a row without an update that end a run under `train.nonfinite = "skip"`: no batch is that bad.
pub const MAX_SKIPPED: u64 = 10;

/// How a run is started, besides its configuration.
#[derive(Clone, Debug, Default)]
pub struct RunOptions {
    /// Run folder.
    pub out: RunFolder,
    /// Where to go on from.
    pub resume: Option<Resume>,
    /// The layers, optimizers, losses and metrics that there are.
    pub registry: Registry,
    /// Number of ranks, instead of the one in the configuration.
    pub ranks: Option<usize>,
    /// The rank that this process is, if a launcher has started one process per rank. Without it,
    /// ranks are threads of this process.
    pub place: Option<RankEnv>,
    /// The job of a process that trains by itself; a rank's place has its job.
    pub job: Job,
    /// Whether this process trains by itself although its environment says that it is one rank of several.
    pub alone: bool,
    /// Once it is true, in any process of the run, all ranks save a checkpoint after the step they
    /// are in, and the run ends.
    pub stop: Arc<AtomicBool>,
    /// Weights that the checkpoint to start from may lack; they keep their initial values.
    pub allow_missing: AllowMissing,
    /// Whether the checkpoint to start from may have been trained with other parts than those that
    /// this run builds. Its weights are then taken by name and shape alone.
    pub allow_other_parts: bool,
    /// What may differ from the checkpoint to go on from, though it means another position in the data.
    pub allow_changed: Vec<PositionKey>,
    /// What looks into it.
    pub debug: DebugOptions,
    /// A fault to rehearse.
    pub fault: Option<Fault>,
}

impl RunOptions {
    /// The job that starts this run, perhaps not for the first time.
    pub(super) fn job(&self) -> &Job {
        self.place.as_ref().map_or(&self.job, |place| &place.job)
    }
}

/// Where a run goes on from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Resume {
    /// The newest checkpoint in the run folder.
    Latest,
    /// A checkpoint folder.
    Path(PathBuf),
}

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

/// What the position in the data depends on.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum PositionKey {
    /// Tokens per sequence.
    #[value(name = "data.seq_len")]
    SeqLen,
    /// Whether samples come in a random order.
    #[value(name = "data.shuffle")]
    Shuffle,
    /// What that order is drawn from, and dropout.
    #[value(name = "train.seed")]
    Seed,
    /// The training data itself.
    #[value(name = "data")]
    Data,
}

impl fmt::Display for PositionKey {
    fn fmt(&self, f: &mut fmt::Formatter) -> fmt::Result {
        // No key is hidden.
        self.to_possible_value().map_or(Ok(()), |value| f.write_str(value.get_name()))
    }
}

/// What a run has come to.
#[derive(Clone, Debug, PartialEq)]
#[non_exhaustive]
pub struct Summary {
    /// Optimizer steps done in total.
    pub steps: u64,
    /// Loss of the last step; `None` if there was nothing left to do.
    pub loss: Option<f64>,
    /// Validation loss at the end; `None` if the run was asked to stop before.
    pub val_loss: Option<f64>,
    /// The last checkpoint.
    pub checkpoint: PathBuf,
    /// Generated text, if a prompt was given and the run came to its end.
    pub sample: Option<String>,
    /// Whether the run was asked to stop before its end; it goes on from `checkpoint`.
    pub preempted: bool,
}
