//! The command `kiln watch`, and the page that a run serves.

use std::env;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::thread;
use std::time::Duration;

use clap::Args;
use kiln_observe::ask;
use kiln_observe::page::{self, AccessToken, PageError, ServeOptions, Tell, TimelinesAt};
use kiln_observe::watch::{self, WatchOptions};

use crate::commands::status::look_at_runs;
use crate::error::{CommandError, Result};
use kiln_train::metrics::print_line;
use kiln_train::process::stop_on_signals;

/// Environment variable with the token that clients of a page must send, if the user chooses one.
const TOKEN: &str = "KILN_HTTP_TOKEN";

/// Environment variable with further names by which clients may address this machine, separated by commas.
const NAMES: &str = "KILN_HTTP_NAMES";

const LOOK: Duration = Duration::from_millis(100);

/// Arguments of `kiln watch`.
#[derive(Args, Clone, Debug)]
pub struct WatchArgs {
    /// Run folders, or folders of run folders. Runs that start later appear when they exist.
    #[arg(required = true, value_name = "RUN")]
    runs: Vec<PathBuf>,
    /// Serve a web page, with /metrics for Prometheus, instead of the terminal view. Addresses that other machines can
    /// reach require a token: KILN_HTTP_TOKEN, or a random one that is printed.
    #[arg(
        long,
        value_name = "ADDRESS:PORT|PORT",
        num_args = 0..=1,
        default_missing_value = "6006",
        value_parser = kiln_config::http_address
    )]
    http: Option<SocketAddr>,
    /// Let the page save checkpoints and end runs. It then requires a token at every address.
    #[arg(long, requires = "http")]
    control: bool,
}

impl WatchArgs {
    /// Shows the runs until the user quits.
    pub fn run(self) -> Result<()> {
        let Some(address) = self.http else {
            let options = WatchOptions::new(self.runs, look_at_runs());
            return watch::run(options).map_err(|error| CommandError::usage(error.to_string()));
        };
        let stop = stop_on_signals();
        let server = serve(address, self.runs, self.control)
            .map_err(|error| CommandError::usage(error.to_string()))?;
        print_line(&format!("serving {} until Ctrl-C", server.url()));
        while !stop.load(Ordering::Relaxed) {
            thread::sleep(LOOK);
        }
        server.stop();
        Ok(())
    }
}

/// Serves the page of the runs in `paths` at `address`; with `control`, it accepts commands to the runs. Requires a
/// token if other machines can reach the page, if it accepts commands, or if the user chose a token.
pub(crate) fn serve(
    address: SocketAddr,
    paths: Vec<PathBuf>,
    control: bool,
) -> Result<page::Server, PageError> {
    let chosen = env::var(TOKEN).ok().filter(|token| !token.is_empty());
    let token = match chosen {
        Some(token) => Some(AccessToken::new(token)?),
        None if address.ip().is_loopback() && !control => None,
        None => Some(AccessToken::random()?),
    };
    let names = env::var(NAMES).unwrap_or_default();
    let names = names.split(',').map(str::trim).filter(|name| !name.is_empty()).map(str::to_owned).collect();
    let look_at = look_at_runs();
    let timelines_at = Some(timelines_at_runs());
    let tell: Option<Tell> = control.then(|| {
        Arc::new(|out: &Path, line: &str| ask::send_command(out, line).map_err(|error| error.to_string()))
            as Tell
    });
    page::serve(ServeOptions { address, paths, token, names, look_at, timelines_at, tell })
}

/// Returns a function that reads the last step of a run's ranks, for the page.
pub(crate) fn timelines_at_runs() -> TimelinesAt {
    Arc::new(|out| ask::timelines(out).map_err(|error| error.to_string()))
}
