//! The command `kiln launch`.

use std::ffi::{OsStr, OsString};
use std::path::PathBuf;
use std::time::Duration;

use clap::Args;
use kiln_launch::place::{self, NodeFlags};
use kiln_launch::{GRACE, LaunchArgsError, Options, run};
use kiln_train::command::Commands;
use kiln_train::launch::{count_gpus, log_dir_of, this_program};

/// Flags and command of `kiln launch`.
#[derive(Args, Clone, Debug)]
pub(crate) struct LaunchArgs {
    #[command(flatten)]
    node: NodeFlags,
    /// Folder of the ranks' logs.
    #[arg(
        long,
        alias = "log_dir",
        value_name = "DIR",
        help = "Folder of the ranks' logs [default: <out>/logs, or runs/logs/<job>]"
    )]
    log_dir: Option<PathBuf>,
    /// Seconds between SIGTERM and SIGKILL when the job is stopped.
    #[arg(long, alias = "grace_s", value_name = "SECONDS", default_value_t = GRACE.as_secs_f64())]
    grace_s: f64,
    /// Start this program instead of this one, with the command and the environment.
    #[arg(long, hide = true)]
    program: Option<PathBuf>,
    /// Command of every rank: train CONFIG …, check CONFIG …, tune CONFIG …, eval …, warmup CONFIG …, bench strategies,
    /// bench network, or a command that the program adds
    #[arg(last = true, required = true, value_name = "train CONFIG …")]
    command: Vec<OsString>,
}

impl LaunchArgs {
    /// Launches the ranks, and returns the exit code. `commands` are those that the program adds.
    pub(crate) fn run(self, commands: &Commands) -> Result<u8, LaunchArgsError> {
        let is_added = self.command.first().is_some_and(|name| commands.find(name).is_some());
        if self.program.is_none()
            && !is_added
            && let Err(problem) = check_command(&self.command)
        {
            return Err(LaunchArgsError::Arguments(problem));
        }
        // With a breakpoint, `--rank` is an older spelling of `--break-rank`.
        let breaks = self.command.iter().any(|argument| argument.to_string_lossy().starts_with("--break"));
        // The flags of a command that the program adds have their own meaning.
        let is_place = |flag: &&'static str| !(is_added || (breaks && *flag == "--rank"));
        if let Some(flag) = self.command.iter().filter_map(|argument| place_flag(argument)).find(is_place) {
            let problem = format!("{flag} differs between ranks, and the launcher sets it; remove it");
            return Err(LaunchArgsError::Arguments(problem));
        }
        let grace = Duration::try_from_secs_f64(self.grace_s).ok();
        let Some(grace) = grace.filter(|grace| *grace <= MAX_GRACE) else {
            let problem = format!(
                "--grace-s {}: not a number of seconds from 0 to {}",
                self.grace_s,
                MAX_GRACE.as_secs()
            );
            return Err(LaunchArgsError::Arguments(problem));
        };
        let node = place::node(&self.node, &place::environment)?.with_gpus(count_gpus)?;
        let log_dir = self.log_dir.or_else(|| log_dir_of(&self.command));
        let program = match self.program {
            Some(program) => program,
            None => this_program()?,
        };
        Ok(run(&Options { node, program, arguments: self.command, log_dir, grace })?)
    }
}

/// Checks that `command` is one whose ranks may be processes.
fn check_command(command: &[OsString]) -> Result<(), String> {
    let word = |index: usize| command.get(index).map(|word| word.to_string_lossy());
    match (word(0).as_deref(), word(1).as_deref()) {
        (Some("train" | "check" | "tune" | "eval" | "warmup"), _)
        | (Some("bench"), Some("strategies" | "network")) => Ok(()),
        _ => Err(
            "only `train`, `check`, `tune`, `eval`, `warmup`, `bench strategies` and `bench network` have ranks to \
             launch; write kiln launch … -- train CONFIG"
                .to_owned(),
        ),
    }
}

const MAX_GRACE: Duration = Duration::from_secs(24 * 3600);

/// Returns the name of the flag in `argument` if it would give every rank the same place.
fn place_flag(argument: &OsStr) -> Option<&'static str> {
    let name = argument.to_str()?.split('=').next()?.replace('_', "-");
    let flags = ["--rank", "--world-size", "--local-rank", "--local-world-size"];
    flags.into_iter().find(|flag| *flag == name)
}
