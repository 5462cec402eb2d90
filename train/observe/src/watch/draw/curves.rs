//! Curves of a metric over the steps of one or several runs.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::Widget;

use super::super::chart::{Chart, Line as Drawn, dots};
use super::super::curve::{Curve, SMOOTHING};
use super::super::state::{Watch, label};
use super::super::text::{clean, fit, value};
use super::super::theme::Theme;
use super::super::ticks::Axis;
use super::frame::{name_of, nothing, put, titled};

/// From this width on, the list of metrics is always shown.
const WIDE: u16 = 120;

/// Columns of the list of metrics.
const LIST: u16 = 28;

/// Runs with whose curves the values before smoothing are shown as well.
const MOST_WITH_RAW: usize = 2;

/// The view.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let key = watch.curves.key.clone();
    if area.width >= WIDE {
        let beside = Rect { width: LIST, ..area };
        list(watch, beside, screen);
        let rest = Rect { x: area.x + LIST + 1, width: area.width - LIST - 1, ..area };
        pane(watch, &key, true, rest, screen);
        return;
    }
    pane(watch, &key, true, area, screen);
    if watch.curves.list.is_some() {
        let over = Rect { width: (LIST + 8).min(area.width), ..area };
        for row in over.top()..over.bottom() {
            screen.set_string(over.x, row, " ".repeat(usize::from(over.width)), Style::reset());
        }
        list(watch, over, screen);
    }
}

fn list(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let typed = watch.curves.list.as_ref().map(|(typed, _)| typed.as_str());
    let title = match typed {
        Some("") => "metrics: type to narrow".to_owned(),
        Some(typed) => format!("metrics with {}", clean(typed)),
        None => "metrics".to_owned(),
    };
    let inside = titled(Line::styled(title, Theme::title()), area, screen);
    let keys = watch.listed();
    let chosen = match &watch.curves.list {
        Some((_, at)) => Some(*at),
        None => keys.iter().position(|key| *key == watch.curves.key),
    };
    let page = usize::from(inside.height).max(1);
    let first = chosen.map_or(0, |at| (at + 1).saturating_sub(page));
    if keys.is_empty() {
        nothing("none", inside, screen);
    }
    for (row, (index, key)) in keys.iter().enumerate().skip(first).take(page).enumerate() {
        let style = if Some(index) == chosen { Theme::chosen() } else { Style::new() };
        let text = fit(&format!(" {} ", clean(key)), usize::from(inside.width));
        put(Line::styled(text, style), inside, row as u16, screen);
    }
}

/// A chart of `key` with its title; with the names of runs if they are `named`.
pub(super) fn pane(watch: &mut Watch, key: &str, is_named: bool, area: Rect, screen: &mut Buffer) {
    let runs = watch.shown();
    let columns = dots(area.width);
    let mut curves: Vec<(usize, Curve)> = Vec::new();
    for run in &runs {
        curves.extend(watch.curve(*run, key, columns).map(|curve| (*run, curve)));
    }
    // Validation is shown with what it validates.
    let mut evaluations: Vec<(usize, Curve)> = Vec::new();
    for run in runs.iter().filter(|_| key == "loss") {
        evaluations.extend(watch.curve(*run, "val_loss", columns).map(|curve| (*run, curve)));
    }
    let is_one = runs.len() == 1;
    let title = title(watch, key, &curves, &evaluations, is_one);
    let mut inside = titled(title, area, screen);
    if curves.iter().all(|(_, curve)| curve.front().is_empty()) {
        let why = match runs.is_empty() {
            true => "no run is shown; Space in Runs shows one".to_owned(),
            false => format!("no {} has been logged yet", clean(key)),
        };
        return nothing(&why, inside, screen);
    }
    if is_named && !is_one {
        let rows = legend(watch, key, &curves, inside, screen);
        inside = Rect { y: inside.y + rows, height: inside.height - rows, ..inside };
    }
    let theme = watch.theme;
    let (from, to) = watch.curves.window.range(watch.curves.extent.0, watch.curves.extent.1);
    let is_log_x = watch.curves.is_log_x;
    let from = if is_log_x { from.max(1) } else { from };
    let is_log_y = watch.curves.is_log_y;
    let in_window =
        |point: &&(f64, f64)| (from as f64..=to as f64).contains(&point.0) && (!is_log_y || point.1 > 0.0);
    let fronts = curves.iter().flat_map(|(_, curve)| curve.front());
    let values = fronts.chain(evaluations.iter().flat_map(|(_, curve)| &curve.raw)).filter(in_window);
    let Some((least, most)) =
        values.map(|(_, value)| (*value, *value)).reduce(|a, b| (a.0.min(b.0), a.1.max(b.1)))
    else {
        return nothing("nothing to show in these steps; 0 shows all", inside, screen);
    };
    // Dots would lie on each other.
    let is_dense = |curve: &Curve| curve.raw.len() > usize::from(inside.width / 4);
    let mut lines = Vec::new();
    let has_all = theme.has_colours && theme.has_unicode;
    let tells_by_character = !is_one && !has_all;
    if has_all && curves.len() <= MOST_WITH_RAW {
        let raw = curves.iter().filter(|(_, curve)| !curve.smooth.is_empty());
        lines.extend(raw.map(|(_, curve)| Drawn {
            points: &curve.raw,
            style: Theme::quiet(),
            is_joined: true,
            character: None,
            label: None,
        }));
    }
    lines.extend(curves.iter().map(|(run, curve)| Drawn {
        points: curve.front(),
        style: Theme::run(*run),
        is_joined: true,
        character: tells_by_character.then(|| label(*run)),
        label: (!is_one).then(|| label(*run)),
    }));
    lines.extend(evaluations.iter().map(|(run, curve)| Drawn {
        points: &curve.raw,
        style: if is_one { validation() } else { Theme::run(*run) },
        is_joined: is_dense(curve),
        character: (!is_dense(curve) || tells_by_character).then_some('●'),
        label: is_dense(curve).then_some('v'),
    }));
    let mut marks = Vec::new();
    marks.extend(curves.iter().flat_map(|(_, curve)| &curve.broken).map(|step| (*step, "×", Theme::bad())));
    marks.extend(events(watch));
    let x = Axis::around(from as f64, to.max(from + 1) as f64, is_log_x);
    let y = Axis::around(least, most, is_log_y);
    Chart { lines, x, y, has_unicode: theme.has_unicode, marks }.render(inside, screen);
}

fn validation() -> Style {
    Style::new().fg(Color::Yellow)
}

/// What has happened to the run in front, on the axis of steps.
fn events(watch: &Watch) -> Vec<(f64, &'static str, Style)> {
    let Some(news) = watch.front().filter(|_| watch.shown().contains(&watch.at)) else { return Vec::new() };
    let events = news.folder.events.iter();
    let mark = |kind: &str| match kind {
        "resume" => Some(("r", Style::new().fg(Color::Blue))),
        "checkpoint" => Some(("c", Theme::quiet())),
        "skipped" | "failure" => Some(("!", Theme::bad())),
        _ => None,
    };
    events
        .filter_map(|event| mark(&event.kind).map(|(mark, style)| (event.step as f64, mark, style)))
        .collect()
}

fn title(
    watch: &Watch,
    key: &str,
    curves: &[(usize, Curve)],
    evaluations: &[(usize, Curve)],
    is_one: bool,
) -> Line<'static> {
    let mut spans = vec![Span::styled(clean(key), Theme::title())];
    let last = |curve: &Curve| curve.last_smooth.or(curve.last.map(|(_, last)| last));
    if let ([(run, curve)], true) = (curves, is_one) {
        spans
            .extend(last(curve).map(|last| Span::styled(format!(" {}", value(key, last)), Theme::run(*run))));
    }
    if let Some((step, last)) = evaluations.iter().find_map(|(_, curve)| curve.last) {
        let text = if is_one {
            format!("  ● val_loss {} in step {step}", value(key, last))
        } else {
            "  ● val_loss".to_owned()
        };
        let style = if is_one { validation() } else { Style::new() };
        spans.push(Span::styled(text, style));
    }
    let broken: usize = curves.iter().map(|(_, curve)| curve.broken.len()).sum();
    if broken > 0 {
        spans.push(Span::styled(format!("  × {broken} not a number"), Theme::bad()));
    }
    let set = &watch.curves;
    let mut words = Vec::new();
    if set.smoothing > 0 {
        words.push(format!("smoothed {}", SMOOTHING[set.smoothing]));
    }
    if !set.window.is_all() {
        let (from, to) = set.window.range(set.extent.0, set.extent.1);
        words.push(format!("steps {from}-{to} of {}-{}", set.extent.0, set.extent.1));
    }
    match (set.is_log_y, set.is_log_x) {
        (true, true) => words.push("log log".to_owned()),
        (true, false) => words.push("log".to_owned()),
        (false, true) => words.push("log steps".to_owned()),
        (false, false) => {}
    }
    if !words.is_empty() {
        spans.push(Span::styled(format!("  {}", words.join(", ")), Theme::quiet()));
    }
    Line::from(spans)
}

/// The names of runs with their last values. Returns the number of rows.
fn legend(watch: &Watch, key: &str, curves: &[(usize, Curve)], area: Rect, screen: &mut Buffer) -> u16 {
    let most = (area.height / 4).max(1);
    let mut rows: Vec<Vec<Span<'static>>> = vec![vec![Span::raw(" ")]];
    for (run, curve) in curves {
        let Some(subject) = watch.subjects.get(*run) else { continue };
        let last = curve.last_smooth.or(curve.last.map(|(_, last)| last));
        let last = last.map_or_else(String::new, |last| format!(" {}", value(key, last)));
        let text = format!("{} {}{last}  ", label(*run), fit(&name_of(subject.folder()), 24));
        let style = Theme::run(*run);
        let span = Span::styled(text, if *run == watch.at { style.patch(Theme::title()) } else { style });
        let taken: usize = rows.last().into_iter().flatten().map(Span::width).sum();
        if taken > 1 && taken + span.width() > usize::from(area.width) {
            rows.push(vec![Span::raw(" ")]);
        }
        if let Some(row) = rows.last_mut() {
            row.push(span);
        }
    }
    rows.truncate(usize::from(most));
    let count = rows.len() as u16;
    for (row, spans) in rows.into_iter().enumerate() {
        put(Line::from(spans), area, row as u16, screen);
    }
    count
}
