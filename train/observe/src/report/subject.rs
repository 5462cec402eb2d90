//! A run of a report.

use super::facts::Facts;
use super::numbers::Numbers;
use crate::run::Run;

/// A run, and what is known of it.
pub(super) struct Subject<'a> {
    pub(super) run: &'a Run,
    /// Its name, which no other run of the report has.
    pub(super) name: String,
    pub(super) facts: Facts,
    pub(super) numbers: Numbers,
}

/// All runs of a report. Names are those of the folders, or their paths where two have the same.
pub(super) fn subjects(runs: &[Run]) -> Vec<Subject<'_>> {
    let of = |run: &Run| runs.iter().filter(|other| other.name() == run.name()).count();
    let subject = |run| Subject {
        run,
        name: if of(run) > 1 { run.folder().display().to_string() } else { run.name().to_owned() },
        facts: Facts::of(run),
        numbers: Numbers::of(run),
    };
    runs.iter().map(subject).collect()
}
