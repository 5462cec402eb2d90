//! Reads PTX files and reports unknown instructions, or measures the speed of executing kernels.
//!
//!     ptx FILE...
//!     ptx --speed

mod speed;

use std::process::ExitCode;

fn main() -> ExitCode {
    let files: Vec<String> = std::env::args().skip(1).collect();
    match &files[..] {
        [] => {
            eprintln!("usage: ptx FILE... | ptx --speed");
            ExitCode::from(2)
        }
        [only] if only == "--speed" => match speed::measure() {
            Ok(()) => ExitCode::SUCCESS,
            Err(error) => {
                eprintln!("{error}");
                ExitCode::FAILURE
            }
        },
        _ => read(&files),
    }
}

/// Counts over all modules that were read.
#[derive(Default)]
struct Sums {
    kernels: usize,
    instructions: usize,
}

fn read(files: &[String]) -> ExitCode {
    let (mut sums, mut wrong) = (Sums::default(), 0);
    for file in files {
        for message in read_one(file, &mut sums) {
            println!("{file}: {message}");
            wrong += 1;
        }
    }
    let Sums { kernels, instructions } = sums;
    println!("{} modules, {kernels} kernels, {instructions} instructions, {wrong} not known", files.len());
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}

/// Reads a file. Returns one message for each kind of unknown instruction.
fn read_one(file: &str, sums: &mut Sums) -> Vec<String> {
    let text = match std::fs::read_to_string(file) {
        Ok(text) => text,
        Err(error) => return vec![error.to_string()],
    };
    match (kiln_ptx::unknown(&text), kiln_ptx::module(&text)) {
        (Ok(unknown), Err(_)) if !unknown.is_empty() => {
            unknown.iter().map(|error| error.to_string()).collect()
        }
        (_, Err(error)) => vec![error.to_string()],
        (_, Ok(module)) => {
            sums.kernels += module.kernels.len();
            let instructions = |kernel: &std::sync::Arc<kiln_ptx::Kernel>| kernel.code.len();
            sums.instructions += module.kernels.iter().map(instructions).sum::<usize>();
            Vec::new()
        }
    }
}
