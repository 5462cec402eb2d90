//! The state of the screen: the runs, the view, and the settings of each view.

use std::collections::BTreeSet;
use std::time::Instant;

use ratatui::widgets::TableState;

use super::curve::{Curve, CurveSettings};
use super::feed::{Snapshot, Update};
use super::theme::Theme;

/// A view, each on a screen of its own.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum View {
    /// A part of everything.
    #[default]
    Overview,
    Curves,
    Ranks,
    Log,
    Samples,
    Runs,
}

impl View {
    /// All views with their titles, by number.
    pub(super) const ALL: [(View, &str); 6] = [
        (View::Overview, "Overview"),
        (View::Curves, "Curves"),
        (View::Ranks, "Ranks"),
        (View::Log, "Log"),
        (View::Samples, "Samples"),
        (View::Runs, "Runs"),
    ];

    /// The view `by` places further, from the last one to the first.
    pub(super) fn step(self, by: isize) -> View {
        let at = View::ALL.iter().position(|(view, _)| *view == self).unwrap_or(0);
        View::ALL[(at as isize + by).rem_euclid(View::ALL.len() as isize) as usize].0
    }
}

/// The lines that the log shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Source {
    /// Output of all ranks if there is any, else events.
    #[default]
    Either,
    Events,
    All,
    Rank(usize),
}

impl Source {
    /// The source that [`Source::Either`] stands for.
    pub(super) fn resolve(self, run: &Snapshot) -> Source {
        match self {
            Source::Either if run.log.is_empty() => Source::Events,
            Source::Either => Source::All,
            source => source,
        }
    }
}

/// The state of the screen.
#[derive(Debug)]
pub(super) struct Watch {
    pub runs: Vec<Snapshot>,
    /// Paths that cannot be watched.
    pub problems: Vec<String>,
    pub theme: Theme,
    /// The time of the drawing.
    pub now: Instant,
    pub view: View,
    /// The number of the run in front.
    pub front: usize,
    pub shows_help: bool,
    pub curves: CurveSettings,
    pub rows: Rows,
}

/// Rows of the other views. Positions may lie beyond an end until the view is drawn, which knows its length.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// The column of ranks to sort by.
    pub sort: usize,
    pub is_reversed: bool,
    /// The chosen rank, and the first visible one.
    pub ranks: TableState,
    pub source: Source,
    /// Lines of the log below the last visible one.
    pub log_back: usize,
    pub cuts_lines: bool,
    /// Steps with samples after the visible one, and lines above the visible ones.
    pub sample_back: usize,
    pub sample_line: usize,
    /// Differing configuration keys above the visible ones.
    pub difference: usize,
    /// Rows of a page, as drawn last.
    pub page: usize,
}

impl Watch {
    /// A screen without runs.
    pub(super) fn new(theme: Theme, now: Instant) -> Self {
        let (curves, rows) = (CurveSettings::default(), Rows::default());
        let (runs, problems, view) = (Vec::new(), Vec::new(), View::default());
        Watch { runs, problems, theme, now, view, front: 0, shows_help: false, curves, rows }
    }

    /// Takes over what a background thread has found.
    pub(super) fn apply(&mut self, update: Update) {
        match update {
            Update::Run(number, run) if number < self.runs.len() => self.runs[number] = *run,
            Update::Run(_, run) => self.runs.push(*run),
            Update::Problems(problems) => self.problems = problems,
            Update::Panicked => {}
        }
    }

    /// The run in front.
    pub(super) fn front(&self) -> Option<&Snapshot> {
        self.runs.get(self.front)
    }

    /// Numbers of the runs whose curves are shown.
    pub(super) fn shown(&self) -> Vec<usize> {
        let CurveSettings { is_alone, hidden, .. } = &self.curves;
        let is_shown = |run: &usize| if *is_alone { *run == self.front } else { !hidden.contains(run) };
        (0..self.runs.len()).filter(is_shown).collect()
    }

    /// Puts the run `by` places further in front, from the last one to the first.
    pub(super) fn go_to_run(&mut self, by: isize) {
        if !self.runs.is_empty() {
            self.front = (self.front as isize + by).rem_euclid(self.runs.len() as isize) as usize;
            let Rows { sort, is_reversed, cuts_lines, .. } = self.rows;
            self.rows = Rows { sort, is_reversed, cuts_lines, ..Rows::default() };
        }
    }

    /// Shows the lines of the source `by` places further: events, all ranks, each rank.
    pub(super) fn go_to_source(&mut self, by: isize) {
        let Some(run) = self.front() else { return };
        let ranks: BTreeSet<usize> = run.log.iter().map(|line| line.rank).collect();
        let output = ranks.first().map(|_| Source::All).into_iter();
        let mut sources = vec![Source::Events];
        sources.extend(output.chain(ranks.iter().map(|rank| Source::Rank(*rank))));
        let source = self.rows.source.resolve(run);
        let at = sources.iter().position(|other| *other == source).unwrap_or(0);
        let next = (at as isize + by).rem_euclid(sources.len() as isize) as usize;
        (self.rows.source, self.rows.log_back) = (sources[next], 0);
    }

    /// Metrics of the runs that are shown.
    pub(super) fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = Vec::new();
        for key in self.shown().into_iter().flat_map(|run| &self.runs[run].summary.keys) {
            if !keys.contains(&key.as_str()) {
                keys.push(key);
            }
        }
        keys
    }

    /// Metrics whose names contain the text that was typed into the list.
    pub(super) fn listed_keys(&self) -> Vec<String> {
        let typed = self.curves.list.as_ref().map_or("", |(typed, _)| typed).to_lowercase();
        let keys = self.keys().into_iter().filter(|key| key.to_lowercase().contains(&typed));
        keys.map(str::to_owned).collect()
    }

    /// First and last step of the runs that are shown.
    pub(super) fn extent(&self) -> (u64, u64) {
        let extents = self.shown().into_iter().filter_map(|run| self.runs[run].summary.extent);
        extents.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or_default()
    }

    /// The curve of a metric in the visible steps, for a chart with this number of columns.
    pub(super) fn curve(&self, run: usize, key: &str, columns: u16) -> Option<Curve> {
        let series = self.runs[run].run.as_ref()?.metrics().get(key)?;
        Some(Curve::new(series, &self.curves, self.extent(), columns))
    }
}

/// The character that stands for a run, such as at the end of its curve.
pub(super) fn label(run: usize) -> char {
    let labels = b"123456789abcdefghijklmnopqrstuvwxyz";
    char::from(labels[run % labels.len()])
}
