//! The command line: its commands, and how they end. The arguments of a command are with the command, and its
//! `run` does it.

mod documents;

use std::io::{self, Write};
use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};
use kiln_collectives::tcp::JoinError;
use kiln_shard::ranks::RankError;

use crate::bench::{NetworkArgs, StrategiesArgs, TuneArgs};
use crate::check::CheckArgs;
use crate::config::ConfigArgs;
use crate::convert::{ConvertArgs, ExportArgs, ImportArgs};
use crate::debug::{AttachArgs, StatusArgs, TraceArgs};
use crate::diff::{BisectArgs, DiffArgs};
use crate::doctor::DoctorArgs;
use crate::error::{Result, TrainError};
use crate::eval::EvalArgs;
use crate::explain::{self, ExplainArgs};
use crate::generate::GenerateArgs;
use crate::inspect::InspectArgs;
use crate::launch::{self, LaunchArgs};
use crate::planner::PlanArgs;
use crate::prepared::{PrepareArgs, ShowArgs, VerifyArgs};
use crate::process;
use crate::process::launcher::{self, Word};
use crate::process::output::{self, complain, say};
use crate::report::ReportArgs;
use crate::run::{Program, ReplayArgs, TrainArgs};
use crate::version::version;
use crate::warmup::WarmupArgs;
use crate::watch::WatchArgs;
use documents::{CompletionsArgs, ManArgs};

/// Exit code of a run that failed.
const FAILED: u8 = 1;
/// Exit code for wrong arguments or configuration.
const USAGE: u8 = 2;

/// Trains decoder-only language models with fully sharded data parallelism.
#[derive(Parser)]
#[command(name = "kiln", version = version(), arg_required_else_help = true)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Train a model from a configuration file.
    Train(TrainArgs),
    /// Tell what a run will hold, send and take, before it starts, and which way to run it is best.
    Plan(PlanArgs),
    /// Try the best ways to run a configuration on the ranks that are there, and write the fastest down.
    Tune(TuneArgs),
    /// Compile the kernels of a run on NVIDIA GPUs before it starts, and carry them to other machines.
    Warmup(WarmupArgs),
    /// Start several ranks of a run on this node and watch over them.
    Launch(LaunchArgs),
    /// Look into a run: what every rank is doing, who waits for whom, and whether something is wrong.
    Status(StatusArgs),
    /// Watch runs on a whole terminal: curves, ranks, logs, samples.
    Watch(WatchArgs),
    /// Look at everything that a run needs, in seconds, before it starts.
    Check(CheckArgs),
    /// Show every key of a configuration: its meaning, its values, and the one that it has.
    Config(ConfigArgs),
    /// Tell what this process knows about its place among others, its network and its machine.
    Doctor(DoctorArgs),
    /// Tell what an error means: its cause, how to check, and how to mend it.
    Explain(ExplainArgs),
    /// Prepare text for training.
    Data {
        #[command(subcommand)]
        command: DataCommand,
    },
    /// Continue a text with a trained model.
    Generate(GenerateArgs),
    /// Tell how well a model does: on validation data, on answers, or logit by logit.
    Eval(EvalArgs),
    /// Make a checkpoint of a model in the layout of Hugging Face.
    Import(ImportArgs),
    /// Write a model in the layout of Hugging Face, or metrics in the forms of other programs.
    Export(ExportArgs),
    /// Measure.
    Bench {
        #[command(subcommand)]
        command: BenchCommand,
    },
    /// Look into a run that goes on: hold its ranks, print its tensors.
    Attach(AttachArgs),
    /// Tell what is in a trace that `kiln train --trace` has written.
    Trace(TraceArgs),
    /// Take one step of a run again, from the checkpoint before it, and compare it with what was recorded.
    Replay(ReplayArgs),
    /// Show what is in a checkpoint, or what the ranks of a failed run were doing.
    Inspect(InspectArgs),
    /// Tell where two runs part, or what else differs: checkpoints, metrics, configurations, data.
    Diff(DiffArgs),
    /// Write a page about runs, with plots: results, how they differ, and how to repeat them.
    Report(ReportArgs),
    /// Find the key that makes the difference of two runs or configurations, by trying.
    Bisect(BisectArgs),
    /// Make a full checkpoint of a sharded one, or the other way round.
    Convert(ConvertArgs),
    /// Print a script with which a shell completes commands and flags.
    Completions(CompletionsArgs),
    /// Write manual pages.
    Man(ManArgs),
}

impl Command {
    /// Whether output is only an account of what the command does, which nobody has to read.
    fn is_run(&self) -> bool {
        matches!(self, Command::Train(_) | Command::Launch(_))
    }

    /// Returns whether the command runs ranks, which must not wait for a reader of the output.
    fn never_blocks(&self) -> bool {
        self.is_run() || matches!(self, Command::Replay(_))
    }
}

#[derive(Subcommand)]
enum DataCommand {
    /// Tokenize text into train.bin and val.bin.
    Prepare(PrepareArgs),
    /// Show what is in prepared data: counts, lengths, and some of it as text.
    Show(ShowArgs),
    /// Read every byte of prepared data and compare it with the checksums.
    Verify(VerifyArgs),
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Compare all sharding strategies on the same work.
    Strategies(StrategiesArgs),
    /// Measure what collectives take on the ranks' network.
    Network(NetworkArgs),
}

/// Runs the command that the arguments of this process name, on the parts of `program`: a [`Registry`](crate::registry::Registry), or
/// one
/// with a training loop. Returns the exit code. Sets up the process as [`process::start`] does; the allocator
/// is the binary's.
pub fn main(program: impl Into<Program>) -> ExitCode {
    let program = program.into();
    let begun = process::begin();
    process::has_commands();
    output::tell_panics();
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => return ExitCode::from(tell_usage(&error)),
    };
    // Runs do not wait for whoever reads along; other commands are there to be read.
    let is_run = command.is_run();
    let _output = command.never_blocks().then(output::never_block);
    if let Err(error) = begun {
        return exit(Err(TrainError::usage(error.to_string())), is_run);
    }
    let registry = &program.registry;
    let (layers, done) = (registry.layers(), |()| 0);
    let tell = |text: String| say(&text);
    let outcome = match command {
        Command::Train(args) => args.run(program),
        Command::Plan(args) => args.run(registry).map(tell).map(done),
        Command::Tune(args) => args.run(registry),
        Command::Warmup(args) => args.run(registry),
        Command::Launch(args) => args.run().map_err(TrainError::from),
        Command::Status(args) => args.run(),
        Command::Watch(args) => args.run().map(done),
        Command::Check(args) => args.run(registry),
        Command::Config(args) => args.run().map_err(TrainError::from).map(tell).map(done),
        Command::Doctor(args) => {
            let (text, healthy) = args.run();
            say(&text);
            Ok(if healthy { 0 } else { USAGE })
        }
        Command::Explain(args) => {
            say(&args.run());
            Ok(0)
        }
        Command::Data { command: DataCommand::Prepare(args) } => on_files(|| args.run()).map(done),
        Command::Data { command: DataCommand::Show(args) } => {
            on_files(|| args.run().map_err(TrainError::from)).map(tell).map(done)
        }
        Command::Data { command: DataCommand::Verify(args) } => args.run().map(tell).map(done),
        Command::Generate(args) => args.run(layers).map(done),
        Command::Eval(args) => args.run(layers),
        Command::Import(args) => on_files(|| args.run()).map(done),
        Command::Export(args) => on_files(|| args.run()).map(done),
        Command::Bench { command: BenchCommand::Strategies(args) } => args.run(registry),
        Command::Bench { command: BenchCommand::Network(args) } => args.run(),
        Command::Attach(args) => args.run(),
        Command::Trace(args) => args.run().map(tell).map(done),
        Command::Replay(args) => args.run(registry),
        Command::Inspect(args) => on_files(|| args.run()).map(tell).map(done),
        Command::Diff(args) => args.run(registry),
        Command::Report(args) => args.run().map(tell).map(done),
        Command::Bisect(args) => args.run(registry),
        Command::Convert(args) => on_files(|| args.run()).map(tell).map(done),
        Command::Completions(args) => {
            say(&args.run(Cli::command()));
            Ok(0)
        }
        Command::Man(args) => args.run(Cli::command()).map(tell).map(done),
    };
    exit(outcome, is_run)
}

/// Tells people and the launcher how a command has ended; the exit code of the process.
fn exit(outcome: Result<u8>, is_run: bool) -> ExitCode {
    let code = match &outcome {
        Ok(code) => *code,
        Err(error) if error.is_stop() => {
            say(&error.to_string());
            launcher::tell(Word::Stopped, "");
            launch::PREEMPTED
        }
        Err(error) => {
            complain(&format!("error: {error}"));
            if let Some(more) = explain::more(error) {
                complain(&more);
            }
            let word = if error.is_consequence() { Word::Consequence } else { Word::Failure };
            launcher::tell(word, &error.to_string());
            if let TrainError::Join(JoinError::Incomplete { missing, .. }) = error {
                let missing: Vec<_> = missing.iter().map(usize::to_string).collect();
                launcher::tell(Word::Absent, &missing.join(","));
            }
            if error.is_usage() { USAGE } else { FAILED }
        }
    };
    let is_told = output::finish();
    ExitCode::from(if code == 0 && !is_run && !is_told { FAILED } else { code })
}

/// Prints help, the version, or what is wrong with the arguments; returns the exit code.
fn tell_usage(error: &clap::Error) -> u8 {
    let words: Vec<_> = std::env::args_os().skip(1).take(2).collect();
    if let [Some("bench"), Some(what @ ("step" | "gpu" | "checkpoint"))] =
        words.iter().map(|word| word.to_str()).collect::<Vec<_>>()[..]
    {
        complain(&format!(
            "error: `kiln bench {what}` is a command of the program kiln-bench now, with the same flags: \
             cargo run --release -p kiln-benches --bin kiln-bench -- {what}"
        ));
        return USAGE;
    }
    let printed = error.print().and_then(|()| io::stdout().flush());
    match printed {
        // Help is there to be read, except by a reader that went away.
        Err(reason) if !error.use_stderr() && reason.kind() != io::ErrorKind::BrokenPipe => {
            complain(&format!("error: cannot write to standard output: {reason}"));
            FAILED
        }
        _ => u8::try_from(error.exit_code()).unwrap_or(USAGE),
    }
}

/// Work on files, with all cores.
fn on_files<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    process::in_pool(work).map_err(TrainError::threads("threads that read files"))?
}

#[cfg(test)]
mod tests {
    use clap::error::ErrorKind;

    use super::*;

    #[test]
    fn the_catalogue_of_errors_names_commands_that_there_are() {
        let commands = explain::tests::commands();
        assert!(commands.len() > 50, "{commands:?}");
        for (is_line, words) in commands {
            // What the text calls by its name does not have all of its arguments.
            let is_whole = |kind| kind != ErrorKind::MissingRequiredArgument || is_line;
            match Cli::command().try_get_matches_from(&words) {
                Err(error) if is_whole(error.kind()) && error.kind() != ErrorKind::DisplayVersion => {
                    panic!("{words:?}: {error}")
                }
                _ => {}
            }
        }
    }
}
