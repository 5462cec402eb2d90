//! Arguments of `kiln check`: those of `kiln train` that affect the checks.

use std::path::PathBuf;

use clap::Args;

use super::report::Stage;
use kiln_checkpoint::weights::AllowMissing;
use kiln_launch::place::{self, RankEnv};
use kiln_train::error::{Result, TrainError};
use kiln_train::fault::Fault;
use kiln_train::registry::Registry;
use kiln_train::run::{PositionKey, Resume, RunFolder, RunOptions};

/// Arguments of `kiln check`.
#[derive(Args)]
pub struct CheckArgs {
    /// Configuration file of the run.
    pub(super) config: PathBuf,
    /// Run only this check and the checks it depends on; may be repeated.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(super) stage: Vec<Stage>,
    /// Number of ranks, as threads of this process [default: train.ranks].
    #[arg(long)]
    pub(super) ranks: Option<usize>,
    /// Run folder [default: runs/<configuration name>].
    #[arg(long)]
    pub(super) out: Option<PathBuf>,
    /// Override a configuration value; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(super) overrides: Vec<String>,
    /// Check a resume from the newest checkpoint of the run folder ("latest"), or from a checkpoint folder.
    #[arg(long, value_name = "latest|PATH")]
    pub(super) resume: Option<String>,
    /// Weights that may be missing from the checkpoint, as for `kiln train`.
    #[arg(long, value_name = "PATTERN")]
    pub(super) allow_missing: Vec<String>,
    /// Accept a checkpoint with different layers, loss or optimizer, as for `kiln train`.
    #[arg(long)]
    pub(super) allow_other_parts: bool,
    /// Settings that may have changed since the checkpoint, as for `kiln train`.
    #[arg(long, value_name = "KEY", value_enum)]
    pub(super) allow_changed: Vec<PositionKey>,
    #[command(flatten)]
    pub(super) place: place::Flags,
    /// Fail one rank on purpose, once; clock=SECONDS is for this command.
    #[arg(long, value_name = "KIND@PHASE:STEP:RANK", hide = true)]
    pub(super) fault: Option<Fault>,
}

impl CheckArgs {
    /// Returns `true` if any of these stages is to be checked.
    pub(super) fn wants(&self, stages: &[Stage]) -> bool {
        self.stage.is_empty() || stages.iter().any(|stage| self.stage.contains(stage))
    }

    /// The options that `kiln train` would have.
    pub(super) fn options(&self, registry: &Registry, place: Option<RankEnv>) -> Result<RunOptions> {
        Ok(RunOptions {
            out: self.out.clone().map_or_else(|| RunFolder::of_config(&self.config), RunFolder::At),
            resume: self.resume.as_deref().map(|resume| match resume {
                "latest" => Resume::Latest,
                path => Resume::Path(path.into()),
            }),
            ranks: self.ranks,
            registry: registry.clone(),
            place,
            allow_missing: AllowMissing::new(&self.allow_missing).map_err(TrainError::usage)?,
            allow_other_parts: self.allow_other_parts,
            allow_changed: self.allow_changed.clone(),
            alone: true,
            ..RunOptions::default()
        })
    }
}
