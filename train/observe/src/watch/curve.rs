//! The curve of a metric: the visible steps, smoothing, and few enough points for the columns of a chart.

use std::collections::BTreeSet;

use crate::run::Series;

/// Weights of the smoothing that can be chosen.
pub(super) const SMOOTHING: [f64; 7] = [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99];

/// Fewest steps that a window shows.
const LEAST_SPAN: u64 = 4;

/// How curves are shown.
#[derive(Debug)]
pub(super) struct CurveSettings {
    /// The metric.
    pub key: String,
    /// Runs whose curves are hidden.
    pub hidden: BTreeSet<usize>,
    /// Hides the curves of all runs but the one in front.
    pub is_alone: bool,
    /// Index in [`SMOOTHING`].
    pub smoothing: usize,
    pub is_log_y: bool,
    pub is_log_x: bool,
    pub window: Window,
    /// The open list of metrics: the text that narrows it, and the chosen one of the rest.
    pub list: Option<(String, usize)>,
}

impl Default for CurveSettings {
    fn default() -> Self {
        CurveSettings {
            key: "loss".to_owned(),
            hidden: BTreeSet::new(),
            is_alone: false,
            smoothing: 0,
            is_log_y: false,
            is_log_x: false,
            window: Window::default(),
            list: None,
        }
    }
}

/// The steps that are shown. By default all of them, later ones included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    /// Their number; `None` for all.
    span: Option<u64>,
    /// The last one; `None` for the last one of the runs.
    end: Option<u64>,
}

impl Window {
    /// First and last visible step, for runs with the steps `first` to `last`.
    pub(super) fn range(self, (first, last): (u64, u64)) -> (u64, u64) {
        let Some(span) = self.span else { return (first, last) };
        let end = self.end.unwrap_or(last).clamp(first.saturating_add(span).min(last), last);
        (end.saturating_sub(span).max(first), end)
    }

    /// Whether all steps are shown.
    pub(super) fn is_all(self) -> bool {
        self.span.is_none()
    }

    /// Shows half as many steps, or twice as many.
    pub(super) fn zoom(&mut self, is_in: bool, (first, last): (u64, u64)) {
        let (from, to) = self.range((first, last));
        let span = if is_in { ((to - from) / 2).max(LEAST_SPAN) } else { (to - from).saturating_mul(2) };
        if span >= last - first {
            *self = Window::default();
            return;
        }
        // A window at the end stays there; elsewhere the middle does.
        let middle = to - (to - from) / 2;
        let end = self.end.map(|_| middle.saturating_add(span / 2)).filter(|end| *end < last);
        *self = Window { span: Some(span), end };
    }

    /// Shows earlier steps, or later ones.
    pub(super) fn pan(&mut self, is_back: bool, (first, last): (u64, u64)) {
        let Some(span) = self.span else { return };
        let (_, to) = self.range((first, last));
        let by = (span / 4).max(1);
        let end = if is_back { to.saturating_sub(by).max(first + span) } else { to.saturating_add(by) };
        self.end = Some(end).filter(|end| *end < last);
    }
}

/// Points of a series, by step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Curve {
    /// The values as recorded.
    pub raw: Vec<(f64, f64)>,
    /// Smoothed values; empty without smoothing.
    pub smooth: Vec<(f64, f64)>,
    /// Visible steps whose value is not a number.
    pub broken: Vec<f64>,
    /// The last step of the whole series and its value.
    pub last: Option<(u64, f64)>,
    /// The last smoothed value.
    pub last_smooth: Option<f64>,
}

impl Curve {
    /// The part of `series` that a chart with this number of columns shows.
    pub(super) fn new(series: &Series, settings: &CurveSettings, extent: (u64, u64), columns: u16) -> Curve {
        let (from, to) = settings.window.range(extent);
        let steps = series.steps();
        let (begin, end) =
            (steps.partition_point(|step| *step < from), steps.partition_point(|step| *step <= to));
        let visible = steps.iter().zip(series.values()).take(end).skip(begin);
        let broken = visible.filter(|(_, value)| !value.is_finite()).map(|(step, _)| *step as f64).collect();
        let smooth = match SMOOTHING[settings.smoothing] {
            weight if weight > 0.0 => series.smoothed(weight),
            _ => Series::default(),
        };
        let is_log = settings.is_log_x;
        Curve {
            raw: points(series, from, to, columns, is_log),
            smooth: points(&smooth, from, to, columns, is_log),
            broken,
            last: series.last(),
            last_smooth: smooth.last().map(|(_, value)| value),
        }
    }

    /// The points in front: the smoothed ones, if there are any.
    pub(super) fn front(&self) -> &[(f64, f64)] {
        if self.smooth.is_empty() { &self.raw } else { &self.smooth }
    }

    /// The value for titles: the last smoothed one, if there is any.
    pub(super) fn last_value(&self) -> Option<f64> {
        self.last_smooth.or(self.last.map(|(_, value)| value))
    }
}

/// Finite values of the steps `from` to `to` and one step beyond each end, so that lines reach the edges. Each of the
/// two dots in a column keeps its smallest and its largest value, so that no peak is lost.
fn points(series: &Series, from: u64, to: u64, columns: u16, is_log: bool) -> Vec<(f64, f64)> {
    let steps = series.steps();
    let begin = steps.partition_point(|step| *step < from).saturating_sub(1);
    let end = (steps.partition_point(|step| *step <= to) + 1).min(steps.len());
    let visible = steps[begin..end].iter().zip(&series.values()[begin..end]);
    let visible: Vec<_> =
        visible.map(|(step, value)| (*step, *value)).filter(|(_, value)| value.is_finite()).collect();
    let place = |step: u64| if is_log { (step.max(1) as f64).ln() } else { step as f64 };
    let length = (place(to) - place(from)).max(f64::MIN_POSITIVE);
    let dot = |step: u64| ((place(step) - place(from)) / length * 2.0 * f64::from(columns)).floor();
    let mut points = Vec::new();
    for part in visible.chunk_by(|a, b| dot(a.0) == dot(b.0)) {
        let by_value = |a: &&(u64, f64), b: &&(u64, f64)| a.1.total_cmp(&b.1);
        let ends = [part.iter().min_by(by_value), part.iter().max_by(by_value)];
        let mut ends: Vec<_> = ends.into_iter().flatten().collect();
        ends.sort_by_key(|(step, _)| *step);
        ends.dedup();
        points.extend(ends.into_iter().map(|(step, value)| (*step as f64, *value)));
    }
    points
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::run::Run;

    fn series(values: impl Iterator<Item = (u64, String)>) -> Series {
        let folder = tempfile::tempdir().unwrap();
        let lines: String =
            values.map(|(step, value)| format!("{{\"step\":{step},\"loss\":{value}}}\n")).collect();
        fs::write(folder.path().join("metrics.jsonl"), lines).unwrap();
        Run::open(folder.path()).unwrap().metrics().get("loss").unwrap().clone()
    }

    #[test]
    fn few_points_keep_peaks_and_gaps() {
        let value = |step: u64| match step {
            777 => "50".to_owned(),
            900 => "null".to_owned(),
            _ => "1.0".to_owned(),
        };
        let series = series((1..=1000).map(|step| (step, value(step))));
        let mut settings = CurveSettings::default();
        let curve = Curve::new(&series, &settings, (1, 1000), 10);
        assert!(curve.raw.len() <= 42 && curve.raw.contains(&(777.0, 50.0)), "{:?}", curve.raw);
        assert_eq!((curve.broken, curve.last, curve.smooth.len()), (vec![900.0], Some((1000, 1.0)), 0));
        settings.smoothing = 1;
        let curve = Curve::new(&series, &settings, (776, 778), 10);
        // One beyond each end.
        assert_eq!(
            curve.raw.iter().map(|(step, _)| *step).collect::<Vec<_>>(),
            [775.0, 776.0, 777.0, 778.0, 779.0]
        );
        assert_eq!((curve.smooth[0], curve.smooth[2]), ((775.0, 1.0), (777.0, 25.5)));
        settings.is_log_x = true;
        let log = Curve::new(&series, &settings, (1, 1000), 10);
        assert!(log.raw.contains(&(2.0, 1.0)) && log.raw.len() <= 42);
    }

    #[test]
    fn smoothing_is_not_biased_to_zero() {
        let series = series(
            [(1, "4.0"), (2, "null"), (3, "2.0")].map(|(step, value)| (step, value.into())).into_iter(),
        );
        let settings = CurveSettings { smoothing: 3, ..CurveSettings::default() };
        let curve = Curve::new(&series, &settings, (1, 3), 50);
        assert_eq!(curve.smooth[0], (1.0, 4.0));
        let expected = (0.9 * 0.1 * 4.0 + 0.1 * 2.0) / (1.0 - 0.9 * 0.9);
        assert!((curve.last_smooth.unwrap() - expected).abs() < 1e-12);
    }

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
        assert!(window.is_all());
        window.zoom(true, (1, 201));
        (0..99).for_each(|_| window.pan(true, (1, 201)));
        assert_eq!(window.range((1, 201)), (1, 101));
        // A run that began again has fewer steps.
        assert_eq!((window.range((1, 5)), window.range((1, 1))), ((1, 5), (1, 1)));
        window.zoom(true, (7, 7));
        assert!(window.is_all());
    }
}
