//! Serves the page of made-up runs: three small ones that differ in their configurations, a large one of a
//! million steps and 64 ranks, and one that was killed in the middle of a line. For work on the page, and for
//! its checks.
//!
//! `cargo run --release -p kiln-observe --example page -- FOLDER [ADDRESS:PORT [STEPS-OF-THE-LARGE-RUN]]`
//!
//! With `--report DIR` after FOLDER, it writes the report of the runs in the folder, and exits.
//!
//! Runs that already exist in the folder are served unchanged. Two of them continue while they are served. With 0 steps,
//! no runs are made up.

mod live;
mod made_up;

use std::error::Error;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread;
use std::time::Duration;

use kiln_observe::page::{AccessToken, ServeOptions, Tell, serve};
use kiln_observe::report::Report;
use kiln_observe::status::LookAt;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = std::env::args().skip(1);
    let folder = PathBuf::from(arguments.next().ok_or("name a folder")?);
    let address = arguments.next().unwrap_or_else(|| "127.0.0.1:6006".to_owned());
    if address == "--report" {
        let place = arguments.next().ok_or("name a folder for the report")?;
        let look_at: LookAt = Arc::new(live::look_at);
        let report =
            Report::from_runs(vec![folder], look_at, Some(Arc::new(live::timelines_at)), "as checked")?;
        return Ok(report.write(place.as_ref(), "--report")?);
    }
    let address = address.parse()?;
    let large_steps = arguments.next().map_or(Ok(1_000_000), |steps| steps.parse())?;
    let runs = if large_steps == 0 { Vec::new() } else { made_up::runs(&folder, large_steps)? };
    let token = std::env::var("KILN_PAGE_TOKEN").ok().map(AccessToken::new).transpose()?;
    // The runs are made up: they answer an order by repeating it.
    let tell = token.as_ref().map(|_| Arc::new(|_: &Path, line: &str| Ok(format!("told: {line}"))) as Tell);
    let server = serve(ServeOptions {
        address,
        paths: vec![folder],
        token,
        names: Vec::new(),
        look_at: Arc::new(live::look_at),
        timelines_at: Some(Arc::new(live::timelines_at)),
        tell,
    })?;
    println!("{}", server.url());
    let mut going: Vec<_> = runs.into_iter().filter(|run| run.goes_on).collect();
    loop {
        thread::sleep(Duration::from_millis(500));
        for run in &mut going {
            run.go_on()?;
        }
    }
}
