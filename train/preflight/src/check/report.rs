//! The results of checks, and how they are printed.

use std::fmt::{Display, Write as _};

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use kiln_config::ConfigError;
use kiln_sys::words::{in_ranges, number_of};
use kiln_train::error::TrainError;

/// A part of `kiln check`, in the order in which they come.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Configuration, place, ports, device, memory, run folder.
    Env,
    /// The prepared data.
    Data,
    /// Tokenizer, model, optimizer, the checkpoint to start from, the memory of all that.
    Model,
    /// Other processes: arguments, clocks, files, folders, links.
    Comm,
    /// A shrunk step of the model.
    Step,
    /// Room on the disk; a save, and a load of it.
    Save,
}

impl Stage {
    /// Its name on the command line.
    pub(super) fn name(self) -> &'static str {
        match self {
            Stage::Env => "env",
            Stage::Data => "data",
            Stage::Model => "model",
            Stage::Comm => "comm",
            Stage::Step => "step",
            Stage::Save => "save",
        }
    }
}

/// The level of a result.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(super) enum Level {
    /// No problem.
    Ok,
    /// The run would start, with a problem the user should know about.
    Warn,
    /// The run would not start, or would not work as configured.
    Fail,
}

/// The result of one check.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Check {
    pub(super) stage: Stage,
    /// The subject of the check, in one or two words.
    pub(super) what: String,
    pub(super) level: Level,
    /// The findings.
    pub(super) detail: String,
    /// The fix.
    pub(super) mend: Option<String>,
}

/// Results of one rank, or of all ranks of a process.
#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(super) struct Checks(pub(super) Vec<Check>);

impl Checks {
    fn add(&mut self, stage: Stage, what: &str, level: Level, detail: String, mend: Option<String>) {
        self.0.push(Check { stage, what: what.to_owned(), level, detail, mend });
    }

    pub(super) fn ok(&mut self, stage: Stage, what: &str, detail: impl Into<String>) {
        self.add(stage, what, Level::Ok, detail.into(), None);
    }

    pub(super) fn warn(
        &mut self,
        stage: Stage,
        what: &str,
        detail: impl Into<String>,
        mend: impl Into<String>,
    ) {
        self.add(stage, what, Level::Warn, detail.into(), Some(mend.into()));
    }

    pub(super) fn fail(
        &mut self,
        stage: Stage,
        what: &str,
        detail: impl Into<String>,
        mend: impl Into<String>,
    ) {
        self.add(stage, what, Level::Fail, detail.into(), Some(mend.into()));
    }

    /// Records a check that is skipped because `needed`, which has failed, must be fixed first.
    pub(super) fn skip(&mut self, stage: Stage, needed: &str) {
        self.add(stage, "skipped", Level::Warn, format!("skipped: needs {needed}"), None);
    }

    /// Records an error of Kiln, whose text includes the fix.
    pub(super) fn failed(&mut self, stage: Stage, what: &str, error: impl Display) {
        let (detail, mend) = split(&error.to_string());
        self.add(stage, what, Level::Fail, detail, mend);
    }

    /// Records a warning of Kiln, whose text includes the fix.
    pub(super) fn warned(&mut self, stage: Stage, what: &str, warning: impl Display) {
        let (detail, mend) = split(&warning.to_string());
        self.add(stage, what, Level::Warn, detail, mend);
    }

    /// Records an error of a configuration, with one entry per problem.
    pub(super) fn failed_config(&mut self, stage: Stage, what: &str, error: &TrainError) {
        match error {
            TrainError::Config(ConfigError::Invalid { problems }) => {
                problems.iter().for_each(|problem| self.failed(stage, what, problem));
            }
            error => self.failed(stage, what, error),
        }
    }

    /// Returns the value of `result`, or records its error as a failure.
    pub(super) fn take<T, E: Into<TrainError>>(
        &mut self,
        stage: Stage,
        what: &str,
        result: Result<T, E>,
    ) -> Option<T> {
        result.map_err(|error| self.failed_config(stage, what, &error.into())).ok()
    }

    pub(super) fn has_failed(&self, stage: Stage) -> bool {
        self.0.iter().any(|check| check.is_failure(stage, None))
    }
}

/// Words that begin a piece of advice.
const ADVICE: [&str; 32] = [
    "allow", "build", "check", "choose", "copy", "create", "describe", "end", "export", "free", "give", "go",
    "install", "leave", "lower", "make", "name", "or", "prepare", "put", "raise", "remove", "run", "set",
    "start", "take", "to", "unset", "update", "use", "what", "write",
];

/// Splits an error message into the problem and the advice, if it can be split.
fn split(message: &str) -> (String, Option<String>) {
    let begins_with_advice = |rest: &str| {
        let word: String = rest.chars().take_while(|c| c.is_alphabetic()).collect();
        ADVICE.contains(&word.to_lowercase().as_str())
    };
    let ends = ["; ", ": ", ". ", "\n"].into_iter().flat_map(|end| message.match_indices(end));
    let first =
        ends.filter(|(at, end)| begins_with_advice(&message[at + end.len()..])).min_by_key(|(at, _)| *at);
    match first {
        Some((at, end)) => (message[..at].to_owned(), Some(message[at + end.len()..].to_owned())),
        None => (message.to_owned(), None),
    }
}

impl Check {
    /// Returns `true` if it is a failure in this stage, and of `what` if given.
    fn is_failure(&self, stage: Stage, what: Option<&str>) -> bool {
        self.stage == stage && self.level == Level::Fail && what.is_none_or(|what| self.what == what)
    }
}

/// One line of the table: a result that some ranks share.
struct Row<'a> {
    check: &'a Check,
    ranks: Vec<usize>,
}

/// Results of all ranks, in the order of the stages.
pub(super) struct Report {
    /// For each process, its first rank and its results.
    pub(super) ranks: Vec<(usize, Checks)>,
    /// Set if ranks are processes, so that lines name them.
    pub(super) processes: bool,
}

impl Report {
    /// Keeps the results of the stages that `wanted` selects, and all failures.
    pub(super) fn keep(&mut self, wanted: impl Fn(Stage) -> bool) {
        for (_, checks) in &mut self.ranks {
            checks.0.retain(|check| wanted(check.stage) || check.level == Level::Fail);
        }
    }

    /// Returns `true` if a check in `stage` has failed on any rank; only the check `what`, if given.
    pub(super) fn has_failed(&self, stage: Stage, what: Option<&str>) -> bool {
        self.ranks.iter().flat_map(|(_, checks)| &checks.0).any(|check| check.is_failure(stage, what))
    }

    fn rows(&self) -> Vec<Row<'_>> {
        let mut rows: Vec<Row<'_>> = Vec::new();
        for (rank, checks) in &self.ranks {
            for check in &checks.0 {
                match rows.iter_mut().find(|row| row.check == check) {
                    Some(row) if row.ranks.last() == Some(rank) => {}
                    Some(row) => row.ranks.push(*rank),
                    None => rows.push(Row { check, ranks: vec![*rank] }),
                }
            }
        }
        // Results of the same kind stay together, in order of first appearance.
        let order: Vec<_> = rows.iter().map(|row| (row.check.stage, row.check.what.clone())).collect();
        let first = |row: &Row<'_>| {
            order.iter().position(|(stage, what)| (*stage, what) == (row.check.stage, &row.check.what))
        };
        rows.sort_by_key(|row| (row.check.stage, first(row), row.ranks[0]));
        rows
    }

    /// Number of lines of the table that are failures.
    pub(super) fn failures(&self) -> usize {
        self.rows().iter().filter(|row| row.check.level == Level::Fail).count()
    }

    /// The table. `seconds` is the duration of all checks.
    pub(super) fn to_text(&self, seconds: f64) -> String {
        let rows = self.rows();
        let whose = |row: &Row<'_>| if self.processes { named(&row.ranks) } else { String::new() };
        let wide = |cells: &mut dyn Iterator<Item = usize>| cells.max().unwrap_or(0);
        let what = wide(&mut rows.iter().map(|row| row.check.what.len()));
        let who = wide(&mut rows.iter().map(|row| whose(row).len()));
        let gap = if who > 0 { 2 } else { 0 };
        let mut text = String::new();
        for row in &rows {
            let Check { stage, level, detail, mend, .. } = row.check;
            let level = match level {
                Level::Ok => "ok",
                Level::Warn => "warn",
                Level::Fail => "fail",
            };
            let head = format!(
                "{level:<4}  {:<5}  {:<what$}  {:<who$}{:gap$}",
                stage.name(),
                row.check.what,
                whose(row),
                ""
            );
            let indent = " ".repeat(head.len());
            // Writing to a `String` cannot fail.
            let _ = writeln!(text, "{head}{}", detail.trim_end().replace('\n', &format!("\n{indent}")));
            if let Some(mend) = mend {
                let _ =
                    writeln!(text, "{indent}-> {}", mend.trim_end().replace('\n', &format!("\n{indent}   ")));
            }
        }
        let count = |level| rows.iter().filter(|row| row.check.level == level).count();
        let _ = write!(
            text,
            "{} ok, {}, {}; {seconds:.1} s",
            count(Level::Ok),
            number_of(count(Level::Warn), "warning"),
            number_of(count(Level::Fail), "failure")
        );
        text
    }
}

/// Ranks as text, such as `ranks 0-3, 7`.
fn named(ranks: &[usize]) -> String {
    let plural = if ranks.len() == 1 { "" } else { "s" };
    format!("rank{plural} {}", in_ranges(ranks))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_told_apart() {
        for (message, detail, mend) in [
            (
                "a is 1, but b is 2: raise b to 3: it fits then",
                "a is 1, but b is 2",
                Some("raise b to 3: it fits then"),
            ),
            (
                "x / 2 leaves 1: 7 / 2 = 3.5; use a multiple of 2",
                "x / 2 leaves 1: 7 / 2 = 3.5",
                Some("use a multiple of 2"),
            ),
            ("no driver. Set device.backend", "no driver", Some("Set device.backend")),
            ("users: setting this", "users: setting this", None),
        ] {
            assert_eq!(split(message), (detail.to_owned(), mend.map(str::to_owned)), "{message}");
        }
    }

    #[test]
    fn equal_answers_of_ranks_are_one_line() {
        let checks = |clock: &str| {
            let mut checks = Checks::default();
            checks.ok(Stage::Comm, "clock", clock);
            checks.fail(Stage::Env, "port", "it is taken", "choose another");
            checks
        };
        let ranks = ["a", "a", "b", "a"].map(checks).into_iter().enumerate().collect();
        let mut report = Report { ranks, processes: true };
        assert_eq!(
            report.to_text(1.25),
            "fail  env    port   ranks 0-3     it is taken\n\
             \x20                                 -> choose another\n\
             ok    comm   clock  ranks 0-1, 3  a\n\
             ok    comm   clock  rank 2        b\n\
             2 ok, 0 warnings, 1 failure; 1.2 s"
        );
        // Failures are always kept.
        report.keep(|stage| stage == Stage::Step);
        assert_eq!((report.rows().len(), report.failures()), (1, 1));
    }
}
