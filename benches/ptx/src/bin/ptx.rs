//! Reads PTX files and says which instructions are not known.

use std::process::ExitCode;

fn main() -> ExitCode {
    let files: Vec<String> = std::env::args().skip(1).collect();
    let (mut kernels, mut instructions, mut wrong) = (0, 0, 0);
    for file in &files {
        let read = std::fs::read_to_string(file).map_err(|error| error.to_string());
        let text = match read {
            Ok(text) => text,
            Err(error) => {
                println!("{file}: {error}");
                wrong += 1;
                continue;
            }
        };
        match kiln_ptx::unknown(&text) {
            Ok(unknown) => {
                wrong += unknown.len();
                unknown.iter().for_each(|(name, error)| println!("{file}: {name}: {error}"));
                if !unknown.is_empty() {
                    continue;
                }
            }
            Err(error) => {
                println!("{file}: {error}");
                wrong += 1;
                continue;
            }
        }
        match kiln_ptx::module(&text) {
            Ok(module) => {
                kernels += module.kernels.len();
                instructions += module.kernels.iter().map(|kernel| kernel.code.len()).sum::<usize>();
            }
            Err(error) => {
                println!("{file}: {error}");
                wrong += 1;
            }
        }
    }
    println!("{} modules, {kernels} kernels, {instructions} instructions, {wrong} not known", files.len());
    if wrong == 0 { ExitCode::SUCCESS } else { ExitCode::FAILURE }
}
