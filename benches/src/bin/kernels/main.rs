//! Compiles kernels with NVIDIA's assembler and compares their resource usage with limits. From traces of training
//! steps, computes the host cost of a step, and predicts its time on a GPU.
//!
//! `kernels FOLDER…` compiles the PTX files in the folders, prints one row per kernel and architecture with the maximum
//! of its variants, and compares the rows with `benches/kernels.toml`. `benches/kernels.sh` creates the files.
//!
//! `kernels --host` and `kernels --predict` take two folders per preset, created by `benches/host_cost.sh`: runs with
//! few and with more blocks.

mod host;
mod kernel_time;
mod limits;
mod matmul;
mod occupancy;
mod predict;
mod ptx;
mod sass;
mod table;
mod trace;

use std::path::PathBuf;
use std::process::ExitCode;

use limits::Limits;
use ptx::Tools;
use table::Table;

const USAGE: &str = "usage: kernels [--limits FILE] [--ptxas PROGRAM] [--entries] FOLDER…
       kernels --host [--limits FILE] FOLDER FOLDER…
       kernels --predict GPU --nvdisasm PROGRAM --python PROGRAM [--ptxas PROGRAM] FOLDER FOLDER…

--limits    what kernels are held to [default: benches/kernels.toml], or launches of a step [default: nothing]
--ptxas     NVIDIA's assembler [default: the one in target/standins, or ptxas]
--entries   print entries for the limits file, with what the kernels use now
--host      count launches and bytes of a step and of a block, from two runs with few and with more blocks
--predict   the time of a step on this GPU, from the same runs
--nvdisasm  NVIDIA's disassembler
--python    a Python with nvidia-matmul-heuristics";

/// Path of `ptxas` after `benches/standins/setup.sh`.
const PTXAS: &str = "target/standins/python/nvidia/cu13/bin/ptxas";

#[derive(PartialEq)]
enum Mode {
    Table,
    Entries,
    Host,
    Predict(String),
}

struct Arguments {
    mode: Mode,
    limits: Option<PathBuf>,
    tools: Tools,
    python: PathBuf,
    folders: Vec<PathBuf>,
}

impl Arguments {
    fn parse(mut words: impl Iterator<Item = String>) -> Result<Self, String> {
        let ptxas = if PathBuf::from(PTXAS).exists() { PTXAS } else { "ptxas" };
        let mut arguments = Arguments {
            mode: Mode::Table,
            limits: None,
            tools: Tools { ptxas: ptxas.into(), nvdisasm: None },
            python: "python3".into(),
            folders: Vec::new(),
        };
        while let Some(word) = words.next() {
            let mut value = || words.next().ok_or(format!("{word} needs a value\n\n{USAGE}"));
            match word.as_str() {
                "--limits" => arguments.limits = Some(value()?.into()),
                "--ptxas" => arguments.tools.ptxas = value()?.into(),
                "--nvdisasm" => arguments.tools.nvdisasm = Some(value()?.into()),
                "--python" => arguments.python = value()?.into(),
                "--entries" => arguments.mode = Mode::Entries,
                "--host" => arguments.mode = Mode::Host,
                "--predict" => arguments.mode = Mode::Predict(value()?),
                flag if flag.starts_with('-') => return Err(USAGE.to_owned()),
                folder => arguments.folders.push(folder.into()),
            }
        }
        let needs_code = matches!(arguments.mode, Mode::Predict(_)) && arguments.tools.nvdisasm.is_none();
        if arguments.folders.is_empty() || needs_code { Err(USAGE.to_owned()) } else { Ok(arguments) }
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

fn run(arguments: &Arguments) -> Result<bool, String> {
    match &arguments.mode {
        Mode::Table | Mode::Entries => hold_kernels(arguments),
        Mode::Host => host::run(&arguments.folders, arguments.limits.as_deref()),
        Mode::Predict(gpu) => {
            predict::run(&arguments.folders, gpu, &arguments.tools, &arguments.python).map(|()| true)
        }
    }
}

fn hold_kernels(arguments: &Arguments) -> Result<bool, String> {
    let mut table = Table::default();
    for folder in &arguments.folders {
        for kernel in ptx::assemble_all(folder, &arguments.tools)? {
            table.add(kernel);
        }
    }
    if arguments.mode == Mode::Entries {
        print!("{}", table.entries());
        return Ok(true);
    }
    print!("{}", table.text());
    let limits = arguments.limits.clone().unwrap_or_else(|| "benches/kernels.toml".into());
    let problems = Limits::read(&limits)?.check(&table);
    for problem in &problems {
        println!("{problem}");
    }
    if !problems.is_empty() {
        println!("{} above; the limits are in {}", problems.len(), limits.display());
    }
    Ok(problems.is_empty())
}
