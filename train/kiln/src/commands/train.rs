//! The command `kiln train`.

use std::path::PathBuf;
use std::sync::Arc;

use crate::error::{CommandError, Result};
use clap::Args;
use kiln_checkpoint::weights::AllowMissing;
use kiln_config::{self as config};
use kiln_debug::{Breakpoint, DebugOptions, HashOptions, Others, TraceOptions};
use kiln_launch::place::{self, Job, Role};
use kiln_preflight::smoke::{self, Smoke};
use kiln_train::TrainError;
use kiln_train::fault::Fault;
use kiln_train::launch;
use kiln_train::process::stop_on_signals;
use kiln_train::run::{PositionKey, Program, Resume, RunFolder, RunOptions, train_with};

use super::tools::RunTools;

/// Arguments of `kiln train`.
#[derive(Args)]
pub struct TrainArgs {
    /// Configuration file; configs/ has some to start from.
    config: PathBuf,
    /// Ranks, as threads of this process [default: train.ranks of the configuration].
    #[arg(long)]
    ranks: Option<usize>,
    /// Run folder [default: runs/<name of the configuration>].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Change one value of the configuration; may be given several times.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Go on from the newest checkpoint of the run folder ("latest"), or from a checkpoint folder.
    #[arg(long, value_name = "latest|PATH")]
    resume: Option<String>,
    /// Weights that the checkpoint to start from may lack, as in "lm_head.*"; they keep their
    /// initial values. May be given several times.
    #[arg(long, value_name = "PATTERN")]
    allow_missing: Vec<String>,
    /// Take the weights of the checkpoint to start from by name and shape, also if it was trained
    /// with other parts than this program builds.
    #[arg(long)]
    allow_other_parts: bool,
    /// Go on from the checkpoint though this differs from what it was trained with, which means another
    /// position in the data. May be given several times.
    #[arg(long, value_name = "KEY", value_enum)]
    allow_changed: Vec<PositionKey>,
    /// Try everything that the run does, shrunk to about a minute: train, evaluate, save, go on, sample.
    /// `--smoke=width` shrinks the model too.
    #[arg(
        long,
        value_name = "WHAT",
        value_enum,
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "batch",
        conflicts_with_all = ["resume", "allow_missing", "allow_changed"]
    )]
    smoke: Option<Smoke>,
    /// Hold the run there for somebody to look into it, as in forward:layers.3@12 or "grad_norm > 10". May be
    /// given several times.
    #[arg(long = "break", value_name = "WHERE")]
    breakpoints: Vec<Breakpoint>,
    /// What the other ranks do when --break holds one, --rank.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "hold", requires = "breakpoints")]
    others: Others,
    /// Write hashes of the tensors of these steps to `<out>/hashes.jsonl`, for `kiln diff`: steps=1-20, or
    /// steps=5,activations,gradients,weights,moments; with `units`, one per module and kind.
    #[arg(long, value_name = "STEPS[,KINDS]")]
    hash: Option<HashOptions>,
    /// Write what every rank does in these steps to a file for Perfetto, for `kiln trace summary` as well:
    /// `<out>/traces/steps-10-12.pftrace`, or FILE.
    #[arg(long, value_name = "steps=10-12[,FILE]")]
    trace: Option<TraceOptions>,
    /// Record every allocation of a step, draw who held how much when, and name what makes the peak:
    /// `<out>/memory`. The third step, or STEP.
    #[arg(
        long,
        value_name = "STEP",
        num_args = 0..=1,
        require_equals = true,
        default_missing_value = "3",
        value_parser = clap::value_parser!(u64).range(1..)
    )]
    memory_profile: Option<u64>,
    #[command(flatten)]
    place: place::Flags,
    /// Fire drill: let one rank fail, once.
    #[arg(long, value_name = "KIND@PHASE:STEP:RANK", hide = true)]
    fault: Option<Fault>,
}

/// The error for a smoke run under a launcher.
const SMOKE_ALONE: &str =
    "--smoke starts its ranks itself, as threads: leave out `kiln launch`, and give --ranks N";

impl TrainArgs {
    /// Trains, or starts the ranks of a node; returns the exit code.
    pub(crate) fn run(mut self, program: Program) -> Result<u8> {
        let debug = self.debug_options()?;
        let (place, job) = match place::find_here(&self.place)? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => (Some(place), Job::default()),
            Role::Alone(job) => (None, job),
        };
        let config = config::load(&self.config, &self.overrides)?;
        let options = RunOptions {
            out: self.out.map_or_else(|| RunFolder::of_config(&self.config), RunFolder::At),
            resume: self.resume.map(|resume| match resume.as_str() {
                "latest" => Resume::Latest,
                path => Resume::Path(path.into()),
            }),
            ranks: self.ranks,
            registry: program.registry.clone(),
            place,
            job,
            stop: stop_on_signals(),
            allow_missing: AllowMissing::new(&self.allow_missing).map_err(CommandError::usage)?,
            allow_other_parts: self.allow_other_parts,
            allow_changed: self.allow_changed,
            tools: Some(Arc::new(RunTools::new(debug))),
            fault: self.fault,
            // The environment was read above, and flags override it.
            alone: true,
        };
        let train = |config, options: &RunOptions| train_with(config, options, &*program.training_loop);
        let summary = match self.smoke {
            None => train(config, &options)?,
            Some(_) if options.place.is_some() => return Err(CommandError::usage(SMOKE_ALONE)),
            Some(shrink) => {
                // Users who name a folder want to look at it afterwards.
                let (named, temporary) = match &options.out {
                    RunFolder::At(folder) => (folder.clone(), None),
                    RunFolder::Next(_) => {
                        let folder = tempfile::Builder::new().prefix("kiln-smoke-").tempdir();
                        let folder =
                            folder.map_err(TrainError::io("make a folder in", &std::env::temp_dir()))?;
                        (folder.path().to_owned(), Some(folder))
                    }
                };
                let summary = smoke::run(config, shrink, &named, options, train);
                drop(temporary);
                summary?
            }
        };
        Ok(if summary.preempted { launch::PREEMPTED } else { 0 })
    }
}

impl TrainArgs {
    /// Builds the debugging options. With a breakpoint and without a world size, `--rank` is the rank to hold
    /// instead of the rank of this process.
    fn debug_options(&mut self) -> Result<DebugOptions> {
        let mut breakpoints = std::mem::take(&mut self.breakpoints);
        if !breakpoints.is_empty() && self.place.world_size.is_none() {
            let rank = self.place.rank.take().map(|rank| rank.parse::<usize>()).transpose();
            let rank = rank.map_err(|error| CommandError::usage(format!("--rank: {error}")))?;
            for breakpoint in &mut breakpoints {
                if let (Some(rank), None) = (rank, breakpoint.rank) {
                    (breakpoint.rank, breakpoint.others) = (Some(rank), self.others);
                }
            }
        }
        Ok(DebugOptions {
            breakpoints,
            has_prompt: true,
            hash: self.hash.take(),
            trace: self.trace.take(),
            memory_profile: self.memory_profile,
        })
    }
}
