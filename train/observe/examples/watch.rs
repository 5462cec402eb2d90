//! Watches run folders on this terminal without asking their processes: draws the same as `kiln watch`, from
//! files alone.
//!
//!     cargo run -p kiln-observe --example watch -- RUN...

use std::path::{Path, PathBuf};
use std::sync::Arc;

use kiln_observe::ask::ask_all;
use kiln_observe::status::{Look, look};
use kiln_observe::watch::{WatchOptions, run};

/// Returns the answers of a run's processes; a run without processes seems to begin or to end.
fn look_at(folder: &Path) -> Result<Look, String> {
    let answers = ask_all(folder, false).map_err(|error| error.to_string())?;
    Ok(look(folder.display().to_string(), answers))
}

fn main() {
    let runs: Vec<PathBuf> = std::env::args_os().skip(1).map(PathBuf::from).collect();
    if let Err(error) = run(WatchOptions::new(runs, Arc::new(look_at))) {
        eprintln!("{error}");
        std::process::exit(2);
    }
}
