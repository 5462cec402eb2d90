//! What is on the screen: which view of which runs, and how each view is set.

use std::collections::{BTreeSet, HashMap};
use std::sync::Arc;
use std::time::Instant;

use super::curve::{Curve, SMOOTHING, Wanted, Window};
use super::rows::Column;
use super::subject::{News, Subject};
use super::summary::Summary;
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
    pub(super) const ALL: [View; 6] =
        [View::Overview, View::Curves, View::Ranks, View::Log, View::Samples, View::Runs];

    pub(super) fn title(self) -> &'static str {
        match self {
            View::Overview => "Overview",
            View::Curves => "Curves",
            View::Ranks => "Ranks",
            View::Log => "Log",
            View::Samples => "Samples",
            View::Runs => "Runs",
        }
    }

    /// The view so many places on, from the last one to the first.
    pub(super) fn step(self, by: isize) -> View {
        let at = View::ALL.iter().position(|view| *view == self).unwrap_or(0);
        let count = View::ALL.len() as isize;
        View::ALL[(at as isize + by).rem_euclid(count) as usize]
    }
}

/// Which lines the log shows.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) enum Source {
    /// Output of all ranks where there is some, else what has happened.
    #[default]
    Either,
    Events,
    All,
    Rank(usize),
}

/// A screen and what it shows.
#[derive(Debug)]
pub(super) struct Watch {
    pub subjects: Vec<Arc<Subject>>,
    /// Of each subject, as of the last [`Watch::update`].
    pub news: Vec<News>,
    pub summaries: Vec<Summary>,
    /// What is wrong with the paths that were named.
    pub notes: Vec<String>,
    pub theme: Theme,
    /// The time that it is.
    pub now: Instant,
    pub view: View,
    /// The run in front.
    pub at: usize,
    /// Runs that are not compared.
    pub hidden: BTreeSet<usize>,
    /// Whether the curves are those of the run in front alone.
    pub is_alone: bool,
    pub shows_help: bool,
    pub curves: Curves,
    pub ranks: Ranks,
    pub log: Log,
    pub samples: Samples,
    /// Lines that the differences of configurations are scrolled down.
    pub differences: usize,
}

/// How curves are shown.
#[derive(Debug)]
pub(super) struct Curves {
    /// The metric.
    pub key: String,
    /// All metrics of the runs that are shown.
    pub keys: Vec<String>,
    /// First and last step of those runs.
    pub extent: (u64, u64),
    /// Index in [`SMOOTHING`].
    pub smoothing: usize,
    pub is_log_y: bool,
    pub is_log_x: bool,
    pub window: Window,
    /// The list of metrics, if it is open: what was typed to narrow it, and which of the rest is chosen.
    pub list: Option<(String, usize)>,
    /// What was drawn last, for when a run is being read.
    drawn: HashMap<(usize, String), (u64, Wanted, Curve)>,
}

/// How ranks are shown.
#[derive(Debug, Default)]
pub(super) struct Ranks {
    pub sort: Column,
    pub is_reversed: bool,
    /// The row that is chosen.
    pub chosen: usize,
    /// The first row that is shown.
    pub first: usize,
    /// Rows of a page, as it was drawn.
    pub page: usize,
}

/// How the log is shown.
#[derive(Debug, Default)]
pub(super) struct Log {
    pub source: Source,
    /// Those that there are, as they were drawn.
    pub sources: Vec<Source>,
    /// Lines between the last one that is shown and the end.
    pub back: usize,
    pub is_cut: bool,
    pub page: usize,
}

/// How samples are shown.
#[derive(Debug, Default)]
pub(super) struct Samples {
    /// Steps with samples between the one that is shown and the last.
    pub back: usize,
    /// How many steps have samples, as they were drawn.
    pub count: usize,
    /// Lines that the text is scrolled down.
    pub down: usize,
    pub page: usize,
}

impl Watch {
    /// A screen without runs.
    pub(super) fn new(theme: Theme, now: Instant) -> Self {
        Watch {
            subjects: Vec::new(),
            news: Vec::new(),
            summaries: Vec::new(),
            notes: Vec::new(),
            theme,
            now,
            view: View::default(),
            at: 0,
            hidden: BTreeSet::new(),
            is_alone: false,
            shows_help: false,
            curves: Curves {
                key: "loss".to_owned(),
                keys: Vec::new(),
                extent: (0, 0),
                smoothing: 0,
                is_log_y: false,
                is_log_x: false,
                window: Window::default(),
                list: None,
                drawn: HashMap::new(),
            },
            ranks: Ranks::default(),
            log: Log::default(),
            samples: Samples::default(),
            differences: 0,
        }
    }

    /// Takes over what is known by now. The order of `subjects` stays, and new ones come at the end.
    pub(super) fn update(&mut self, subjects: Vec<Arc<Subject>>, notes: Vec<String>, now: Instant) {
        self.notes = notes;
        self.now = now;
        self.summaries.resize_with(subjects.len(), Summary::default);
        self.news = subjects.iter().map(|subject| subject.news()).collect();
        for (index, subject) in subjects.iter().enumerate() {
            let look = self.news[index].look.as_deref();
            // While a run is being read, what was known of it stays.
            if let Some(summary) = subject.see(|run| Summary::new(run, look)) {
                self.summaries[index] = summary;
            }
        }
        self.subjects = subjects;
        let shown = self.shown();
        let mut keys: Vec<String> = Vec::new();
        for key in shown.iter().flat_map(|run| &self.summaries[*run].keys) {
            if !keys.contains(key) {
                keys.push(key.clone());
            }
        }
        let extents = shown.iter().filter_map(|run| self.summaries[*run].extent);
        let extent = extents.reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)));
        self.curves.keys = keys;
        self.curves.extent = extent.unwrap_or_default();
    }

    /// What is known of the run in front.
    pub(super) fn front(&self) -> Option<&News> {
        self.news.get(self.at)
    }

    /// Runs whose curves are shown.
    pub(super) fn shown(&self) -> Vec<usize> {
        let all = 0..self.subjects.len();
        match self.is_alone {
            true => all.filter(|run| *run == self.at).collect(),
            false => all.filter(|run| !self.hidden.contains(run)).collect(),
        }
    }

    /// Puts another run in front: so many on, from the last one to the first.
    pub(super) fn go_to_run(&mut self, by: isize) {
        let count = self.subjects.len() as isize;
        if count > 0 {
            self.at = (self.at as isize + by).rem_euclid(count) as usize;
            (self.ranks.chosen, self.ranks.first) = (0, 0);
            (self.log.source, self.log.back) = (Source::default(), 0);
            (self.samples.back, self.samples.down) = (0, 0);
        }
    }

    /// The curve of a metric of a run; as it was, while the run is being read.
    pub(super) fn curve(&mut self, run: usize, key: &str, columns: usize) -> Option<Curve> {
        let curves = &mut self.curves;
        let wanted = Wanted {
            window: curves.window.range(curves.extent.0, curves.extent.1),
            columns,
            smoothing: SMOOTHING[curves.smoothing],
            is_log: curves.is_log_x,
        };
        let version = self.news.get(run)?.version;
        let place = (run, key.to_owned());
        if let Some((of, with, curve)) = curves.drawn.get(&place)
            && (*of, *with) == (version, wanted)
        {
            return Some(curve.clone());
        }
        match self
            .subjects
            .get(run)?
            .see(|run| run.metrics().get(key).map(|series| Curve::new(series, wanted)))
        {
            Some(Some(curve)) => {
                curves.drawn.insert(place, (version, wanted, curve.clone()));
                Some(curve)
            }
            Some(None) => None,
            None => curves.drawn.get(&place).map(|(_, _, curve)| curve.clone()),
        }
    }

    /// Metrics whose names have what was typed into the list.
    pub(super) fn listed(&self) -> Vec<String> {
        let typed = self.curves.list.as_ref().map_or("", |(typed, _)| typed).to_lowercase();
        self.curves.keys.iter().filter(|key| key.to_lowercase().contains(&typed)).cloned().collect()
    }
}

/// The character that stands for a run, such as at the end of its curve.
pub(super) fn label(run: usize) -> char {
    let labels = b"123456789abcdefghijklmnopqrstuvwxyz";
    char::from(labels[run % labels.len()])
}
