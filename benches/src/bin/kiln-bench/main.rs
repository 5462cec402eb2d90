//! Measures kernels, training steps, and checkpoints. `kiln bench strategies` compares strategies.
//!
//!     cargo run --release -p kiln-benches --bin kiln-bench -- step --config configs/90m.toml

mod beside;
mod checkpoint;
mod disk;
mod error;
mod gpu;
mod measure;
mod process;
mod report;
mod step;

use std::process::ExitCode;

use clap::Parser;
use kiln::process::CountingAllocator;
use kiln::process::output::{self, eprint_line, print_line};
use kiln::run::TrainError;

use checkpoint::CheckpointArgs;
use error::BenchError;
use gpu::GpuArgs;
use step::StepArgs;

#[global_allocator]
static ALLOCATOR: CountingAllocator = CountingAllocator;

const FAILED: u8 = 1;
const USAGE: u8 = 2;

/// Measures training steps, kernels and checkpoints.
#[derive(Parser)]
#[command(name = "kiln-bench", version, arg_required_else_help = true)]
enum Command {
    /// Compare saving and loading with plain writing and reading on the same disk.
    Checkpoint(CheckpointArgs),
    /// Time training steps on made-up tokens.
    Step(StepArgs),
    /// Time every kernel and whole steps on a GPU, next to PyTorch's if requested.
    Gpu(Box<GpuArgs>),
}

fn main() -> ExitCode {
    let begun = kiln::process::begin();
    output::report_panics();
    let command = Command::parse();
    let outcome = match begun {
        Ok(()) => run(command),
        Err(error) => Err(TrainError::usage(error.to_string()).into()),
    };
    let code = outcome.unwrap_or_else(|error| {
        eprint_line(&format!("error: {error}"));
        if error.is_usage() { USAGE } else { FAILED }
    });
    ExitCode::from(if !output::finish() && code == 0 { FAILED } else { code })
}

fn run(command: Command) -> Result<u8, BenchError> {
    let (text, passed) = match command {
        Command::Checkpoint(args) => (args.run()?, true),
        Command::Step(args) => (args.run()?, true),
        Command::Gpu(args) => {
            let said = args.run()?;
            (said.text, said.passed)
        }
    };
    print_line(&text);
    Ok(if passed { 0 } else { FAILED })
}
