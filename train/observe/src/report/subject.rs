//! A run of a report.

use super::facts::Facts;
use super::numbers::Numbers;
use crate::run::{Run, distinct_names};

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
    let subject = |(run, name)| Subject { run, name, facts: Facts::of(run), numbers: Numbers::of(run) };
    runs.iter().zip(distinct_names(runs.iter().map(Run::folder))).map(subject).collect()
}
