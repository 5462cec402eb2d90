//! Arguments of `kiln check`.

use std::path::{Path, PathBuf};

use clap::Args;

use crate::findings::Stage;
use crate::machine::MachineArgs;
use kiln_checkpoint::weights::AllowMissing;
use kiln_launch::place::{self, RankEnv};
use kiln_train::error::{Result, TrainError};
use kiln_train::fault::Fault;
use kiln_train::registry::Registry;
use kiln_train::run::{PositionKey, Resume, RunFolder, RunOptions};

/// Arguments of `kiln check`: those of `kiln train` that affect the checks.
#[derive(Args)]
pub struct CheckArgs {
    /// Configuration file of the run.
    #[arg(required_unless_present = "only_machine")]
    pub(super) config: Option<PathBuf>,
    /// Check only this stage and the stages it needs; may be repeated.
    #[arg(long, value_enum, value_delimiter = ',')]
    pub(super) stage: Vec<Stage>,
    /// Only examine this machine and the place of this process, without a configuration, as `kiln doctor` does.
    #[arg(long = "machine", conflicts_with_all = ["config", "stage"])]
    pub(super) only_machine: bool,
    #[command(flatten)]
    pub(super) machine: MachineArgs,
    /// Number of ranks, as threads of this process [default: train.ranks].
    #[arg(long)]
    pub(super) ranks: Option<usize>,
    /// Run folder.
    #[arg(long, help = "Run folder [default: runs/<name of the configuration>]")]
    pub(super) out: Option<PathBuf>,
    /// Override a configuration value; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    pub(super) overrides: Vec<String>,
    /// Resume from the newest checkpoint of the run folder ("latest"), or from this folder.
    #[arg(long, value_name = "latest|PATH")]
    pub(super) resume: Option<String>,
    /// As for `kiln train`: weights that the initial checkpoint may lack.
    #[arg(long, value_name = "PATTERN")]
    pub(super) allow_missing: Vec<String>,
    /// As for `kiln train`: accept an initial checkpoint with other layers.
    #[arg(long)]
    pub(super) allow_other_parts: bool,
    /// As for `kiln train`: keys that may differ from the checkpoint to resume from.
    #[arg(long, value_name = "KEY", value_enum)]
    pub(super) allow_changed: Vec<PositionKey>,
    #[command(flatten)]
    pub(super) place: place::Flags,
    /// Fail one rank on purpose, once. Only this command supports clock=SECONDS.
    #[arg(long, value_name = "KIND@PHASE:STEP:RANK", hide = true)]
    pub(super) fault: Option<Fault>,
}

impl CheckArgs {
    pub(super) fn wants(&self, stages: &[Stage]) -> bool {
        self.stage.is_empty() || stages.iter().any(|stage| self.stage.contains(stage))
    }

    pub(super) fn options(
        &self,
        path: &Path,
        registry: &Registry,
        place: Option<RankEnv>,
    ) -> Result<RunOptions> {
        Ok(RunOptions {
            out: self.out.clone().map_or_else(|| RunFolder::from_config(path), RunFolder::At),
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
