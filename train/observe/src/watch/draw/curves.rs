//! Curves of a metric over the steps of one or several runs.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Clear, List, ListState, Paragraph, StatefulWidget, Widget};

use super::super::chart::{Axis, Chart, Line as Drawn};
use super::super::curve::{Curve, SMOOTHING};
use super::super::state::{Watch, label};
use super::super::text::{clean, fit, value};
use super::super::theme::Theme;
use super::frame::{name_of, nothing, plain_title, titled};

/// Width at which the list of metrics is always shown.
const WIDE: u16 = 120;

/// Columns of the list of metrics.
const LIST: u16 = 28;

/// Up to this number of runs, values before smoothing are shown as well.
const MOST_WITH_RAW: usize = 2;

/// The colour of validation values of a single run.
const VALIDATION: Color = Color::Yellow;

/// The curve of a run, by its number.
type OfRun = (usize, Curve);

/// Draws the view.
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

/// Draws the list of metrics.
fn list(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let keys = watch.listed_keys();
    let (title, chosen) = match &watch.curves.list {
        None => ("metrics".to_owned(), keys.iter().position(|key| *key == watch.curves.key)),
        Some((typed, at)) if typed.is_empty() => ("metrics: type to narrow".to_owned(), Some(*at)),
        Some((typed, at)) => (format!("metrics with {}", clean(typed)), Some(*at)),
    };
    let inside = titled(plain_title(title), area, screen);
    if keys.is_empty() {
        return nothing("none", inside, screen);
    }
    let items = keys.iter().map(|key| fit(&format!(" {} ", clean(key)), usize::from(inside.width)));
    let mut state = ListState::default().with_selected(chosen);
    StatefulWidget::render(List::new(items).highlight_style(Theme::chosen()), inside, screen, &mut state);
}

/// Draws a chart of the metric `key` with its title, and with the names of the runs if `is_named`.
pub(super) fn pane(watch: &Watch, key: &str, is_named: bool, area: Rect, screen: &mut Buffer) {
    let runs = watch.shown();
    let curves_of = |key: &str| -> Vec<OfRun> {
        runs.iter().filter_map(|run| Some((*run, watch.curve(*run, key, area.width)?))).collect()
    };
    let curves = curves_of(key);
    // Validation is shown with the loss.
    let evaluations = if key == "loss" { curves_of("val_loss") } else { Vec::new() };
    let is_one = runs.len() == 1;
    let mut inside = titled(title(watch, key, &curves, &evaluations), area, screen);
    if curves.iter().all(|(_, curve)| curve.front().is_empty()) {
        let why = match runs.is_empty() {
            true => "no run is shown; Space in Runs shows one".to_owned(),
            false => format!("no {} has been logged yet", clean(key)),
        };
        return nothing(&why, inside, screen);
    }
    if is_named && !is_one {
        let rows = legend(watch, key, &curves, inside);
        let height = rows.len() as u16;
        Paragraph::new(rows).render(inside, screen);
        inside = Rect { y: inside.y + height, height: inside.height - height, ..inside };
    }
    let settings = &watch.curves;
    let (is_log_x, is_log_y) = (settings.is_log_x, settings.is_log_y);
    let (from, to) = settings.window.range(watch.extent());
    let from = if is_log_x { from.max(1) } else { from };
    let is_visible =
        |point: &&(f64, f64)| (from as f64..=to as f64).contains(&point.0) && (!is_log_y || point.1 > 0.0);
    let points = curves.iter().flat_map(|(_, curve)| curve.front());
    let points = points.chain(evaluations.iter().flat_map(|(_, curve)| &curve.raw)).filter(is_visible);
    let Some((least, most)) =
        points.map(|(_, value)| (*value, *value)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    else {
        return nothing("nothing to show in these steps; 0 shows all", inside, screen);
    };
    let broken = curves.iter().flat_map(|(_, curve)| &curve.broken).map(|step| (*step, "×", Theme::bad()));
    let chart = Chart {
        lines: lines(watch, &curves, &evaluations, inside),
        x: Axis::around(from as f64, to.max(from + 1) as f64, is_log_x),
        y: Axis::around(least, most, is_log_y),
        has_unicode: watch.theme.has_unicode,
        marks: broken.chain(events(watch)).collect(),
    };
    chart.render(inside, screen);
}

fn lines<'a>(watch: &Watch, curves: &'a [OfRun], evaluations: &'a [OfRun], area: Rect) -> Vec<Drawn<'a>> {
    let is_one = watch.shown().len() == 1;
    let has_all = watch.theme.has_colours && watch.theme.has_unicode;
    let needs_characters = !is_one && !has_all;
    let raw = curves
        .iter()
        .filter(|(_, curve)| has_all && curves.len() <= MOST_WITH_RAW && !curve.smooth.is_empty());
    let raw = raw.map(|(_, curve)| Drawn {
        points: &curve.raw,
        color: Color::DarkGray,
        is_joined: true,
        character: None,
        label: None,
    });
    let fronts = curves.iter().map(|(run, curve)| Drawn {
        points: curve.front(),
        color: Theme::run(*run),
        is_joined: true,
        character: needs_characters.then(|| label(*run)),
        label: (!is_one).then(|| label(*run)),
    });
    let evaluations = evaluations.iter().map(|(run, curve)| {
        // Dots would lie on each other.
        let is_dense = curve.raw.len() > usize::from(area.width / 4);
        Drawn {
            points: &curve.raw,
            color: if is_one { VALIDATION } else { Theme::run(*run) },
            is_joined: is_dense,
            character: (!is_dense || needs_characters).then_some('●'),
            label: is_dense.then_some('v'),
        }
    });
    raw.chain(fronts).chain(evaluations).collect()
}

/// Events of the run in front, as marks on the axis of steps.
fn events(watch: &Watch) -> Vec<(f64, &'static str, Style)> {
    let run = watch.front().filter(|_| watch.shown().contains(&watch.front)).and_then(|run| run.run.as_ref());
    let mark = |kind: &str| match kind {
        "resume" => Some(("r", Color::Blue.into())),
        "checkpoint" => Some(("c", Theme::quiet())),
        "skipped" | "failure" => Some(("!", Theme::bad())),
        _ => None,
    };
    let marks = run.into_iter().flat_map(|run| run.events()).filter_map(|event| {
        let (mark, style) = mark(&event.kind)?;
        Some((event.step as f64, mark, style))
    });
    marks.collect()
}

fn title(watch: &Watch, key: &str, curves: &[OfRun], evaluations: &[OfRun]) -> Line<'static> {
    let is_one = watch.shown().len() == 1;
    let mut line = Line::from(plain_title(clean(key)));
    if let ([(run, curve)], true) = (curves, is_one)
        && let Some(last) = curve.last_value()
    {
        line.push_span(Span::styled(format!(" {}", value(key, last)), Theme::run(*run)));
    }
    if let Some((step, last)) = evaluations.iter().find_map(|(_, curve)| curve.last) {
        let details = if is_one { format!(" {} in step {step}", value(key, last)) } else { String::new() };
        let style = if is_one { VALIDATION.into() } else { Style::new() };
        line.push_span(Span::styled(format!("  ● val_loss{details}"), style));
    }
    let broken: usize = curves.iter().map(|(_, curve)| curve.broken.len()).sum();
    if broken > 0 {
        line.push_span(Span::styled(format!("  × {broken} not a number"), Theme::bad()));
    }
    let settings = &watch.curves;
    let (first, last) = watch.extent();
    let (from, to) = settings.window.range((first, last));
    let smoothing = format!("smoothed {}", SMOOTHING[settings.smoothing]);
    let scale = match (settings.is_log_y, settings.is_log_x) {
        (true, true) => Some("log log"),
        (true, false) => Some("log"),
        (false, true) => Some("log steps"),
        (false, false) => None,
    };
    let words = [
        (settings.smoothing > 0).then_some(smoothing),
        (!settings.window.is_all()).then(|| format!("steps {from}-{to} of {first}-{last}")),
        scale.map(str::to_owned),
    ];
    let words: Vec<String> = words.into_iter().flatten().collect();
    if !words.is_empty() {
        line.push_span(Span::styled(format!("  {}", words.join(", ")), Theme::quiet()));
    }
    line
}

/// Names of runs with their last values, in rows.
fn legend(watch: &Watch, key: &str, curves: &[OfRun], area: Rect) -> Vec<Line<'static>> {
    let mut rows = vec![Line::from(" ")];
    for (run, curve) in curves {
        let last = curve.last_value().map_or_else(String::new, |last| format!(" {}", value(key, last)));
        let name = fit(&name_of(&watch.runs[*run].folder), 24);
        let style = Style::from(Theme::run(*run));
        let style = if *run == watch.front { style.patch(Theme::title()) } else { style };
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
