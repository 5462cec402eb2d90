use std::path::{Path, PathBuf};
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
use kiln_train::run::{PositionKey, Program, Resume, RunFolder, RunOptions, run_of, train_with};

use super::tools::RunTools;

/// Arguments of `kiln train`.
#[derive(Args)]
pub struct TrainArgs {
    /// Configuration file; see configs/ for examples. Not needed with --resume RUN.
    #[arg(required_unless_present = "resume")]
    config: Option<PathBuf>,
    /// Number of ranks, as threads of this process [default: train.ranks].
    #[arg(long)]
    ranks: Option<usize>,
    /// Run folder [default: runs/<configuration name>].
    #[arg(long)]
    out: Option<PathBuf>,
    /// Override a configuration value; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Resume from a run folder, from a checkpoint folder, or with "latest" from the run of CONFIG that was interrupted
    /// last. Without CONFIG, the run continues in its folder with its own configuration.
    #[arg(long, value_name = "latest|RUN|CHECKPOINT")]
    resume: Option<PathBuf>,
    /// Allow these weights, such as "lm_head.*", to be missing from the checkpoint, and keep their initial values; or
    /// leave them out, if the model does not have them. May be repeated.
    #[arg(long, value_name = "PATTERN")]
    allow_missing: Vec<String>,
    /// Load weights by name and shape, even if the checkpoint was trained with different layers, loss or optimizer.
    #[arg(long)]
    allow_other_parts: bool,
    /// Resume although this setting has changed since the checkpoint, which changes which samples come next. May be
    /// repeated.
    #[arg(long, value_name = "KEY", value_enum)]
    allow_changed: Vec<PositionKey>,
    /// Try the whole run in about a minute: train, evaluate, save, resume, sample. `--smoke=width` shrinks the model
    /// too.
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
    /// Stop at a breakpoint, such as forward:layers.3@12 or "grad_norm > 10", and open a prompt. May be repeated.
    #[arg(long = "break", value_name = "WHERE")]
    breakpoints: Vec<Breakpoint>,
    /// Hold only this rank at the breakpoints; see --others.
    #[arg(long, value_name = "N", requires = "breakpoints")]
    break_rank: Option<usize>,
    /// Behaviour of the other ranks while --break-rank is held.
    #[arg(long, value_name = "WHAT", value_enum, default_value = "hold", requires = "breakpoints")]
    others: Others,
    /// Write tensor hashes of these steps to <out>/hashes.jsonl for `kiln diff`: steps=1-20, or
    /// steps=5,activations,gradients,weights,moments; add `modules` for one hash per module and kind.
    #[arg(long, value_name = "STEPS[,KINDS]")]
    hash: Option<HashOptions>,
    /// Trace all ranks in these steps, for Perfetto and `kiln trace summary` [default file:
    /// <out>/traces/steps-10-12.pftrace].
    #[arg(long, value_name = "steps=10-12[,FILE]")]
    trace: Option<TraceOptions>,
    /// Profile the memory of one step: every allocation, its owner, and the peak, in <out>/memory [default step: 3].
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
    /// Fail one rank on purpose, once.
    #[arg(long, value_name = "KIND@PHASE:STEP:RANK", hide = true)]
    fault: Option<Fault>,
}

const SMOKE_ALONE: &str = "--smoke runs its ranks as threads: remove `kiln launch`, and set --ranks N";

const LATEST_OF: &str = "--resume latest needs CONFIG, which names the runs; or name one: --resume RUN";

/// Returns the configuration and folder of the run at `resume`, a run folder or one of its checkpoints. The checkpoint
/// may be gone, since a restarted job resumes from a later one.
fn own_config(resume: &Path) -> Result<(PathBuf, RunFolder)> {
    let run = run_of(resume);
    let is_run = |config: &PathBuf| config.is_file() && run.join("config.toml").is_file();
    [resume, &run].map(|folder| folder.join("config.toml")).into_iter().find(is_run).map_or_else(
        || {
            let resume = resume.display();
            Err(CommandError::usage(format!(
                "{resume} is neither a run folder nor a checkpoint in one: name the configuration as well, \
                 `kiln train CONFIG --resume {resume}`"
            )))
        },
        |config| Ok((config, RunFolder::At(run.clone()))),
    )
}

impl TrainArgs {
    /// Trains as one rank, or launches the ranks of this node. Returns the exit code.
    pub(crate) fn run(mut self, program: Program) -> Result<u8> {
        let debug = self.debug_options()?;
        let (place, job) = match place::find_here(&self.place)? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => (Some(place), Job::default()),
            Role::Alone(job) => (None, job),
        };
        let resume = self.resume.map(|resume| match resume.to_str() {
            Some("latest") => Resume::Latest,
            _ => Resume::Path(resume),
        });
        let (config, out) = match (&self.config, &resume) {
            (Some(config), _) => (config.clone(), RunFolder::from_config(config)),
            (None, Some(Resume::Path(path))) => own_config(path)?,
            (None, _) => return Err(CommandError::usage(LATEST_OF)),
        };
        let config = config::load(&config, &self.overrides)?;
        let options = RunOptions {
            out: self.out.map_or(out, RunFolder::At),
            resume,
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
            // The environment was read above; flags override it.
            alone: true,
        };
        let train = |config, options: &RunOptions| train_with(config, options, &*program.training_loop);
        let summary = match self.smoke {
            None => train(config, &options)?,
            Some(_) if options.place.is_some() => return Err(CommandError::usage(SMOKE_ALONE)),
            Some(shrink) => {
                // Users who name a folder want to look at it later, so it is not temporary.
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
    /// Builds the debugging options. With a breakpoint and no world size, `--rank` means `--break-rank`.
    fn debug_options(&mut self) -> Result<DebugOptions> {
        let mut breakpoints = std::mem::take(&mut self.breakpoints);
        let mut held = self.break_rank;
        if !breakpoints.is_empty() && self.place.world_size.is_none() {
            let rank = self.place.rank.take().map(|rank| rank.parse::<usize>()).transpose();
            held = held.or(rank.map_err(|error| CommandError::usage(format!("--rank: {error}")))?);
        }
        for breakpoint in
            breakpoints.iter_mut().filter(|breakpoint| held.is_some() && breakpoint.rank.is_none())
        {
            (breakpoint.rank, breakpoint.others) = (held, self.others);
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
