//! The findings of `kiln check` and `kiln doctor`, and the table that shows them.

use std::fmt::Display;

use clap::ValueEnum;
use serde::{Deserialize, Serialize};

use kiln_config::ConfigError;
use kiln_sys::words::{in_ranges, number_of};
use kiln_train::error::TrainError;

/// A part of `kiln check`, in order of execution.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize, ValueEnum)]
#[serde(rename_all = "snake_case")]
pub enum Stage {
    /// Configuration, machine, ports, device, memory, run folder.
    Env,
    /// The prepared data.
    Data,
    /// Tokenizer, model, optimizer, initial checkpoint, and the memory for them.
    Model,
    /// Other processes: arguments, clocks, files, folders, links.
    Comm,
    /// A shrunk step of the model.
    Step,
    /// Free disk space; a checkpoint that is saved and loaded.
    Save,
}

impl Stage {
    pub(crate) fn name(self) -> &'static str {
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

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub(crate) enum Level {
    Ok,
    Warn,
    Fail,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Finding {
    pub(crate) stage: Stage,
    pub(crate) subject: String,
    pub(crate) level: Level,
    pub(crate) detail: String,
    pub(crate) fix: Option<String>,
}

#[derive(Clone, Debug, Default, Serialize, Deserialize)]
pub(crate) struct Findings(pub(crate) Vec<Finding>);

impl Findings {
    fn add(&mut self, stage: Stage, subject: &str, level: Level, detail: String, fix: Option<String>) {
        self.0.push(Finding { stage, subject: subject.to_owned(), level, detail, fix });
    }

    pub(crate) fn ok(&mut self, stage: Stage, subject: &str, detail: impl Into<String>) {
        self.add(stage, subject, Level::Ok, detail.into(), None);
    }

    pub(crate) fn warn(
        &mut self,
        stage: Stage,
        subject: &str,
        detail: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.add(stage, subject, Level::Warn, detail.into(), Some(fix.into()));
    }

    pub(crate) fn fail(
        &mut self,
        stage: Stage,
        subject: &str,
        detail: impl Into<String>,
        fix: impl Into<String>,
    ) {
        self.add(stage, subject, Level::Fail, detail.into(), Some(fix.into()));
    }

    pub(crate) fn skip(&mut self, stage: Stage, needed: &str) {
        self.add(stage, "skipped", Level::Warn, format!("skipped: needs {needed}"), None);
    }

    /// Records an error of Kiln, whose text includes the fix.
    pub(crate) fn failed(&mut self, stage: Stage, subject: &str, error: impl Display) {
        let (detail, fix) = split(&error.to_string());
        self.add(stage, subject, Level::Fail, detail, fix);
    }

    pub(crate) fn warned(&mut self, stage: Stage, subject: &str, warning: impl Display) {
        let (detail, fix) = split(&warning.to_string());
        self.add(stage, subject, Level::Warn, detail, fix);
    }

    /// Returns the value of `result`, or records a failure for each problem of its error.
    pub(crate) fn take<T, E: Into<TrainError>>(
        &mut self,
        stage: Stage,
        subject: &str,
        result: Result<T, E>,
    ) -> Option<T> {
        match result.map_err(Into::into) {
            Ok(value) => return Some(value),
            Err(TrainError::Config(ConfigError::Invalid { problems })) => {
                problems.iter().for_each(|problem| self.failed(stage, subject, problem));
            }
            Err(error) => self.failed(stage, subject, error),
        }
        None
    }

    pub(crate) fn has_failed(&self, stage: Stage) -> bool {
        self.0.iter().any(|finding| finding.is_failure(stage, None))
    }
}

const ADVICE: [&str; 41] = [
    "add", "allow", "build", "check", "choose", "continue", "copy", "create", "describe", "end", "export",
    "free", "give", "go", "increase", "install", "leave", "lower", "make", "name", "omit", "or", "pass",
    "prepare", "put", "raise", "reduce", "remove", "restart", "resume", "run", "set", "start", "take", "to",
    "unset", "update", "use", "wait", "what", "write",
];

/// Splits an error message into the problem and the advice, if it can be split.
fn split(message: &str) -> (String, Option<String>) {
    let begins_with_advice = |(at, end): &(usize, &str)| {
        let word: String = message[at + end.len()..].chars().take_while(|c| c.is_alphabetic()).collect();
        // A capital letter begins a sentence, or else a message of the system.
        let is_sentence = matches!(*end, ". " | "\n");
        ADVICE.contains(&if is_sentence { word.to_lowercase() } else { word }.as_str())
    };
    let ends = ["; ", ": ", ". ", "\n"].into_iter().flat_map(|end| message.match_indices(end));
    match ends.filter(begins_with_advice).min_by_key(|(at, _)| *at) {
        Some((at, end)) => (message[..at].to_owned(), Some(message[at + end.len()..].to_owned())),
        None => (message.to_owned(), None),
    }
}

impl Finding {
    fn is_failure(&self, stage: Stage, subject: Option<&str>) -> bool {
        self.stage == stage
            && self.level == Level::Fail
            && subject.is_none_or(|subject| self.subject == subject)
    }
}

struct Row<'a> {
    finding: &'a Finding,
    ranks: Vec<usize>,
}

pub(crate) struct Report {
    pub(crate) ranks: Vec<(usize, Findings)>,
    pub(crate) processes: bool,
}

impl Report {
    pub(crate) fn keep(&mut self, wanted: impl Fn(Stage) -> bool) {
        for (_, findings) in &mut self.ranks {
            findings.0.retain(|finding| wanted(finding.stage) || finding.level == Level::Fail);
        }
    }

    pub(crate) fn has_failed(&self, stage: Stage, subject: Option<&str>) -> bool {
        self.ranks.iter().flat_map(|(_, findings)| &findings.0).any(|found| found.is_failure(stage, subject))
    }

    fn rows(&self) -> Vec<Row<'_>> {
        let mut rows: Vec<Row<'_>> = Vec::new();
        for (rank, findings) in &self.ranks {
            for finding in &findings.0 {
                match rows.iter_mut().find(|row| row.finding == finding) {
                    Some(row) if row.ranks.last() == Some(rank) => {}
                    Some(row) => row.ranks.push(*rank),
                    None => rows.push(Row { finding, ranks: vec![*rank] }),
                }
            }
        }
        // Findings about the same subject stay together, in order of first appearance.
        let order: Vec<_> = rows.iter().map(|row| (row.finding.stage, &row.finding.subject)).collect();
        let first = |row: &Row<'_>| {
            order.iter().position(|place| *place == (row.finding.stage, &row.finding.subject))
        };
        rows.sort_by_key(|row| (row.finding.stage, first(row), row.ranks[0]));
        rows
    }

    pub(crate) fn failures(&self) -> usize {
        self.rows().iter().filter(|row| row.finding.level == Level::Fail).count()
    }

    pub(crate) fn to_text(&self, seconds: f64) -> String {
        let rows = self.rows();
        let ranks_of = |row: &Row<'_>| match (self.processes, &row.ranks[..]) {
            (false, _) => String::new(),
            (true, [rank]) => format!("rank {rank}"),
            (true, ranks) => format!("ranks {}", in_ranges(ranks)),
        };
        let wide = |cells: &mut dyn Iterator<Item = usize>| cells.max().unwrap_or(0);
        let subjects = wide(&mut rows.iter().map(|row| row.finding.subject.len()));
        let ranks = wide(&mut rows.iter().map(|row| ranks_of(row).len()));
        let gap = if ranks > 0 { 2 } else { 0 };
        let mut text = String::new();
        for row in &rows {
            let Finding { stage, subject, level, detail, fix } = row.finding;
            let level = match level {
                Level::Ok => "ok",
                Level::Warn => "warn",
                Level::Fail => "fail",
            };
            let stage = stage.name();
            let head =
                format!("{level:<4}  {stage:<5}  {subject:<subjects$}  {:<ranks$}{:gap$}", ranks_of(row), "");
            let indent = " ".repeat(head.len());
            text += &format!("{head}{}\n", detail.trim_end().replace('\n', &format!("\n{indent}")));
            if let Some(fix) = fix {
                let fix = fix.trim_end().replace('\n', &format!("\n{indent}   "));
                text += &format!("{indent}-> {fix}\n");
            }
        }
        let count = |level| rows.iter().filter(|row| row.finding.level == level).count();
        let (warnings, failures) = (count(Level::Warn), count(Level::Fail));
        let (warnings, failures) = (number_of(warnings, "warning"), number_of(failures, "failure"));
        text + &format!("{} ok, {warnings}, {failures}; {seconds:.1} s", count(Level::Ok))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn advice_is_split_off() {
        for (message, detail, fix) in [
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
            (
                "no host (look-up: Name unknown); use a name",
                "no host (look-up: Name unknown)",
                Some("use a name"),
            ),
        ] {
            assert_eq!(split(message), (detail.to_owned(), fix.map(str::to_owned)), "{message}");
        }
    }

    #[test]
    fn equal_findings_share_a_row() {
        let findings = |clock: &str| {
            let mut findings = Findings::default();
            findings.ok(Stage::Comm, "clock", clock);
            findings.fail(Stage::Env, "port", "it is taken", "choose another");
            findings
        };
        let ranks = ["a", "a", "b", "a"].map(findings).into_iter().enumerate().collect();
        let mut report = Report { ranks, processes: true };
        assert_eq!(
            report.to_text(1.25),
            "fail  env    port   ranks 0-3     it is taken\n\
             \x20                                 -> choose another\n\
             ok    comm   clock  ranks 0-1, 3  a\n\
             ok    comm   clock  rank 2        b\n\
             2 ok, 0 warnings, 1 failure; 1.2 s"
        );
        report.keep(|stage| stage == Stage::Step);
        assert_eq!((report.rows().len(), report.failures()), (1, 1));
    }
}
