//! Curves of a metric over the steps of one or several runs.

use ratatui::buffer::Buffer;
use ratatui::layout::{Alignment, Rect};
use ratatui::style::{Color, Style};
use ratatui::symbols::Marker;
use ratatui::text::{Line, Span};
use ratatui::widgets::{
    Axis, Chart, Clear, Dataset, GraphType, List, ListState, Paragraph, StatefulWidget, Widget,
};

use super::axis::Scale;

use super::format::{clean, fit, name_of, nothing, plain_title, titled, value, width};
use super::state::{CurveSettings, SMOOTHING, Watch, label};
use super::theme::Theme;
use crate::page::reduce;
use crate::run::Series;

/// Smallest size of a chart, and maximum number of intervals on its vertical axis.
const LEAST: (u16, u16) = (30, 5);
const MOST_PARTS: usize = 8;

const WIDE: u16 = 120;

const LIST: u16 = 28;

const MOST_WITH_RAW: usize = 2;

const VALIDATION: Color = Color::Yellow;

#[derive(Clone, Debug, Default, PartialEq)]
struct Curve {
    run: usize,
    /// Values by step, smoothed if smoothing is on.
    points: Vec<(f64, f64)>,
    raw: Vec<(f64, f64)>,
    /// Visible steps whose values are NaN or infinite.
    broken: Vec<f64>,
    last: Option<(u64, f64)>,
    last_shown: Option<f64>,
}

impl Curve {
    fn new(run: usize, series: &Series, settings: &CurveSettings, range: (u64, u64), columns: u16) -> Curve {
        let (from, to) = range;
        let visible = series.steps().iter().zip(series.values());
        let visible = visible.filter(|(step, _)| (from..=to).contains(*step));
        let broken = visible.filter(|(_, value)| !value.is_finite()).map(|(step, _)| *step as f64).collect();
        let points = |series: &Series| points(series, range, usize::from(columns), settings.is_log_x);
        let mut curve =
            Curve { run, points: points(series), broken, last: series.last(), ..Curve::default() };
        curve.last_shown = curve.last.map(|(_, value)| value);
        if settings.smoothing > 0 {
            let smooth = series.smoothed(SMOOTHING[settings.smoothing]);
            curve.raw = std::mem::replace(&mut curve.points, points(&smooth));
            curve.last_shown = smooth.last().map(|(_, value)| value).or(curve.last_shown);
        }
        curve
    }
}

/// Returns the finite values of the steps `from` to `to`: if there are many, each column's minimum and maximum.
fn points(series: &Series, (from, to): (u64, u64), columns: usize, is_log: bool) -> Vec<(f64, f64)> {
    let few = reduce(series, from, to, 2 * columns, is_log);
    let (low, high) = if few.low.is_empty() { (&few.mean, &[][..]) } else { (&few.low, &few.high[..]) };
    let values = low.iter().enumerate().flat_map(|(at, low)| [Some(low), high.get(at)].map(|one| (at, one)));
    values.filter_map(|(at, value)| Some((few.steps[at] as f64, (*value?)?))).collect()
}

pub(super) fn draw(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let is_wide = area.width >= WIDE;
    let indent = if is_wide { LIST + 1 } else { 0 };
    let rest = Rect { x: area.x + indent, width: area.width - indent, ..area };
    pane(watch, &watch.curves.key, true, rest, screen);
    if is_wide {
        list(watch, Rect { width: LIST, ..area }, screen);
    } else if watch.curves.list.is_some() {
        let over = Rect { width: (LIST + 8).min(area.width), ..area };
        Clear.render(over, screen);
        list(watch, over, screen);
    }
}

fn list(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let keys = watch.listed_keys();
    let (title, selected) = match &watch.curves.list {
        None => ("metrics".to_owned(), keys.iter().position(|key| *key == watch.curves.key)),
        Some((typed, at)) if typed.is_empty() => ("metrics: type to filter".to_owned(), Some(*at)),
        Some((typed, at)) => (format!("metrics with {}", clean(typed)), Some(*at)),
    };
    let inside = titled(plain_title(title), area, screen);
    if keys.is_empty() {
        return nothing("none", inside, screen);
    }
    let items = keys.iter().map(|key| fit(&format!(" {} ", clean(key)), usize::from(inside.width)));
    let mut state = ListState::default().with_selected(selected);
    StatefulWidget::render(List::new(items).highlight_style(Theme::SELECTED), inside, screen, &mut state);
}

pub(super) fn pane(watch: &Watch, key: &str, has_legend: bool, area: Rect, screen: &mut Buffer) {
    let (settings, runs) = (&watch.curves, watch.shown());
    let (from, to) = settings.window.range(watch.extent());
    let curves_of = |key: &str, columns: u16| -> Vec<Curve> {
        let curve = |run: &usize| {
            let series = watch.runs[*run].run.as_ref()?.metrics().get(key)?;
            Some(Curve::new(*run, series, settings, (from, to), columns))
        };
        runs.iter().filter_map(curve).collect()
    };
    let curves = curves_of(key, area.width);
    // Validation losses are drawn as separate dots.
    let evaluations = if key == "loss" { curves_of("val_loss", area.width / 8) } else { Vec::new() };
    let mut inside = titled(title(watch, key, &curves, &evaluations), area, screen);
    if curves.iter().all(|curve| curve.last.is_none()) {
        let why = match runs.is_empty() {
            true => "no run is shown; press Space in Runs to show one".to_owned(),
            false => format!("no {} has been logged yet", clean(key)),
        };
        return nothing(&why, inside, screen);
    }
    if has_legend && runs.len() > 1 {
        let rows = legend(watch, key, &curves, inside);
        let height = rows.len() as u16;
        Paragraph::new(rows).render(inside, screen);
        inside = Rect { y: inside.y + height, height: inside.height - height, ..inside };
    }
    let points = curves.iter().chain(&evaluations).flat_map(|curve| &curve.points);
    let values = points.map(|(_, value)| *value).filter(|value| !settings.is_log_y || *value > 0.0);
    let Some((least, most)) = values.map(|value| (value, value)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    else {
        return nothing("no values in these steps; press 0 to show all steps", inside, screen);
    };
    if inside.width < LEAST.0 || inside.height < LEAST.1 {
        return;
    }
    let (x, x_labels) = Scale::for_steps(from, to, settings.is_log_x);
    let parts = usize::from((inside.height - 2) / 2).min(MOST_PARTS);
    let (y, y_labels) = Scale::for_values(least, most, settings.is_log_y, parts);
    let lines =
        lines(watch, &curves, &evaluations, |(step, value)| Some((x.place(*step)?, y.place(*value)?)));
    let datasets = lines.iter().map(|(points, marker, color)| {
        let is_line = *marker != Marker::Custom('●') && points.len() > 1;
        let graph = if is_line { GraphType::Line } else { GraphType::Scatter };
        Dataset::default().data(points).marker(*marker).graph_type(graph).style(Style::from(*color))
    });
    let axis = || Axis::default().bounds([0.0, 1.0]).style(Theme::QUIET).labels_alignment(Alignment::Right);
    let left = inside.x + 1 + y_labels.iter().map(|label| width(label)).max().unwrap_or(0) as u16;
    let chart =
        Chart::new(datasets.collect()).x_axis(axis().labels(x_labels)).y_axis(axis().labels(y_labels));
    chart.render(inside, screen);
    let broken = curves.iter().flat_map(|curve| &curve.broken).map(|step| (*step, "×", Theme::BAD));
    let front = watch.front().filter(|_| runs.contains(&watch.front)).and_then(|run| run.run.as_ref());
    let events = front.into_iter().flat_map(|run| run.events()).filter_map(|event| {
        let (mark, style) = match event.kind.as_str() {
            "resume" => ("r", Color::Blue.into()),
            "checkpoint" => ("c", Theme::QUIET),
            "skipped" | "failure" => ("!", Theme::BAD),
            _ => return None,
        };
        Some((event.step as f64, mark, style))
    });
    for (step, mark, style) in broken.chain(events) {
        if let Some(place) = x.place(step).filter(|place| (0.0..=1.0).contains(place)) {
            let column = left + (place * f64::from(inside.right() - left - 1)).round() as u16;
            screen.set_string(column, inside.bottom() - 2, mark, style);
        }
    }
}

type Drawn = (Vec<(f64, f64)>, Marker, Color);

/// Returns the lines of a chart, bottom to top. `place` maps points to the unit square.
fn lines(
    watch: &Watch,
    curves: &[Curve],
    evaluations: &[Curve],
    place: impl Fn(&(f64, f64)) -> Option<(f64, f64)>,
) -> Vec<Drawn> {
    let is_one = watch.shown().len() == 1;
    let Theme { has_colours, has_unicode } = watch.theme;
    let has_all = has_colours && has_unicode;
    let line =
        |points: &[(f64, f64)], marker, color| (points.iter().filter_map(&place).collect(), marker, color);
    let mut lines: Vec<Drawn> = Vec::new();
    for curve in curves.iter().filter(|_| has_all && curves.len() <= MOST_WITH_RAW) {
        lines.push(line(&curve.raw, Marker::Braille, Color::DarkGray));
    }
    for curve in curves {
        let marker = match (is_one || has_all, has_unicode) {
            (false, _) => Marker::Custom(label(curve.run)),
            (true, true) => Marker::Braille,
            (true, false) => Marker::Custom('*'),
        };
        lines.push(line(&curve.points, marker, Theme::run(curve.run)));
    }
    for curve in evaluations {
        let color = if is_one { VALIDATION } else { Theme::run(curve.run) };
        lines.push(line(&curve.points, Marker::Custom('●'), color));
    }
    for curve in curves.iter().filter(|_| !is_one) {
        let last = curve.points.last().map_or(&[][..], std::slice::from_ref);
        lines.push(line(last, Marker::Custom(label(curve.run)), Theme::run(curve.run)));
    }
    lines
}

fn title(watch: &Watch, key: &str, curves: &[Curve], evaluations: &[Curve]) -> Line<'static> {
    let is_one = watch.shown().len() == 1;
    let mut line = Line::from(plain_title(clean(key)));
    if let (true, [Curve { run, last_shown: Some(last), .. }]) = (is_one, curves) {
        line.push_span(Span::styled(format!(" {}", value(key, *last)), Theme::run(*run)));
    }
    if let Some((step, last)) = evaluations.iter().find_map(|curve| curve.last) {
        let details = if is_one { format!(" {} in step {step}", value(key, last)) } else { String::new() };
        let style = if is_one { VALIDATION.into() } else { Style::new() };
        line.push_span(Span::styled(format!("  ● val_loss{details}"), style));
    }
    let broken: usize = curves.iter().map(|curve| curve.broken.len()).sum();
    if broken > 0 {
        line.push_span(Span::styled(format!("  × {broken} not a number"), Theme::BAD));
    }
    let CurveSettings { smoothing, window, is_log_x, is_log_y, .. } = watch.curves;
    let (first, last) = watch.extent();
    let (from, to) = window.range((first, last));
    let notes = [
        (smoothing > 0).then(|| format!("smoothed {}", SMOOTHING[smoothing])),
        window.span.map(|_| format!("steps {from}-{to} of {first}-{last}")),
        is_log_y.then(|| "log".to_owned()),
        is_log_x.then(|| "log steps".to_owned()),
    ];
    let notes: Vec<String> = notes.into_iter().flatten().collect();
    if !notes.is_empty() {
        line.push_span(Span::styled(format!("  {}", notes.join(", ")), Theme::QUIET));
    }
    line
}

fn legend(watch: &Watch, key: &str, curves: &[Curve], area: Rect) -> Vec<Line<'static>> {
    let mut rows = vec![Line::from(" ")];
    for Curve { run, last_shown, .. } in curves {
        let last = last_shown.map_or_else(String::new, |last| format!(" {}", value(key, last)));
        let name = fit(&name_of(&watch.runs[*run].folder), 24);
        let style = Style::from(Theme::run(*run));
        let style = if *run == watch.front { style.patch(Theme::TITLE) } else { style };
        let span = Span::styled(format!("{} {name}{last}  ", label(*run)), style);
        let taken = rows[rows.len() - 1].width();
        if taken > 1 && taken + span.width() > usize::from(area.width) {
            rows.push(Line::from(" "));
        }
        let at = rows.len() - 1;
        rows[at].push_span(span);
    }
    rows.truncate(usize::from((area.height / 4).max(1)));
    rows
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
        let curve = Curve::new(0, &series, &settings, (1, 1000), 10);
        let peak = curve.points.iter().map(|(_, value)| *value).fold(0.0, f64::max);
        assert!(curve.points.len() <= 42 && peak == 50.0, "{:?}", curve.points);
        assert_eq!((curve.broken, curve.last, curve.raw.len()), (vec![900.0], Some((1000, 1.0)), 0));
        settings.smoothing = 1;
        let curve = Curve::new(0, &series, &settings, (776, 778), 10);
        assert_eq!(curve.raw, [(776.0, 1.0), (777.0, 50.0), (778.0, 1.0)]);
        assert_eq!(curve.points[..2], [(776.0, 1.0), (777.0, 25.5)]);
        settings.is_log_x = true;
        let log = Curve::new(0, &series, &settings, (1, 1000), 10);
        assert!(log.raw.contains(&(2.0, 1.0)) && log.raw.len() <= 42);
    }

    #[test]
    fn smoothing_is_not_biased_to_zero() {
        let values = [(1, "4.0"), (2, "null"), (3, "2.0")].map(|(step, value)| (step, value.to_owned()));
        let series = series(values.into_iter());
        let settings = CurveSettings { smoothing: 3, ..CurveSettings::default() };
        let curve = Curve::new(0, &series, &settings, (1, 3), 50);
        assert_eq!(curve.points[0], (1.0, 4.0));
        let expected = (0.9 * 0.1 * 4.0 + 0.1 * 2.0) / (1.0 - 0.9 * 0.9);
        assert!((curve.last_shown.unwrap() - expected).abs() < 1e-12);
    }
}
