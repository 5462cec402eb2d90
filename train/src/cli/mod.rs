//! The command line.

mod documents;

use std::io::{self, Write};
use std::path::PathBuf;
use std::process::ExitCode;

use clap::{Args, CommandFactory, Parser, Subcommand};
use kiln_collectives::tcp::JoinError;
use kiln_model::layers::Block;
use kiln_shard::ranks::RankError;

use crate::bench::{self, StrategiesOptions};
use crate::checkpoint::Architecture;
use crate::config;
use crate::convert::{ConvertArgs, ExportArgs, ImportArgs};
use crate::data::{PrepareOptions, TokenizerSource};
use crate::doctor::DoctorArgs;
use crate::error::TrainError;
use crate::eval::EvalArgs;
use crate::fault::Fault;
use crate::generate::GenerateArgs;
use crate::inspect::InspectArgs;
use crate::launch::{self, LaunchArgs};
use crate::place::{self, Job, Role};
use crate::prepared;
use crate::process::launcher::{self, Word};
use crate::process::output::{self, complain, say};
use crate::process::{self, stop_on_signals};
use crate::run::{self, PositionKey, Resume, RunFolder, RunOptions};
use crate::version::version;
use crate::weights::AllowMissing;
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
    /// Start several ranks of a run on this node and watch over them.
    Launch(LaunchArgs),
    /// Tell what this process knows about its place among others, its network and its machine.
    Doctor(DoctorArgs),
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
    /// Write a model in the layout of Hugging Face.
    Export(ExportArgs),
    /// Measure.
    Bench {
        #[command(subcommand)]
        command: BenchCommand,
    },
    /// Show what is in a checkpoint, or what the ranks of a failed run were doing.
    Inspect(InspectArgs),
    /// Make a full checkpoint of a sharded one, or the other way round.
    Convert(ConvertArgs),
    /// Print a script with which a shell completes commands and flags.
    Completions(CompletionsArgs),
    /// Write manual pages.
    Man(ManArgs),
}

impl Command {
    /// Whether output is only an account of what the command does: nobody has to read it, and it ends nothing.
    fn is_run(&self) -> bool {
        matches!(self, Command::Train(_) | Command::Launch(_))
    }
}

#[derive(Args)]
struct TrainArgs {
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
    #[command(flatten)]
    place: place::Flags,
    /// Fire drill: let one rank fail, once.
    #[arg(long, value_name = "KIND@PHASE:STEP:RANK", hide = true)]
    fault: Option<Fault>,
}

#[derive(Subcommand)]
enum DataCommand {
    /// Tokenize text into train.bin and val.bin.
    Prepare(PrepareArgs),
    /// Read every byte of prepared data and compare it with the checksums.
    Verify(VerifyArgs),
}

#[derive(Args)]
struct PrepareArgs {
    /// Text, .jsonl (field "text") or .parquet files, or folders of them; "-" is the standard input.
    #[arg(long, required = true, num_args = 1.., value_name = "FILE|DIR")]
    input: Vec<String>,
    /// Folder to create.
    #[arg(long)]
    out: PathBuf,
    #[command(flatten)]
    tokenizer: TokenizerArgs,
    /// Share of the text to hold out for validation.
    #[arg(long, allow_negative_numbers = true, default_value_t = PrepareOptions::VALIDATION_FRACTION)]
    validation_fraction: f64,
    /// Decides which text is held out.
    #[arg(long, allow_negative_numbers = true, default_value_t = 0)]
    seed: u64,
}

#[derive(Args)]
struct VerifyArgs {
    /// Folder of prepared data.
    folder: PathBuf,
}

#[derive(Args)]
#[group(required = true, multiple = false)]
struct TokenizerArgs {
    /// Train a byte-level BPE tokenizer of this many tokens on the text.
    #[arg(long, value_name = "N")]
    vocab_size: Option<usize>,
    /// Use this tokenizer.
    #[arg(long, value_name = "tokenizer.json")]
    tokenizer: Option<PathBuf>,
}

#[derive(Subcommand)]
enum BenchCommand {
    /// Compare all sharding strategies on the same work.
    Strategies(StrategiesArgs),
}

#[derive(Args)]
struct StrategiesArgs {
    /// Configuration whose model and batch to use [default: preset 10m].
    #[arg(long)]
    config: Option<PathBuf>,
    /// Ranks, as threads of this process; not needed under a launcher, which starts them as processes.
    #[arg(long)]
    ranks: Option<usize>,
    /// Steps measured per strategy and round.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Rounds; the strategies alternate, and medians are shown.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

/// Runs the command that the arguments of this process name, and returns its exit code. Sets up the process
/// as [`process::start`] does; the allocator is the binary's.
pub fn main() -> ExitCode {
    let begun = process::begin();
    output::tell_panics();
    let command = match Cli::try_parse() {
        Ok(cli) => cli.command,
        Err(error) => return ExitCode::from(tell_usage(&error)),
    };
    // Runs do not wait for whoever reads along; other commands are there to be read.
    let is_run = command.is_run();
    let _output = is_run.then(output::never_block);
    if let Err(error) = begun {
        return exit(Err(TrainError::usage(error.to_string())), is_run);
    }
    let done = |()| 0;
    let tell = |text: String| say(&text);
    let outcome = match command {
        Command::Train(args) => train(args),
        Command::Launch(args) => args.run().map_err(TrainError::from),
        Command::Doctor(args) => Ok(doctor(&args)),
        Command::Data { command: DataCommand::Prepare(args) } => on_files(|| prepare(args)).map(done),
        Command::Data { command: DataCommand::Verify(args) } => {
            prepared::verify(&args.folder).map(tell).map(done).map_err(TrainError::from)
        }
        Command::Generate(args) => args.run().map(done),
        Command::Eval(args) => args.run(),
        Command::Import(args) => on_files(|| args.run()).map(done),
        Command::Export(args) => on_files(|| args.run()).map(done),
        Command::Bench { command: BenchCommand::Strategies(args) } => strategies(args),
        Command::Inspect(args) => on_files(|| args.run()).map(tell).map(done),
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
fn exit(outcome: Result<u8, TrainError>, is_run: bool) -> ExitCode {
    let code = match &outcome {
        Ok(code) => *code,
        Err(error) if error.is_stop() => {
            say(&error.to_string());
            launcher::tell(Word::Stopped, "");
            launch::PREEMPTED
        }
        Err(error) => {
            complain(&format!("error: {error}"));
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
            "error: `kiln bench {what}` is a command of the program kiln-bench now, with the same flags: cargo \
             run --release -p kiln-benches --bin kiln-bench -- {what}"
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
fn on_files<T: Send>(work: impl FnOnce() -> Result<T, TrainError> + Send) -> Result<T, TrainError> {
    process::in_pool(work).map_err(TrainError::threads("threads that read files"))?
}

/// Trains, or starts the ranks of a node; returns the exit code.
fn train(args: TrainArgs) -> Result<u8, TrainError> {
    let (place, job) = match place::find_here(&args.place)? {
        Role::Node(node) => return Ok(launch::run_node(node)?),
        Role::Rank(place) => (Some(place), Job::default()),
        Role::Alone(job) => (None, job),
    };
    let config = config::load(&args.config, &args.overrides)?;
    let options = RunOptions {
        out: args.out.map_or_else(|| RunFolder::of_config(&args.config), RunFolder::At),
        resume: args.resume.map(|resume| match resume.as_str() {
            "latest" => Resume::Latest,
            path => Resume::Path(path.into()),
        }),
        ranks: args.ranks,
        place,
        job,
        stop: stop_on_signals(),
        allow_missing: AllowMissing::new(&args.allow_missing).map_err(TrainError::usage)?,
        allow_other_parts: args.allow_other_parts,
        allow_changed: args.allow_changed,
        fault: args.fault,
        // The environment was asked above, and flags go before it.
        alone: true,
    };
    let summary = run::run_decoder(config, &options, Architecture::decoder(), Block::new)?;
    Ok(if summary.preempted { launch::PREEMPTED } else { 0 })
}

fn doctor(args: &DoctorArgs) -> u8 {
    let (text, healthy) = args.run();
    say(&text);
    if healthy { 0 } else { USAGE }
}

fn prepare(args: PrepareArgs) -> Result<(), TrainError> {
    let tokenizer = match (args.tokenizer.tokenizer, args.tokenizer.vocab_size) {
        (Some(file), _) => TokenizerSource::File(file),
        (None, vocab_size) => TokenizerSource::Train {
            // The argument parser insists on one of the two.
            vocab_size: vocab_size.unwrap_or_default(),
        },
    };
    let options = PrepareOptions {
        inputs: prepared::inputs(&args.input),
        out: args.out,
        tokenizer,
        validation_fraction: args.validation_fraction,
        seed: args.seed,
    };
    prepared::prepare(&options, &stop_on_signals())?;
    Ok(())
}

/// Measures, or starts the ranks of a node; returns the exit code.
fn strategies(args: StrategiesArgs) -> Result<u8, TrainError> {
    let place = match place::find_here(&place::Flags::default())? {
        Role::Node(node) => return Ok(launch::run_node(node)?),
        Role::Rank(place) => Some(place),
        Role::Alone(_) => None,
    };
    let speaks = place.as_ref().is_none_or(|place| place.rank == 0);
    let config = match &args.config {
        Some(path) => Some(config::load(path, &[])?),
        None => None,
    };
    let StrategiesArgs { ranks, steps, rounds, .. } = args;
    let table = bench::strategies(&StrategiesOptions { config, ranks, place, steps, rounds })?;
    if speaks {
        say(&if args.json { table.to_json() } else { table.to_text() });
    }
    Ok(0)
}
