//! `kiln tune`: finds the fastest way to run a configuration on the available ranks, by trying.

use std::fmt::Write as _;
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

use clap::Args;
use kiln_model::{Decoder, Key};
use serde::Serialize;

use super::check_counts;
use super::rounds::{Rounds, StrategyRow, prepare};
use super::ways::{Tried, Way};
use kiln_config::device;
use kiln_config::{self as config, Config};
use kiln_launch::place::{self, Role};
use kiln_plan::MARGIN;
use kiln_sys::words::number_of;
use kiln_train::error::{Result, TrainError};
use kiln_train::launch;
use kiln_train::metrics::write_new_beside;
use kiln_train::named;
use kiln_train::process::output::print_line;
use kiln_train::registry::Registry;
use kiln_train::run;
use kiln_train::world::{self, Ranks};

const WRITTEN: &str = "# Written by `kiln tune";

/// Converts the `percent` of `--margin` to a share from 0 to 1.
///
/// # Errors
///
/// If `percent` is not in 0..100.
pub fn share_of_percent(percent: f64) -> Result<f64> {
    match (0.0..100.0).contains(&percent) {
        true => Ok(percent / 100.0),
        false => Err(TrainError::usage("--margin must be at least 0 and below 100 percent")),
    }
}

/// Arguments of `kiln tune`.
#[derive(Args)]
pub struct TuneArgs {
    /// Configuration file.
    config: PathBuf,
    /// File for the fastest configuration [default: CONFIG with the ending .tuned.toml].
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
    /// Overwrite that file.
    #[arg(long)]
    force: bool,
    /// Number of ranks, as threads of this process [default: train.ranks]; not needed under a launcher, which starts
    /// them as processes.
    #[arg(long)]
    ranks: Option<usize>,
    /// Maximum number of ways to try: that of the configuration, and those that the plan expects to be fastest.
    #[arg(long, value_name = "N", default_value_t = 6)]
    candidates: usize,
    /// Steps measured per way and round.
    #[arg(long, default_value_t = 3)]
    steps: usize,
    /// Rounds; the ways alternate, and medians are shown.
    #[arg(long, default_value_t = 3)]
    rounds: usize,
    /// Percent of the free memory that the largest micro-batches leave free.
    #[arg(long, value_name = "PERCENT", default_value_t = 100.0 * MARGIN)]
    margin: f64,
    /// Override a configuration value; may be repeated.
    #[arg(long = "set", value_name = "SECTION.KEY=VALUE")]
    overrides: Vec<String>,
    /// Print JSON instead of a table.
    #[arg(long)]
    json: bool,
}

#[derive(Serialize)]
struct TuneRow {
    #[serde(flatten)]
    way: Way,
    peak_bytes: u64,
    tokens_per_s: f64,
    relative_speed: f64,
    chosen: bool,
}

#[derive(Serialize)]
struct TuneReport {
    parameters: usize,
    ranks: usize,
    global_batch: usize,
    seq_len: usize,
    rows: Vec<TuneRow>,
    out: PathBuf,
    changes: Vec<String>,
    removed: Vec<&'static str>,
}

impl TuneArgs {
    /// Tunes the configuration as one rank, or launches the ranks of this node. Returns the exit code.
    pub fn run(self, registry: &Registry) -> Result<u8> {
        let place = match place::find_here(&place::Flags::default())? {
            Role::Node(node) => return Ok(launch::run_node(node)?),
            Role::Rank(place) => Some(place),
            Role::Alone(_) => None,
        };
        let place = place.as_ref();
        check_counts(&[
            ("--steps", self.steps),
            ("--rounds", self.rounds),
            ("--candidates", self.candidates),
        ])?;
        let out = self.out.clone().unwrap_or_else(|| self.config.with_extension("tuned.toml"));
        // Only rank 0 writes the file; the machines of other ranks may lack its folder.
        if place.is_none_or(|place| place.rank == 0) {
            self.check_out(&out)?;
        }
        let asked = config::load(&self.config, &self.overrides)?;
        let (config, model, selected) = prepare(asked.clone(), self.ranks, registry, place)?;
        let TuneArgs { candidates, steps, rounds, margin, .. } = self;
        let told =
            format!("{} tune {candidates} {steps} {rounds} {margin} {config:?}", env!("CARGO_PKG_VERSION"));
        let ranks = Ranks::meet(&config, place, &told, &selected)?;
        let tried = Tried {
            config: &config,
            model: &model,
            registry,
            selected: &selected,
            place,
            margin: share_of_percent(margin)?,
        };
        let mut ways = agreed(tried.ways()?, &config, &ranks)?;
        ways.truncate(candidates);
        if ways.is_empty() {
            return Err(self.nothing_fits(&tried));
        }
        let measured = Rounds { model: &model, registry, selected: &selected, ranks: &ranks, steps };
        let configs: Vec<_> = ways.iter().map(|way| way.apply(&config)).collect();
        let rows = chosen_of(&ways, &measured.measure(&configs, rounds)?);
        if place.is_some_and(|place| place.rank != 0) {
            return Ok(0);
        }
        let (mut changes, mut removed) = (Vec::new(), Vec::new());
        if let Some(row) = rows.iter().find(|row| row.chosen) {
            (changes, removed) = difference(&config, &row.way);
        }
        if place.is_none() && config.train.ranks != asked.train.ranks {
            changes.push(format!("train.ranks={}", config.train.ranks));
        }
        let report = TuneReport {
            parameters: Decoder::count_parameters(registry.layers(), &model)?,
            ranks: config.train.ranks,
            global_batch: config.train.global_batch,
            seq_len: config.data.seq_len,
            rows,
            out,
            changes,
            removed,
        };
        let table = report.to_text();
        if let Err(error) = self.write(&report, &format!("{table}{}", selected.describe())) {
            print_line(&table);
            return Err(error);
        }
        print_line(&if self.json { report.to_json() } else { table + &report.conclusion() });
        Ok(0)
    }

    fn check_out(&self, out: &Path) -> Result<()> {
        let path = out.display();
        if !self.force && out.symlink_metadata().is_ok() {
            return Err(TrainError::Exists(out.to_owned()));
        }
        let folder = out.parent().filter(|folder| !folder.as_os_str().is_empty());
        match folder.filter(|folder| !folder.is_dir()) {
            Some(folder) => Err(TrainError::usage(format!(
                "{path} cannot be written: there is no folder {}; create it, or name another file with --out",
                folder.display()
            ))),
            None => Ok(()),
        }
    }

    /// Returns the memory error of a run of this configuration, if there is one, or else a general error.
    fn nothing_fits(&self, tried: &Tried<'_>) -> TrainError {
        let Tried { config, model, registry, selected, place, .. } = *tried;
        let refused = || -> Result<()> {
            let decoder = Decoder::new(registry.layers(), model, Key::new(0), &device::plain())?;
            let optimizer = registry.optimizers().make(&config.optim)?;
            Ok(run::check_memory(config, model, &decoder, &optimizer, selected, place)?)
        };
        refused().err().unwrap_or_else(|| {
            TrainError::usage(format!(
                "no way to run {} fits into the memory that is free on all ranks: `kiln plan` shows how much each needs",
                self.config.display()
            ))
        })
    }

    fn write(&self, report: &TuneReport, table: &str) -> Result<()> {
        let TuneReport { out, changes, removed, .. } = report;
        let is_kept = |setting: &&String| {
            !removed.iter().any(|key| setting.split('=').next().is_some_and(|name| name.trim() == *key))
        };
        let settings: Vec<_> = self.overrides.iter().filter(is_kept).chain(changes).cloned().collect();
        let text = config::rewritten(&self.config, &settings, removed)?;
        let text = match text.starts_with(WRITTEN) {
            true => without_comment(&text),
            false => &text,
        };
        let mut comment = format!("{WRITTEN} {}`: the fastest of these ways.\n#\n", self.config.display());
        for line in table.lines() {
            comment += format!("# {line}").trim_end();
            comment.push('\n');
        }
        let text = format!("{comment}\n{text}");
        if self.force {
            return named::write(out, text.as_bytes(), "configuration", |_| true);
        }
        write_new_beside(out, text.as_bytes()).map_err(|error| match error.kind() {
            ErrorKind::AlreadyExists => TrainError::Exists(out.clone()),
            _ => TrainError::io("write", out)(error),
        })
    }
}

fn without_comment(text: &str) -> &str {
    let comment: usize =
        text.split_inclusive('\n').take_while(|line| line.starts_with('#')).map(str::len).sum();
    let rest = &text[comment..];
    rest.strip_prefix('\n').unwrap_or(rest)
}

/// Returns the ways in `mine` that fit on every rank, in the order of rank 0. Collective.
fn agreed(mine: Vec<Way>, config: &Config, ranks: &Ranks<'_>) -> Result<Vec<Way>> {
    let unreadable = |error: serde_json::Error| TrainError::usage(format!("the ways to try: {error}"));
    let told = serde_json::to_vec(&mine).map_err(unreadable)?;
    ranks.run(config, |world| {
        let told = world::gather(&*world, "ways to try", &told, config.comm.timeout())?;
        let lists: Result<Vec<Vec<Way>>, _> = told.iter().map(|told| serde_json::from_slice(told)).collect();
        let mut lists = lists.map_err(unreadable)?;
        let mut ways = lists.swap_remove(0);
        ways.retain(|way| lists.iter().all(|list| list.iter().any(|other| other.is_same(way))));
        Ok(ways)
    })
}

fn chosen_of(ways: &[Way], measured: &[StrategyRow]) -> Vec<TuneRow> {
    let fastest = measured.iter().map(|row| row.relative_speed).fold(0.0, f64::max);
    let chosen = measured.iter().position(|row| row.relative_speed >= fastest);
    let rows = ways.iter().zip(measured).enumerate().map(|(index, (way, row))| TuneRow {
        way: way.clone(),
        peak_bytes: row.peak_bytes,
        tokens_per_s: row.tokens_per_s,
        relative_speed: row.relative_speed,
        chosen: chosen == Some(index),
    });
    rows.collect()
}

fn difference(config: &Config, way: &Way) -> (Vec<String>, Vec<&'static str>) {
    let tuned = way.apply(config);
    let mut changes = Vec::new();
    let mut change = |key: &str, before: String, after: String| {
        if before != after {
            changes.push(format!("{key}={after}"));
        }
    };
    let (before, after) = (&config.shard, &tuned.shard);
    change("shard.strategy", before.strategy.to_string(), after.strategy.to_string());
    change("shard.recompute", before.recompute().to_string(), after.recompute().to_string());
    change("shard.offload", before.offload.to_string(), after.offload.to_string());
    change("train.micro_batch", config.micro_batch().to_string(), tuned.micro_batch().to_string());
    let removed = before.shard_size.is_some() && after.shard_size.is_none();
    (changes, if removed { vec!["shard.shard_size"] } else { Vec::new() })
}

impl TuneReport {
    fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).unwrap_or_default()
    }

    fn to_text(&self) -> String {
        let mut text = format!(
            "{:.2}M parameters, {}, {} x {} per step; MB of a rank\n\n  {:<21} {:<9} {:<7} {:>5} {:>11} {:>11} \
             {:>9} {:>9}\n",
            self.parameters as f64 / 1e6,
            number_of(self.ranks, "rank"),
            number_of(self.global_batch, "sequence"),
            number_of(self.seq_len, "token"),
            "strategy",
            "recompute",
            "offload",
            "micro",
            "planned MB",
            "measured MB",
            "tok/s",
            "relative",
        );
        for row in &self.rows {
            let way = &row.way;
            let _ = writeln!(
                text,
                "{} {:<21} {:<9} {:<7} {:>5} {:>11.1} {:>11.1} {:>9.0} {:>8.2}x{}",
                if row.chosen { "*" } else { " " },
                way.strategy.to_string(),
                way.recompute.to_string(),
                if way.offload { "host" } else { "-" },
                way.micro_batch,
                way.planned_peak_bytes as f64 / 1e6,
                row.peak_bytes as f64 / 1e6,
                row.tokens_per_s,
                row.relative_speed,
                if way.configured { "  as configured" } else { "" },
            );
        }
        text + "\nrelative: tok/s divided by that of the first line in the same round, median of the rounds\n"
    }

    fn conclusion(&self) -> String {
        let mut text = format!("\nwritten to {}", self.out.display());
        if self.changes.is_empty() && self.removed.is_empty() {
            text += ": no change makes the configuration faster";
        }
        for change in &self.changes {
            text += &format!("\n  --set {change}");
        }
        for key in &self.removed {
            text += &format!("\n  without {key}");
        }
        text
    }
}

#[cfg(test)]
mod tests {
    use super::without_comment;

    #[test]
    fn only_the_comment_is_removed() {
        for (text, rest) in [
            ("# Written\n#\n# a\n\n# Mine.\n[model]\n\nx = 1\n", "# Mine.\n[model]\n\nx = 1\n"),
            ("# Written\n[model]\nx = 1\n\n[data]\n", "[model]\nx = 1\n\n[data]\n"),
            ("# Written", ""),
        ] {
            assert_eq!(without_comment(text), rest);
        }
    }
}
