//! The command line: its commands, and how a command ends. Each command's module has its arguments and method `run`.

use std::ffi::{OsStr, OsString};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::process::ExitCode;

use clap::error::{ContextKind, ContextValue, ErrorKind};
use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};
use kiln_collectives::tcp::JoinError;

use crate::commands::attach::AttachArgs;
use crate::commands::chat::ChatArgs;
use crate::commands::convert::{ConvertArgs, ExportArgs, ImportArgs};
use crate::commands::data::{PrepareArgs, ShowArgs, VerifyArgs};
use crate::commands::documents::{CompletionsArgs, ManArgs};
use crate::commands::eval::EvalArgs;
use crate::commands::explain::{self, ExplainArgs};
use crate::commands::generate::GenerateArgs;
use crate::commands::inspect::InspectArgs;
use crate::commands::launch::LaunchArgs;
use crate::commands::metrics::MetricsArgs;
use crate::commands::own;
use crate::commands::plan::PlanArgs;
use crate::commands::report::ReportArgs;
use crate::commands::status::StatusArgs;
use crate::commands::sweep::SweepArgs;
use crate::commands::train::TrainArgs;
use crate::commands::watch::WatchArgs;
use crate::error::{CommandError, Result};
use crate::version::version;
use kiln_config::{self as config, ConfigArgs};
use kiln_debug::TraceArgs;
use kiln_debug::diff::{BisectArgs, DiffArgs};
use kiln_debug::replay::ReplayArgs;
use kiln_preflight::DoctorArgs;
use kiln_preflight::bench::{NetworkArgs, StrategiesArgs, TuneArgs};
use kiln_preflight::check::CheckArgs;
use kiln_preflight::warmup::WarmupArgs;
use kiln_train::TrainError;
use kiln_train::command::Commands;
use kiln_train::launch;
use kiln_train::process;
use kiln_train::process::launcher::{self, Message};
use kiln_train::process::output::{self, eprint_line, print_line};
use kiln_train::run::Program;

/// Exit code of a run that failed.
const FAILED: u8 = 1;
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
    /// Predict a run's memory, traffic and step time, and recommend a sharding strategy.
    Plan(PlanArgs),
    /// Measure the most promising settings of a configuration, and write the fastest to a file.
    Tune(TuneArgs),
    /// Run each combination of settings, and compare their results.
    Sweep(SweepArgs),
    /// Compile the kernels of a run for NVIDIA GPUs before it starts, or pack them for other machines.
    #[cfg_attr(not(feature = "cuda"), command(hide = true))]
    Warmup(WarmupArgs),
    /// Start the ranks of a run on this node, and restart them if one fails.
    Launch(LaunchArgs),
    /// Show the activity of every rank, which ranks wait, and what is wrong.
    Status(StatusArgs),
    /// Watch runs in the terminal or in a browser: curves, ranks, logs, samples.
    Watch(WatchArgs),
    /// Check that a run would start: environment, data, model, network, disk.
    Check(CheckArgs),
    /// Show every key of a configuration, with its meaning and value.
    Config(ConfigArgs),
    /// Show what Kiln finds on this machine: ranks, network, devices, libraries.
    Doctor(DoctorArgs),
    /// Explain an error: its cause, how to check it, and how to fix it.
    Explain(ExplainArgs),
    /// Prepare, show and verify training data.
    Data {
        #[command(subcommand)]
        command: DataCommand,
    },
    /// Generate text with a model.
    Generate(GenerateArgs),
    /// Talk to a model in the terminal.
    Chat(ChatArgs),
    /// Evaluate a model: validation loss, answer loss, or logits.
    Eval(EvalArgs),
    /// Import a Hugging Face model as a checkpoint.
    Import(ImportArgs),
    /// Export a checkpoint to the Hugging Face format.
    Export(ExportArgs),
    /// Measure sharding strategies or the network.
    Bench {
        #[command(subcommand)]
        command: BenchCommand,
    },
    /// Debug a live run: hold its ranks, print tensors.
    Attach(AttachArgs),
    /// Summarize a trace of `kiln train --trace`.
    Trace(TraceArgs),
    /// Repeat one step of a run from the checkpoint before it, and compare it with the record.
    Replay(ReplayArgs),
    /// Show or verify a checkpoint.
    Inspect(InspectArgs),
    /// Compare two runs, checkpoints, configurations or datasets, and find the first difference.
    Diff(DiffArgs),
    /// Write an HTML report about runs.
    Report(ReportArgs),
    /// Write the metrics of runs as CSV or as TensorBoard event files.
    Metrics(MetricsArgs),
    /// Find the setting that makes two runs differ, by running trials.
    Bisect(BisectArgs),
    /// Convert a checkpoint between its full and its sharded form.
    Convert(ConvertArgs),
    /// Print a completion script for a shell.
    #[command(hide = true)]
    Completions(CompletionsArgs),
    /// Write manual pages.
    #[command(hide = true)]
    Man(ManArgs),
}

const GROUPS: [(&str, &[&str]); 7] = [
    ("Train", &["train", "launch", "plan", "tune", "sweep", "check", "config"]),
    ("Data", &["data"]),
    ("Use", &["generate", "chat", "eval"]),
    ("Checkpoints", &["inspect", "convert", "import", "export"]),
    ("Watch", &["status", "watch", "report", "metrics"]),
    ("Debug", &["attach", "diff", "bisect", "replay", "trace", "explain"]),
    ("Machine", &["doctor", "bench", "warmup"]),
];

/// Returns the command line, with the commands that the program `adds`. They read their arguments themselves. Panics if
/// one has the name of a built-in command.
fn command_line(adds: &Commands) -> clap::Command {
    let mut command = Cli::command();
    for added in adds.iter() {
        let name = added.name;
        let is_taken = name == "help" || command.find_subcommand(name).is_some();
        assert!(!is_taken, "`{name}` is a command already: choose another name");
        command = command.subcommand(clap::Command::new(name));
    }
    let mut help = String::from("{about}\n\n{usage-heading} {usage}\n");
    for (title, names) in GROUPS {
        help.push_str(&format!("\n{title}:\n"));
        let shown =
            names.iter().filter_map(|name| command.find_subcommand(name)).filter(|c| !c.is_hide_set());
        for command in shown {
            let about = command.get_about().map(ToString::to_string).unwrap_or_default();
            help.push_str(&format!("  {:9} {about}\n", command.get_name()));
        }
    }
    if adds.iter().next().is_some() {
        help.push_str("\nThis program:\n");
        for added in adds.iter() {
            let about = added.help.and_then(|help| help.lines().next()).unwrap_or_default();
            help.push_str(format!("  {:9} {about}", added.name).trim_end());
            help.push('\n');
        }
    }
    help.push_str("\nOptions:\n{options}\n\nkiln COMMAND --help shows the arguments of a command.");
    command.help_template(help)
}

impl Command {
    /// Returns whether the command's output only reports progress, so that the command need not wait for a reader.
    fn is_run(&self) -> bool {
        matches!(self, Command::Train(_) | Command::Launch(_))
    }

    /// Returns whether the command runs ranks, which must not wait for a reader of their output.
    fn never_blocks(&self) -> bool {
        self.is_run() || matches!(self, Command::Replay(_))
    }
}

#[derive(Subcommand)]
enum DataCommand {
    /// Tokenize text for training and validation.
    Prepare(PrepareArgs),
    /// Show prepared data: counts, lengths and samples.
    Show(ShowArgs),
    /// Verify the checksums of prepared data.
    Verify(VerifyArgs),
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Compare all sharding strategies on the same work.
    Strategies(StrategiesArgs),
    /// Measure the time of collectives between ranks.
    Network(NetworkArgs),
}

/// Runs the command named in the arguments of this process, with the parts of `program`: a
/// [`Registry`](kiln_train::registry::Registry), or one with a training loop. Returns the exit code. Sets up the
/// process as [`process::start`] does, except for the allocator, which the binary must set.
pub fn main(program: impl Into<Program>) -> ExitCode {
    let program = program.into();
    // Sets the version for crash reports, which `begin` sets up.
    version();
    let begun = process::begin().map_err(|error| CommandError::usage(error.to_string()));
    process::has_commands();
    output::report_panics();
    let arguments = in_current_spelling(std::env::args_os());
    let commands = program.registry.commands();
    let command_line = command_line(commands);
    if let Some(command) = arguments.get(1).and_then(|name| commands.find(name)) {
        let asks = arguments.get(2).is_some_and(|argument| argument == "--help" || argument == "-h");
        if let Some(help) = command.help.filter(|_| asks) {
            print_line(help);
            return ExitCode::SUCCESS;
        }
        return exit(begun.and_then(|()| own::run(command, &arguments[2..])), false);
    }
    let matches = command_line.try_get_matches_from(arguments);
    let command = match matches.and_then(|matches| Cli::from_arg_matches(&matches)) {
        Ok(cli) => cli.command,
        Err(mut error) => {
            // clap suggests to pass an unknown flag as a value, which no command here accepts.
            if error.kind() == ErrorKind::UnknownArgument {
                error.remove(ContextKind::Suggested);
            }
            return ExitCode::from(tell_usage(&error));
        }
    };
    // A run must not wait for a reader of its output; other commands wait, because they exist for their output.
    let is_run = command.is_run();
    let _output = command.never_blocks().then(output::never_block);
    exit(begun.and_then(|()| run(command, program)), is_run)
}

fn run(command: Command, program: Program) -> Result<u8> {
    let registry = program.registry.clone();
    let print = |text: String| {
        print_line(&text);
        Ok(0)
    };
    let done = |()| Ok(0);
    match command {
        Command::Train(args) => args.run(program),
        Command::Plan(args) => print(args.run(&registry)?),
        Command::Tune(args) => Ok(args.run(&registry)?),
        Command::Sweep(args) => args.run(&registry),
        Command::Warmup(args) => Ok(args.run(&registry)?),
        Command::Launch(args) => Ok(args.run(registry.commands())?),
        Command::Status(args) => args.run(),
        Command::Watch(args) => done(args.run()?),
        Command::Check(args) => Ok(args.run(&registry)?),
        Command::Config(args) => print(args.run()?),
        Command::Doctor(args) => Ok(args.run()),
        Command::Explain(args) => print(args.run()),
        Command::Data { command: DataCommand::Prepare(args) } => done(on_files(|| Ok(args.run()?))?),
        Command::Data { command: DataCommand::Show(args) } => {
            print(on_files(|| Ok(args.run(registry.sources())?))?)
        }
        Command::Data { command: DataCommand::Verify(args) } => print(args.run()?),
        Command::Generate(args) => done(args.run(registry.layers())?),
        Command::Chat(args) => done(args.run(registry.layers())?),
        Command::Eval(args) => Ok(args.run(&registry)?),
        Command::Import(args) => done(on_files(|| args.run())?),
        Command::Export(args) => done(on_files(|| args.run())?),
        Command::Bench { command: BenchCommand::Strategies(args) } => Ok(args.run(&registry)?),
        Command::Bench { command: BenchCommand::Network(args) } => Ok(args.run()?),
        Command::Attach(args) => args.run(),
        Command::Trace(args) => print(args.run()?),
        Command::Replay(args) => Ok(args.run(&registry)?),
        Command::Inspect(args) => print(on_files(|| args.run())?),
        Command::Diff(args) => Ok(args.run(&registry)?),
        Command::Report(args) => print(args.run()?),
        Command::Metrics(args) => print(args.run()?),
        Command::Bisect(args) => Ok(args.run(&registry)?),
        Command::Convert(args) => print(on_files(|| args.run())?),
        Command::Completions(args) => print(args.run(command_line(registry.commands()))),
        Command::Man(args) => print(args.run(command_line(registry.commands()))?),
    }
}

/// Reports the end of a command to the user and the launcher; returns the exit code of the process.
fn exit(outcome: Result<u8>, is_run: bool) -> ExitCode {
    let code = match &outcome {
        Ok(code) => *code,
        Err(error) if error.is_stop() => {
            print_line(&error.to_string());
            launcher::send(Message::Stopped, "");
            launch::PREEMPTED
        }
        Err(error) => {
            eprint_line(&format!("error: {error}"));
            if let Some(more) = explain::more(error) {
                eprint_line(&more);
            }
            let message = if error.is_consequence() { Message::Consequence } else { Message::Failure };
            launcher::send(message, &error.to_string());
            if let Some(TrainError::Join(JoinError::Incomplete { missing, .. })) = error.train_error() {
                let missing: Vec<_> = missing.iter().map(usize::to_string).collect();
                launcher::send(Message::Absent, &missing.join(","));
            }
            if error.is_usage() { USAGE } else { FAILED }
        }
    };
    let is_told = output::finish();
    ExitCode::from(if code == 0 && !is_run && !is_told { FAILED } else { code })
}

fn tell_usage(error: &clap::Error) -> u8 {
    let printed = error.print().and_then(|()| io::stdout().flush());
    match printed {
        // Failing to print help is an error, unless the reader has closed the output.
        Err(reason) if !error.use_stderr() && reason.kind() != io::ErrorKind::BrokenPipe => {
            eprint_line(&format!("error: cannot write to standard output: {reason}"));
            FAILED
        }
        _ => {
            let key = unknown_flag(error).and_then(|flag| config::key_of_flag(&flag));
            if let Some(key) = key.filter(|_| takes_settings(std::env::args().nth(1))) {
                eprint_line(&format!("  tip: this is a configuration key: --set {key}=VALUE"));
            }
            u8::try_from(error.exit_code()).unwrap_or(USAGE)
        }
    }
}

/// Returns `arguments` with two earlier spellings replaced: `--checkpoint CHECKPOINT`, and `export metrics`.
fn in_current_spelling(arguments: impl Iterator<Item = OsString>) -> Vec<OsString> {
    const COMMANDS: [&str; 4] = ["convert", "eval", "export", "generate"];
    let mut arguments: Vec<_> = arguments.collect();
    if arguments.get(1..3).is_some_and(|words| words == ["export", "metrics"]) {
        arguments.remove(1);
    }
    if arguments.get(1).is_some_and(|command| COMMANDS.iter().any(|name| command == name)) {
        arguments.retain(|argument| argument != "--checkpoint");
        for argument in &mut arguments {
            if let Some(path) = argument.as_bytes().strip_prefix(b"--checkpoint=") {
                *argument = OsStr::from_bytes(path).to_owned();
            }
        }
    }
    arguments
}

/// Returns whether the command with this name has `--set`.
fn takes_settings(name: Option<String>) -> bool {
    let command = Cli::command();
    let command = name.and_then(|name| command.find_subcommand(&name).cloned());
    command.is_some_and(|command| command.get_arguments().any(|argument| argument.get_long() == Some("set")))
}

/// Returns the flag that the command does not know, if that is the error.
fn unknown_flag(error: &clap::Error) -> Option<String> {
    match error.get(ContextKind::InvalidArg)? {
        ContextValue::String(flag) if error.kind() == ErrorKind::UnknownArgument => Some(flag.clone()),
        _ => None,
    }
}

/// Runs `work`, which reads or writes files, on all cores.
fn on_files<T: Send>(work: impl FnOnce() -> Result<T> + Send) -> Result<T> {
    process::in_pool(work).map_err(TrainError::threads("threads that read files"))?
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn help_has_every_command_once_on_one_screen() {
        let grouped: Vec<_> = GROUPS.iter().flat_map(|(_, names)| *names).copied().collect();
        let shown = |command: &&clap::Command| !["completions", "man"].contains(&command.get_name());
        let command = Cli::command();
        let mut all: Vec<_> = command.get_subcommands().filter(shown).map(clap::Command::get_name).collect();
        let mut sorted = grouped.clone();
        sorted.sort_unstable();
        all.sort_unstable();
        assert_eq!(sorted, all);
        let help = command_line(&Commands::default()).render_help().to_string();
        assert!(help.lines().count() <= 50 && help.lines().all(|line| line.chars().count() <= 100), "{help}");
    }

    #[test]
    #[should_panic(expected = "`train` is a command already: choose another name")]
    fn a_command_cannot_have_the_name_of_a_built_in_one() {
        command_line(&Commands::default().with("train", |_, _| Ok(())));
    }

    #[test]
    fn flags_that_are_keys_are_suggested() {
        let unknown = |flag: &str| {
            let command_line = command_line(&Commands::default());
            let error = command_line.try_get_matches_from(["kiln", "train", "a.toml", flag]).unwrap_err();
            config::key_of_flag(&unknown_flag(&error).unwrap())
        };
        assert_eq!(unknown("--lr").as_deref(), Some("optim.lr"));
        assert_eq!(unknown("--seq-len").as_deref(), Some("data.seq_len"));
        assert_eq!(unknown("--batch-size").as_deref(), Some("train.global_batch"));
        assert_eq!(unknown("--nothing-of-ours"), None);
        let takes = |name: &str| takes_settings(Some(name.to_owned()));
        assert!(takes("train") && !takes("export") && !takes_settings(None));
    }

    #[test]
    fn the_catalogue_of_errors_names_commands_that_there_are() {
        let commands = explain::tests::commands();
        assert!(commands.len() > 50, "{commands:?}");
        for (is_line, words) in commands {
            // A command that the text only mentions by name need not have all of its arguments.
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
