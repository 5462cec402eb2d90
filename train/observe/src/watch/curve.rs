//! What is drawn of a series: the window of steps, smoothing, and few enough points for the columns of a screen.

use crate::run::Series;

/// How strong smoothing can be: the weight of what came before.
pub(super) const SMOOTHING: [f64; 7] = [0.0, 0.5, 0.8, 0.9, 0.95, 0.98, 0.99];

/// Fewest steps that a window shows.
const LEAST_SPAN: u64 = 4;

/// Which steps are shown. By default all of them, also those that come later.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Window {
    /// How many; `None` for all.
    span: Option<u64>,
    /// The last one; `None` for the last one of the runs.
    end: Option<u64>,
}

impl Window {
    /// The first and the last step that are shown, of runs with the steps `first` to `last`.
    pub(super) fn range(self, first: u64, last: u64) -> (u64, u64) {
        let Some(span) = self.span else { return (first, last) };
        let end = self.end.unwrap_or(last).clamp(first.saturating_add(span).min(last), last);
        (end.saturating_sub(span).max(first), end)
    }

    /// Whether all steps are shown.
    pub(super) fn is_all(self) -> bool {
        self.span.is_none()
    }

    /// Shows half as many steps, or twice as many.
    pub(super) fn zoom(&mut self, is_in: bool, first: u64, last: u64) {
        let (from, to) = self.range(first, last);
        let whole = last - first;
        let span = if is_in { ((to - from) / 2).max(LEAST_SPAN) } else { (to - from).saturating_mul(2) };
        if span >= whole {
            *self = Window::default();
            return;
        }
        // Where the end is shown, it stays; elsewhere the middle does.
        let middle = to - (to - from) / 2;
        let end = Some(middle.saturating_add(span / 2)).filter(|_| self.end.is_some());
        *self = Window { span: Some(span), end: end.filter(|end| *end < last) };
    }

    /// Shows earlier steps, or later ones.
    pub(super) fn pan(&mut self, is_back: bool, first: u64, last: u64) {
        let Some(span) = self.span else { return };
        let (_, to) = self.range(first, last);
        let by = (span / 4).max(1);
        let end = if is_back { to.saturating_sub(by).max(first + span) } else { to.saturating_add(by) };
        self.end = Some(end).filter(|end| *end < last);
    }
}

/// What is wanted of a series.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Wanted {
    /// First and last step.
    pub window: (u64, u64),
    /// Columns of dots.
    pub columns: usize,
    /// Weight of what came before; 0 for none.
    pub smoothing: f64,
    /// Whether the columns are equal ratios of steps.
    pub is_log: bool,
}

/// Points of a series, by step.
#[derive(Clone, Debug, Default, PartialEq)]
pub(super) struct Curve {
    /// As they were written.
    pub raw: Vec<(f64, f64)>,
    /// Smoothed; empty if that was not wanted.
    pub smooth: Vec<(f64, f64)>,
    /// Steps whose value is not a number.
    pub broken: Vec<f64>,
    /// The last step of the whole series and its value.
    pub last: Option<(u64, f64)>,
    /// The last value, smoothed.
    pub last_smooth: Option<f64>,
}

impl Curve {
    /// What is wanted of `series`.
    pub(super) fn new(series: &Series, wanted: Wanted) -> Curve {
        let mut curve = Curve { last: series.last(), ..Curve::default() };
        let (steps, values) = (series.steps(), series.values());
        // One step beyond each end, so that lines go on to the edge.
        let begin = steps.partition_point(|step| *step < wanted.window.0).saturating_sub(1);
        let end = (steps.partition_point(|step| *step <= wanted.window.1) + 1).min(steps.len());
        let range = begin..end.max(begin);
        let mut raw = Columns::new(wanted);
        for (step, value) in steps[range.clone()].iter().zip(&values[range.clone()]) {
            match value.is_finite() {
                true => raw.add(*step, *value),
                false => curve.broken.push(*step as f64),
            }
        }
        curve.raw = raw.finish();
        if wanted.smoothing > 0.0 {
            let mut smooth = Columns::new(wanted);
            let (mut sum, mut weight) = (0.0, 0.0);
            for (index, (step, value)) in steps.iter().zip(values).enumerate().take(range.end) {
                if !value.is_finite() {
                    continue;
                }
                // The weights of all values so far add up to less than 1 at first, which is divided out.
                sum = wanted.smoothing * sum + (1.0 - wanted.smoothing) * value;
                weight = wanted.smoothing * weight + (1.0 - wanted.smoothing);
                curve.last_smooth = Some(sum / weight);
                if index >= range.start {
                    smooth.add(*step, sum / weight);
                }
            }
            curve.smooth = smooth.finish();
        }
        curve
    }

    /// The points that are in front: smoothed ones, if there are some.
    pub(super) fn front(&self) -> &[(f64, f64)] {
        if self.smooth.is_empty() { &self.raw } else { &self.smooth }
    }
}

/// Points of which each column keeps its smallest and its largest, so that no peak is lost.
struct Columns {
    wanted: Wanted,
    points: Vec<(f64, f64)>,
    column: i64,
    least: Option<(u64, f64)>,
    most: Option<(u64, f64)>,
}

impl Columns {
    fn new(wanted: Wanted) -> Self {
        Columns { wanted, points: Vec::new(), column: 0, least: None, most: None }
    }

    fn column_of(&self, step: u64) -> i64 {
        let (from, to) = self.wanted.window;
        let place = |step: u64| if self.wanted.is_log { (step.max(1) as f64).ln() } else { step as f64 };
        let length = place(to) - place(from);
        match length > 0.0 {
            true => ((place(step) - place(from)) / length * self.wanted.columns as f64).floor() as i64,
            false => 0,
        }
    }

    fn add(&mut self, step: u64, value: f64) {
        let column = self.column_of(step);
        if column != self.column {
            self.flush();
            self.column = column;
        }
        if self.least.is_none_or(|(_, least)| value < least) {
            self.least = Some((step, value));
        }
        if self.most.is_none_or(|(_, most)| value > most) {
            self.most = Some((step, value));
        }
    }

    fn flush(&mut self) {
        let (Some(least), Some(most)) = (self.least.take(), self.most.take()) else { return };
        let (first, second) = if least.0 <= most.0 { (least, most) } else { (most, least) };
        self.points.push((first.0 as f64, first.1));
        if first.0 != second.0 {
            self.points.push((second.0 as f64, second.1));
        }
    }

    fn finish(mut self) -> Vec<(f64, f64)> {
        self.flush();
        self.points
    }
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
        let wanted = Wanted { window: (1, 1000), columns: 20, smoothing: 0.0, is_log: false };
        let curve = Curve::new(&series, wanted);
        assert!(curve.raw.len() <= 42 && curve.raw.contains(&(777.0, 50.0)), "{:?}", curve.raw);
        assert_eq!((curve.broken, curve.last, curve.smooth.len()), (vec![900.0], Some((1000, 1.0)), 0));
        let curve = Curve::new(&series, Wanted { window: (776, 778), smoothing: 0.5, ..wanted });
        // One beyond each end.
        assert_eq!(
            curve.raw.iter().map(|(step, _)| *step).collect::<Vec<_>>(),
            [775.0, 776.0, 777.0, 778.0, 779.0]
        );
        assert_eq!((curve.smooth[0], curve.smooth[2]), ((775.0, 1.0), (777.0, 25.5)));
        let log = Curve::new(&series, Wanted { is_log: true, ..wanted });
        assert!(log.raw.contains(&(2.0, 1.0)) && log.raw.len() <= 42);
    }

    #[test]
    fn the_first_smoothed_values_are_not_drawn_to_zero() {
        let series = series(
            [(1, "4.0"), (2, "null"), (3, "2.0")].map(|(step, value)| (step, value.into())).into_iter(),
        );
        let wanted = Wanted { window: (1, 3), columns: 100, smoothing: 0.9, is_log: false };
        let curve = Curve::new(&series, wanted);
        assert_eq!(curve.smooth[0], (1.0, 4.0));
        let expected = (0.9 * 0.1 * 4.0 + 0.1 * 2.0) / (1.0 - 0.9 * 0.9);
        assert!((curve.last_smooth.unwrap() - expected).abs() < 1e-12);
    }

    #[test]
    fn windows_follow_the_end_until_they_are_moved() {
        let mut window = Window::default();
        assert_eq!(window.range(1, 101), (1, 101));
        window.zoom(true, 1, 101);
        assert_eq!((window.range(1, 101), window.range(1, 201)), ((51, 101), (151, 201)));
        window.pan(true, 1, 101);
        assert_eq!((window.range(1, 101), window.range(1, 201)), ((39, 89), (39, 89)));
        window.zoom(true, 1, 101);
        assert_eq!(window.range(1, 101), (51, 76));
        (0..9).for_each(|_| window.pan(false, 1, 101));
        assert_eq!(window.range(1, 201), (176, 201));
        (0..9).for_each(|_| window.zoom(true, 1, 201));
        assert_eq!(window.range(1, 201), (197, 201));
        (0..9).for_each(|_| window.zoom(false, 1, 201));
        assert!(window.is_all());
        window.zoom(true, 1, 201);
        (0..99).for_each(|_| window.pan(true, 1, 201));
        assert_eq!(window.range(1, 201), (1, 101));
        // A run that began again has fewer steps.
        assert_eq!((window.range(1, 5), window.range(1, 1)), ((1, 5), (1, 1)));
        window.zoom(true, 7, 7);
        assert!(window.is_all());
    }
}
