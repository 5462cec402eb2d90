//! Compiles kernels with NVIDIA's assembler, prints what they use, and compares that with limits.
//!
//! `kernels FOLDER…` takes every PTX file in the folders, has `ptxas` compile it for the architecture
//! that it names, and prints one row per kernel and architecture: the most registers, spilled bytes and
//! shared memory of its variants, and whether they use tensor cores. The rows are then compared with
//! `benches/kernels.toml`. Who launched the kernels does not matter: `benches/kernels.sh` has any program
//! do it under the stand-in for a driver.

mod limits;
mod ptx;
mod table;

use std::path::PathBuf;
use std::process::ExitCode;

use limits::Limits;
use table::Table;

const USAGE: &str = "usage: kernels [--limits FILE] [--ptxas PROGRAM] [--entries] FOLDER…

--limits   what kernels are held to [default: benches/kernels.toml]
--ptxas    NVIDIA's assembler [default: the one in target/fakecuda, or ptxas]
--entries  print entries for the limits file, with what the kernels use now";

/// The path of `ptxas` after `benches/fakecuda/setup.sh`.
const PTXAS: &str = "target/fakecuda/python/nvidia/cu13/bin/ptxas";

struct Arguments {
    limits: PathBuf,
    ptxas: PathBuf,
    entries: bool,
    folders: Vec<PathBuf>,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let ptxas = if PathBuf::from(PTXAS).exists() { PTXAS } else { "ptxas" };
        let mut arguments = Arguments {
            limits: "benches/kernels.toml".into(),
            ptxas: ptxas.into(),
            entries: false,
            folders: Vec::new(),
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value\n\n{USAGE}"));
            match word.as_str() {
                "--limits" => arguments.limits = value()?.into(),
                "--ptxas" => arguments.ptxas = value()?.into(),
                "--entries" => arguments.entries = true,
                flag if flag.starts_with('-') => return Err(USAGE.to_owned()),
                folder => arguments.folders.push(folder.into()),
            }
        }
        if arguments.folders.is_empty() { Err(USAGE.to_owned()) } else { Ok(arguments) }
    }
}

fn main() -> ExitCode {
    match Arguments::parse(std::env::args().skip(1)).and_then(|arguments| run(&arguments)) {
        Ok(true) => ExitCode::SUCCESS,
        Ok(false) => ExitCode::FAILURE,
        Err(problem) => {
            eprintln!("{problem}");
            ExitCode::from(2)
        }
    }
}

/// Whether every kernel is within its limits.
fn run(arguments: &Arguments) -> Result<bool, String> {
    let mut table = Table::default();
    for folder in &arguments.folders {
        for kernel in ptx::assemble_all(folder, &arguments.ptxas)? {
            table.add(kernel);
        }
    }
    if arguments.entries {
        print!("{}", table.entries());
        return Ok(true);
    }
    print!("{}", table.text());
    let problems = Limits::read(&arguments.limits)?.check(&table);
    for problem in &problems {
        println!("{problem}");
    }
    if !problems.is_empty() {
        println!("{} above; the limits are in {}", problems.len(), arguments.limits.display());
    }
    Ok(problems.is_empty())
}
