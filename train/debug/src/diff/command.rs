//! `kiln diff`.

use std::path::PathBuf;

use clap::Args;

use super::compare;
use super::keys;
use super::report::Report;
use super::subject::{Subject, SubjectKind};
use super::trial;
use crate::error::{DebugError, Result};
use kiln_config::{Config, load};
use kiln_train::process::output::{eprint_line, print_line};
use kiln_train::registry::Registry;

/// Arguments of `kiln diff`.
#[derive(Args)]
pub struct DiffArgs {
    /// Run folder, checkpoint, Hugging Face folder, prepared data, configuration, or metrics or hashes of a run.
    a: PathBuf,
    /// Path to compare with the first.
    b: PathBuf,
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
    /// Exit with code 0 if no relative difference is larger than this.
    #[arg(long, value_name = "RELATIVE")]
    tolerance: Option<f64>,
    #[command(flatten)]
    live: Live,
}

/// Two configurations side by side.
#[derive(Args)]
struct Live {
    /// Train both configurations for a few steps, and compare every tensor.
    #[arg(long)]
    live: bool,
    /// Maximum number of steps to train.
    #[arg(long, default_value_t = 4, requires = "live", value_parser = clap::value_parser!(u64).range(1..))]
    steps: u64,
    /// Number of ranks of the first, as threads of this process [default: train.ranks].
    #[arg(long, value_name = "RANKS", requires = "live")]
    ranks_a: Option<usize>,
    /// Number of ranks of the second.
    #[arg(long, value_name = "RANKS", requires = "live")]
    ranks_b: Option<usize>,
    /// Override a value of the first configuration; may be repeated.
    #[arg(long, value_name = "SECTION.KEY=VALUE", requires = "live")]
    set_a: Vec<String>,
    /// Override a value of the second configuration; may be repeated.
    #[arg(long, value_name = "SECTION.KEY=VALUE", requires = "live")]
    set_b: Vec<String>,
}

impl DiffArgs {
    /// Compares the two subjects and prints the result. Returns the exit code.
    pub fn run(self, registry: &Registry) -> Result<u8> {
        if self.tolerance.is_some_and(|tolerance| !(0.0..=1.0).contains(&tolerance)) {
            return Err(DebugError::usage(
                "--tolerance: expected a relative difference from 0 to 1, such as 1e-5",
            ));
        }
        let subjects = (Subject::find(&self.a)?, Subject::find(&self.b)?);
        let report = match self.live.live {
            true => self.live.run(&subjects.0, &subjects.1, registry)?,
            false => compare::subjects(&subjects.0, &subjects.1)?,
        };
        print_line(&if self.json { report.to_json() } else { report.to_text() });
        Ok(report.exit_code(self.tolerance))
    }
}

impl Live {
    fn run(&self, a: &Subject, b: &Subject, registry: &Registry) -> Result<Report> {
        let Live { steps, ranks_a, ranks_b, set_a, set_b, .. } = self;
        let (config_a, config_b) = (config_of(a, set_a, *ranks_a)?, config_of(b, set_b, *ranks_b)?);
        let keys = keys::differences(&config_a, &config_b);
        let name = |config: &Config, subject: &Subject, set: &[String]| {
            let mut name = format!("{} on {}", subject.path.display(), ranks(config));
            set.iter().for_each(|set| name += &format!(", {set}"));
            name
        };
        let names = [name(&config_a, a, set_a), name(&config_b, b, set_b)];
        eprint_line(&format!("training {} for {steps} steps", names[0]));
        let first = trial::run(&config_a, registry, *steps, None)?;
        eprint_line(&format!("training {} until the two diverge", names[1]));
        let expected = keys::expected(&config_a, &config_b, &keys);
        let second = trial::run(&config_b, registry, *steps, Some((&first, expected)))?;
        Ok(compare::steps(names, &first, &second, keys, expected))
    }
}

fn ranks(config: &Config) -> String {
    kiln_sys::words::number_of(config.train.ranks as u64, "rank")
}

/// Returns the configuration of `subject` with `overrides`, for ranks that are threads.
pub fn config_of(subject: &Subject, overrides: &[String], ranks: Option<usize>) -> Result<Config> {
    let path = subject.config().ok_or_else(|| {
        DebugError::usage(format!("{}, which has no configuration to train", subject.describe()))
    })?;
    let mut config = load(&path, overrides)?;
    config.train.ranks = ranks.unwrap_or(config.train.ranks);
    if subject.kind != SubjectKind::Config && config.comm.backend != Default::default() {
        config.comm.backend = Default::default();
    }
    Ok(config)
}
