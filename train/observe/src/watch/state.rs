//! The state of the screen: runs, view, and settings of each view.

use std::collections::BTreeSet;
use std::time::Instant;

use ratatui::widgets::TableState;

use super::feed::{Snapshot, Update};
use super::theme::Theme;

/// A full-screen view. Its `Debug` text is its title.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum View {
    /// Parts of all other views.
    #[default]
    Overview,
    Curves,
    Ranks,
    Log,
    Samples,
    Runs,
}

impl View {
    pub(super) const ALL: [View; 6] =
        [View::Overview, View::Curves, View::Ranks, View::Log, View::Samples, View::Runs];
}

pub(super) const SMOOTHING: [f64; 7] = [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99];

const LEAST_SPAN: u64 = 4;

const NO_CURVES: [&str; 2] = ["step", "time"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Source {
    Events,
    All,
    Rank(usize),
}

#[derive(Debug)]
pub(super) struct Watch {
    pub runs: Vec<Snapshot>,
    pub problems: Vec<String>,
    pub theme: Theme,
    pub now: Instant,
    pub view: View,
    pub front: usize,
    pub shows_help: bool,
    pub curves: CurveSettings,
    pub rows: Rows,
}

#[derive(Debug, Default)]
pub(super) struct CurveSettings {
    pub key: String,
    pub hidden: BTreeSet<usize>,
    /// Hides the curves of all runs except the current one.
    pub is_alone: bool,
    /// Index in [`SMOOTHING`].
    pub smoothing: usize,
    pub is_log_y: bool,
    pub is_log_x: bool,
    pub window: Window,
    /// Filter and selected index of the list of metrics, if the list is open.
    pub list: Option<(String, usize)>,
}

/// The visible steps: by default all, including future ones.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    pub span: Option<u64>,
    /// Last visible step; `None` for the last step of the runs.
    end: Option<u64>,
}

impl Window {
    pub(super) fn range(self, (first, last): (u64, u64)) -> (u64, u64) {
        let Some(span) = self.span else { return (first, last) };
        let end = self.end.unwrap_or(last).clamp(first.saturating_add(span).min(last), last);
        (end.saturating_sub(span).max(first), end)
    }

    /// Halves or doubles the number of visible steps.
    pub(super) fn zoom(&mut self, is_in: bool, (first, last): (u64, u64)) {
        let (from, to) = self.range((first, last));
        let span = if is_in { ((to - from) / 2).max(LEAST_SPAN) } else { (to - from).saturating_mul(2) };
        if span >= last - first {
            *self = Window::default();
            return;
        }
        // A window at the end stays there; any other window keeps its middle.
        let middle = to - (to - from) / 2;
        let end = self.end.map(|_| middle.saturating_add(span / 2)).filter(|end| *end < last);
        *self = Window { span: Some(span), end };
    }

    pub(super) fn pan(&mut self, is_back: bool, (first, last): (u64, u64)) {
        let Some(span) = self.span else { return };
        let (_, to) = self.range((first, last));
        let by = (span / 4).max(1);
        let end = if is_back { to.saturating_sub(by).max(first + span) } else { to.saturating_add(by) };
        self.end = Some(end).filter(|end| *end < last);
    }
}

/// Positions in the other views. Drawing a view limits them to its length.
#[derive(Debug, Default)]
pub(super) struct Rows {
    /// Index in `COLUMNS`.
    pub sort: usize,
    pub is_reversed: bool,
    /// Selected rank, and first visible rank.
    pub ranks: TableState,
    /// By default output of all ranks, or events if there is no output.
    pub source: Option<Source>,
    /// Number of lines of the log below the visible ones.
    pub log_back: usize,
    pub cuts_lines: bool,
    /// Number of later steps with samples, and number of lines above the visible ones.
    pub sample_back: usize,
    pub sample_line: usize,
    /// Number of configuration keys above the visible ones.
    pub difference: usize,
    pub page: usize,
}

impl Watch {
    pub(super) fn new(theme: Theme, now: Instant) -> Self {
        let curves = CurveSettings { key: "loss".to_owned(), ..CurveSettings::default() };
        let (rows, view) = (Rows::default(), View::default());
        let (runs, problems) = (Vec::new(), Vec::new());
        Watch { runs, problems, theme, now, view, front: 0, shows_help: false, curves, rows }
    }

    pub(super) fn apply(&mut self, update: Update) {
        match update {
            Update::Run(number, run) if number < self.runs.len() => self.runs[number] = *run,
            Update::Run(_, run) => self.runs.push(*run),
            Update::Problems(problems) => self.problems = problems,
            Update::Panicked => {}
        }
    }

    pub(super) fn front(&self) -> Option<&Snapshot> {
        self.runs.get(self.front)
    }

    pub(super) fn shown(&self) -> Vec<usize> {
        let CurveSettings { is_alone, hidden, .. } = &self.curves;
        let is_shown = |run: &usize| if *is_alone { *run == self.front } else { !hidden.contains(run) };
        (0..self.runs.len()).filter(is_shown).collect()
    }

    pub(super) fn go_to_view(&mut self, by: isize) {
        self.view = View::ALL[further(self.view as usize, by, View::ALL.len())];
    }

    pub(super) fn go_to_run(&mut self, by: isize) {
        if !self.runs.is_empty() {
            self.front = further(self.front, by, self.runs.len());
            let Rows { sort, is_reversed, cuts_lines, .. } = self.rows;
            self.rows = Rows { sort, is_reversed, cuts_lines, ..Rows::default() };
        }
    }

    /// Moves `by` log sources forward: events, all ranks, each rank.
    pub(super) fn go_to_source(&mut self, by: isize) {
        let (Some(run), Some(source)) = (self.front(), self.source()) else { return };
        let ranks: BTreeSet<usize> = run.log.iter().map(|line| line.rank).collect();
        let output = ranks.first().map(|_| Source::All);
        let sources: Vec<Source> = [Source::Events]
            .into_iter()
            .chain(output)
            .chain(ranks.iter().map(|rank| Source::Rank(*rank)))
            .collect();
        let at = sources.iter().position(|other| *other == source).unwrap_or(0);
        (self.rows.source, self.rows.log_back) = (Some(sources[further(at, by, sources.len())]), 0);
    }

    pub(super) fn source(&self) -> Option<Source> {
        let default = if self.front()?.log.is_empty() { Source::Events } else { Source::All };
        Some(self.rows.source.unwrap_or(default))
    }

    pub(super) fn keys(&self) -> Vec<&str> {
        let mut keys: Vec<&str> = Vec::new();
        let metrics = self.shown().into_iter().filter_map(|run| Some(self.runs[run].run.as_ref()?.metrics()));
        for (key, _) in metrics.flat_map(|metrics| metrics.iter()) {
            if !NO_CURVES.contains(&key) && !keys.contains(&key) {
                keys.push(key);
            }
        }
        keys
    }

    pub(super) fn listed_keys(&self) -> Vec<String> {
        let typed = self.curves.list.as_ref().map_or("", |(typed, _)| typed).to_lowercase();
        let keys = self.keys().into_iter().filter(|key| key.to_lowercase().contains(&typed));
        keys.map(str::to_owned).collect()
    }

    pub(super) fn extent(&self) -> (u64, u64) {
        let extents = self.shown().into_iter().filter_map(|run| {
            let metrics = self.runs[run].run.as_ref()?.metrics();
            let first = metrics.iter().filter_map(|(_, series)| series.steps().first().copied()).min();
            first.zip(metrics.last_step())
        });
        extents.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1))).unwrap_or_default()
    }
}

pub(super) fn further(at: usize, by: isize, count: usize) -> usize {
    (at as isize + by).rem_euclid(count as isize) as usize
}

pub(super) fn label(run: usize) -> char {
    let labels = b"123456789abcdefghijklmnopqrstuvwxyz";
    char::from(labels[run % labels.len()])
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn window_follows_the_end_until_moved() {
        let mut window = Window::default();
        assert_eq!(window.range((1, 101)), (1, 101));
        window.zoom(true, (1, 101));
        assert_eq!((window.range((1, 101)), window.range((1, 201))), ((51, 101), (151, 201)));
        window.pan(true, (1, 101));
        assert_eq!((window.range((1, 101)), window.range((1, 201))), ((39, 89), (39, 89)));
        window.zoom(true, (1, 101));
        assert_eq!(window.range((1, 101)), (51, 76));
        (0..9).for_each(|_| window.pan(false, (1, 101)));
        assert_eq!(window.range((1, 201)), (176, 201));
        (0..9).for_each(|_| window.zoom(true, (1, 201)));
        assert_eq!(window.range((1, 201)), (197, 201));
        (0..9).for_each(|_| window.zoom(false, (1, 201)));
        assert_eq!(window, Window::default());
        window.zoom(true, (1, 201));
        (0..99).for_each(|_| window.pan(true, (1, 201)));
        assert_eq!(window.range((1, 201)), (1, 101));
        assert_eq!((window.range((1, 5)), window.range((1, 1))), ((1, 5), (1, 1)));
        window.zoom(true, (7, 7));
        assert_eq!(window, Window::default());
    }
}
