//! The frame of every view: titles, the run in front, the verdict on it, and keys.

use std::cmp::Ordering;
use std::path::Path;
use std::time::Duration;

use kiln_sys::words::flops_per_s;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Block, Borders, Paragraph, Tabs, Widget};

use super::super::state::{View, Watch, label};
use super::super::summary::Summary;
use super::super::text::{clean, duration, fit, short, value, width, wrap};
use super::super::theme::Theme;
use crate::status::State;

/// Age at which a look is marked as old.
const OLD: Duration = Duration::from_secs(4);

/// Keys and what they do, for the help.
const HELP: [(&str, &str); 18] = [
    ("Tab, 1-6", "next view (Shift-Tab: the one before); a view by its number"),
    ("n p", "next run, run before"),
    ("?", "this help"),
    ("q, Ctrl-C", "leave; Ctrl-Z stops, fg goes on; Ctrl-L draws all again"),
    ("", ""),
    ("k, up down", "Curves: list of metrics (type to narrow it); metric before, next"),
    ("+ -", "Curves, Overview: half as many steps, twice as many; 0 shows all"),
    ("left right", "Curves: earlier steps, later steps (also < > in Overview)"),
    ("s S", "Curves, Overview: more smoothing, less"),
    ("l L", "Curves, Overview: logarithmic values, logarithmic steps"),
    ("c", "Curves, Overview: curves of this run alone, or of all"),
    ("left right", "Ranks: column to sort by; r reverses the order"),
    ("up down", "Ranks: choose a rank, of which all is told below"),
    ("left right", "Log: whose lines (events, all ranks, one rank); w cuts long ones"),
    ("up down", "Log: scroll, as PgUp PgDn Home; End follows new lines"),
    ("up down", "Samples: earlier step, later step; PgUp PgDn scroll"),
    ("up down", "Runs: choose a run; Space hides it from curves or shows it"),
    ("PgUp PgDn", "Runs: scroll the differences of configurations"),
];

/// Draws a rule with a title across the top of `area`, and returns the rest.
pub(super) fn titled<'a>(title: impl Into<Line<'a>>, area: Rect, screen: &mut Buffer) -> Rect {
    let mut line = Line::from(Span::styled("─ ", Theme::quiet()));
    line.spans.extend(title.into().spans);
    line.push_span(" ");
    let block = Block::new().borders(Borders::TOP).border_style(Theme::quiet()).title(line);
    (&block).render(area, screen);
    block.inner(area)
}

/// A title without details.
pub(super) fn plain_title(text: impl Into<String>) -> Span<'static> {
    Span::styled(text.into(), Theme::title())
}

/// Explains why there is nothing to show.
pub(super) fn nothing(why: &str, area: Rect, screen: &mut Buffer) {
    text(why, usize::from(area.width)).style(Theme::quiet()).render(area, screen);
}

/// `text`, wrapped, with a blank on each side.
pub(super) fn text(text: &str, columns: usize) -> Paragraph<'static> {
    let lines = wrap(text, columns.saturating_sub(2)).into_iter();
    Paragraph::new(lines.map(|line| Line::raw(format!(" {line}"))).collect::<Vec<_>>())
}

/// The name of a run, without the folders above it.
pub(super) fn name_of(folder: &Path) -> String {
    clean(&folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy())
}

/// The run in front, its progress, and the views.
pub(super) fn head(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let [first, second, third] = area.layout(&Layout::vertical([Constraint::Length(1); 3]));
    Line::styled("kiln watch ", Theme::quiet()).right_aligned().render(first, screen);
    if let Some(run) = watch.front() {
        let (style, mark) = Theme::state(run.state());
        let word = run.state().map_or_else(|| "unknown".to_owned(), |state| state.to_string());
        let mut line = Line::from(" ");
        if watch.runs.len() > 1 {
            let style = Theme::title().fg(Theme::run(watch.front));
            line.push_span(Span::styled(format!("{} ", label(watch.front)), style));
        }
        let room = usize::from(area.width).saturating_sub(45).max(10);
        line.push_span(plain_title(fit(&name_of(&run.folder), room)));
        line.push_span("  ");
        line.push_span(Span::styled(format!("{mark} {word}"), style));
        if watch.runs.len() > 1 {
            let place = format!("  run {} of {}", watch.front + 1, watch.runs.len());
            line.push_span(Span::styled(place, Theme::quiet()));
        }
        line.render(first, screen);
        progress(&run.summary, area.width).render(second, screen);
    }
    let titles = View::ALL.iter().enumerate().map(|(at, (_, title))| format!(" {} {title} ", at + 1));
    let chosen = View::ALL.iter().position(|(view, _)| *view == watch.view);
    let tabs = Tabs::new(titles).select(chosen).highlight_style(Theme::chosen()).divider("").padding("", "");
    tabs.render(Rect { x: third.x + 1, width: third.width - 1, ..third }, screen);
}

/// How far a run is: a bar and its last numbers, as many as fit.
fn progress(summary: &Summary, columns: u16) -> Line<'static> {
    let Some(step) = summary.step else {
        return Line::styled(" before its first step", Theme::quiet());
    };
    let steps = summary.steps.map_or_else(String::new, |steps| format!("/{steps}"));
    let mut line = Line::from(format!(" step {step}{steps} "));
    if let Some(share) = summary.share() {
        let columns = usize::from(columns / 8).clamp(8, 24);
        let done = (share * columns as f64).floor() as usize;
        line.push_span(Span::styled("━".repeat(done), Theme::run(0)));
        line.push_span(Span::styled("─".repeat(columns - done), Theme::quiet()));
        line.push_span(format!(" {:.0} %", (100.0 * share).floor()));
    }
    let arrow = match summary.trend {
        Some(Ordering::Less) => " ↓",
        Some(Ordering::Greater) => " ↑",
        _ => "",
    };
    let mfu = summary.mfu.map(|mfu| format!("mfu {}", value("mfu", mfu)));
    let speed = mfu.or(summary.tflops.map(|tflops| flops_per_s(1e12 * tflops)));
    let parts = [
        summary.loss.map(|loss| format!("loss {loss:.4}{arrow}")),
        summary.left_s.map(|left| format!("{} left", duration(left))),
        summary.tokens_per_s.map(|speed| format!("{} tok/s", short(speed))),
        summary.val_loss.map(|loss| format!("val {loss:.4}")),
        speed,
        summary.peak_bytes.map(|peak| format!("peak {}", value("peak_bytes", peak))),
    ];
    for part in parts.into_iter().flatten().map(|part| format!("  {part}")) {
        if line.width() + width(&part) > usize::from(columns) {
            break;
        }
        line.push_span(part);
    }
    line
}

/// The verdict on the run in front and its missing files, in lines.
pub(super) fn verdict(watch: &Watch, columns: u16) -> Vec<Line<'static>> {
    let Some(run) = watch.front() else { return Vec::new() };
    let mut parts: Vec<(String, Style)> = Vec::new();
    if let Some(error) = &run.look_error {
        parts.push((format!("cannot look at the run: {error}"), Theme::bad()));
    }
    if let Some(look) = &run.look {
        let age = run.looked.map(|then| watch.now.saturating_duration_since(then)).unwrap_or_default();
        let is_old = age >= OLD && !look.state.is_over();
        let age =
            if is_old { format!(" (as of {} ago)", duration(age.as_secs_f64())) } else { String::new() };
        let style = Some(Theme::state(Some(look.state)).0).filter(|_| look.state != State::Healthy);
        parts.push((format!("{}: {}{age}", look.state, look.text), style.unwrap_or_default()));
    }
    parts.extend(run.problems.iter().map(|problem| (format!("missing: {problem}"), Theme::quiet())));
    parts.extend(watch.problems.iter().map(|problem| (problem.clone(), Theme::quiet())));
    let wrapped = |(part, style): (String, Style)| {
        let lines = wrap(&clean(&part), usize::from(columns).saturating_sub(2)).into_iter();
        lines.map(move |line| Line::styled(format!(" {line}"), style))
    };
    parts.into_iter().flat_map(wrapped).collect()
}

/// The most important keys of the view, as many as fit.
pub(super) fn hints(watch: &Watch, columns: u16) -> Line<'static> {
    let of_view = match watch.view {
        _ if watch.curves.list.is_some() => "type to narrow  up/down choose  Enter take  Esc close",
        View::Overview => "+/- zoom  s smooth  l log  k metric",
        View::Curves => "up/down metric  +/- zoom  left/right pan  s l",
        View::Ranks => "up/down choose  left/right sort  r reverse",
        View::Log => "up/down scroll  left/right whose  w cut",
        View::Samples => "up/down step  PgUp/PgDn scroll",
        View::Runs => "up/down choose  Space hide  PgUp/PgDn scroll",
    };
    let of_runs = if watch.runs.len() > 1 { "n/p run  " } else { "" };
    let mut line = " ? help  q quit  Tab view".to_owned();
    for hint in format!("{of_runs}{of_view}").split("  ") {
        if width(&line) + 2 + width(hint) > usize::from(columns) {
            break;
        }
        line = format!("{line}  {hint}");
    }
    Line::styled(line, Theme::quiet())
}

/// All keys.
pub(super) fn help(area: Rect, screen: &mut Buffer) {
    let inside = titled(plain_title("keys"), area, screen);
    // A low screen has no room for the blank line.
    let rows = HELP.iter().filter(|(key, _)| !key.is_empty() || usize::from(inside.height) >= HELP.len());
    let line = |(key, what): &(&'static str, &'static str)| {
        Line::from(vec![plain_title(format!(" {key:<12}")), Span::raw(*what)])
    };
    Paragraph::new(rows.map(line).collect::<Vec<_>>()).render(inside, screen);
}

/// Explains why there is no run yet.
pub(super) fn no_runs(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let inside = titled(plain_title("no run yet"), area, screen);
    let problems: String = watch.problems.iter().map(|problem| format!("\n{}\n", clean(problem))).collect();
    let promise = if problems.is_empty() { "\n" } else { "" };
    let message = format!("{problems}{promise}\nIt is shown as soon as it is there.");
    text(&message, usize::from(inside.width)).render(inside, screen);
}
