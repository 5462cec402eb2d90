//! What surrounds every view.

use std::cmp::Ordering;
use std::time::Duration;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::Widget;

use super::super::keys::HELP;
use super::super::state::{View, Watch, label};
use super::super::summary::Summary;
use super::super::text::{clean, duration, fit, short, value, wrap};
use super::super::theme::Theme;
use crate::status::State;
use kiln_process::words::flops_per_s;

/// A look that is older than this is told to be old.
const OLD: Duration = Duration::from_secs(4);

/// The parts of the screen.
pub(super) struct Areas {
    pub head: Rect,
    pub body: Rect,
    pub verdict: Rect,
    pub keys: Rect,
}

/// Divides the screen.
pub(super) fn areas(watch: &Watch, area: Rect) -> Areas {
    let most = if area.height < 30 { 3 } else { 8 };
    let lines = (said(watch, area.width).len() as u16).min(most);
    let row = |y: u16, height: u16| Rect { y: area.y + y, height, ..area };
    let body = area.height - 4 - lines;
    Areas {
        head: row(0, 3),
        body: row(3, body),
        verdict: row(3 + body, lines),
        keys: row(area.height - 1, 1),
    }
}

/// Puts a line on one row.
pub(super) fn put(line: Line<'_>, area: Rect, row: u16, screen: &mut Buffer) {
    if row < area.height {
        line.render(Rect { y: area.y + row, height: 1, ..area }, screen);
    }
}

/// Draws a rule with a title across the top of `area`, and returns what is below.
pub(super) fn titled(title: Line<'_>, area: Rect, screen: &mut Buffer) -> Rect {
    if area.height == 0 {
        return area;
    }
    screen.set_string(area.x, area.y, "─".repeat(usize::from(area.width)), Theme::quiet());
    let mut spans = vec![Span::raw(" ")];
    spans.extend(title.spans);
    spans.push(Span::raw(" "));
    let inside = Rect { x: area.x + 1, width: area.width.saturating_sub(2), ..area };
    put(Line::from(spans), inside, 0, screen);
    Rect { y: area.y + 1, height: area.height - 1, ..area }
}

/// Says that there is nothing to show, and why.
pub(super) fn nothing(why: &str, area: Rect, screen: &mut Buffer) {
    let inside = Rect { x: area.x + 1, width: area.width.saturating_sub(2), ..area };
    for (row, line) in wrap(why, usize::from(inside.width)).into_iter().enumerate() {
        put(Line::styled(line, Theme::quiet()), inside, row as u16, screen);
    }
}

/// The run in front, how far it is, and the views.
pub(super) fn head(watch: &Watch, area: Rect, screen: &mut Buffer) {
    put(Line::styled("kiln watch ", Theme::quiet()).right_aligned(), area, 0, screen);
    if let Some(subject) = watch.subjects.get(watch.at) {
        let state = watch.news[watch.at].state();
        let (style, mark) = Theme::state(state);
        let word = state.map_or_else(|| "unknown".to_owned(), |state| state.to_string());
        let mut spans = vec![Span::raw(" ")];
        if watch.subjects.len() > 1 {
            let number = format!("{} ", label(watch.at));
            spans.push(Span::styled(number, Theme::run(watch.at).patch(Theme::title())));
        }
        let room = usize::from(area.width).saturating_sub(45).max(10);
        spans.push(Span::styled(fit(&name_of(subject.folder()), room), Theme::title()));
        spans.push(Span::raw("  "));
        spans.push(Span::styled(format!("{mark} {word}"), style));
        if watch.subjects.len() > 1 {
            spans.push(Span::styled(
                format!("  run {} of {}", watch.at + 1, watch.subjects.len()),
                Theme::quiet(),
            ));
        }
        put(Line::from(spans), area, 0, screen);
        put(progress(&watch.summaries[watch.at], area.width), area, 1, screen);
    }
    let mut spans = vec![Span::raw(" ")];
    for (index, view) in View::ALL.into_iter().enumerate() {
        let style = if view == watch.view { Theme::chosen() } else { Style::new() };
        spans.push(Span::styled(format!(" {} {} ", index + 1, view.title()), style));
    }
    put(Line::from(spans), area, 2, screen);
}

/// The name of a run, as short as one knows it.
pub(super) fn name_of(folder: &std::path::Path) -> String {
    clean(&folder.file_name().unwrap_or(folder.as_os_str()).to_string_lossy())
}

/// How far a run is, with a bar and its last numbers, as many as there is room for.
fn progress(summary: &Summary, width: u16) -> Line<'static> {
    let Some(step) = summary.step else {
        return Line::styled(" before its first step", Theme::quiet());
    };
    let mut spans = vec![Span::raw(match summary.steps {
        Some(steps) => format!(" step {step}/{steps} "),
        None => format!(" step {step} "),
    })];
    if let Some(share) = summary.share() {
        let columns = usize::from(width / 8).clamp(8, 24);
        let done = (share * columns as f64).floor() as usize;
        spans.push(Span::styled("━".repeat(done), Theme::run(0)));
        spans.push(Span::styled("─".repeat(columns - done), Theme::quiet()));
        spans.push(Span::raw(format!(" {:.0} %", (100.0 * share).floor())));
    }
    let loss = summary.loss.map(|loss| match summary.trend {
        Some(Ordering::Less) => format!("loss {loss:.4} ↓"),
        Some(Ordering::Greater) => format!("loss {loss:.4} ↑"),
        _ => format!("loss {loss:.4}"),
    });
    let speed = match (summary.mfu, summary.tflops) {
        (Some(mfu), _) => Some(format!("mfu {}", value("mfu", mfu))),
        (None, tflops) => tflops.map(|tflops| flops_per_s(1e12 * tflops)),
    };
    let parts = [
        loss,
        summary.left_s.map(|left| format!("{} left", duration(left))),
        summary.tokens_per_s.map(|speed| format!("{} tok/s", short(speed))),
        summary.val_loss.map(|loss| format!("val {loss:.4}")),
        speed,
        summary.peak_bytes.map(|peak| format!("peak {}", value("peak_bytes", peak))),
    ];
    let mut free = usize::from(width).saturating_sub(spans.iter().map(Span::width).sum());
    for part in parts.into_iter().flatten() {
        let span = Span::raw(format!("  {part}"));
        let Some(left) = free.checked_sub(span.width()) else { break };
        free = left;
        spans.push(span);
    }
    Line::from(spans)
}

/// What there is to say about the run in front, in lines.
fn said(watch: &Watch, width: u16) -> Vec<Line<'static>> {
    let Some(news) = watch.front() else { return Vec::new() };
    let columns = usize::from(width).saturating_sub(2);
    let mut lines = Vec::new();
    let mut say = |text: &str, style: Style| {
        let wrapped = wrap(&clean(text), columns).into_iter();
        lines.extend(wrapped.map(|line| Line::styled(format!(" {line}"), style)));
    };
    if let Some(why) = &news.look_error {
        say(&format!("cannot look at the run: {why}"), Theme::bad());
    }
    if let Some(look) = &news.look {
        let age = news.looked.map(|then| watch.now.saturating_duration_since(then)).unwrap_or_default();
        let is_old = age >= OLD && !look.state.is_over();
        let old =
            if is_old { format!(" (as of {} ago)", duration(age.as_secs_f64())) } else { String::new() };
        let style =
            if look.state == State::Healthy { Style::new() } else { Theme::state(Some(look.state)).0 };
        say(&format!("{}: {}{old}", look.state, look.text), style);
    }
    for problem in &news.folder.problems {
        say(&format!("missing: {problem}"), Theme::quiet());
    }
    for note in &watch.notes {
        say(note, Theme::quiet());
    }
    lines
}

/// What there is to say about the run in front: its verdict, and what is missing.
pub(super) fn verdict(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let lines = said(watch, area.width);
    let more = lines.len().saturating_sub(usize::from(area.height));
    for (row, line) in lines.into_iter().take(usize::from(area.height)).enumerate() {
        put(line, area, row as u16, screen);
    }
    if more > 0 && area.height > 0 {
        let text = Line::styled(format!(" … {more} more ",), Theme::quiet()).right_aligned();
        put(text, area, area.height - 1, screen);
    }
}

/// The keys of the view.
pub(super) fn keys(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let own = match watch.view {
        _ if watch.curves.list.is_some() => "type to narrow  up/down choose  Enter take  Esc close",
        View::Overview => "+/- zoom  s smooth  l log  k metric",
        View::Curves => "up/down metric  +/- zoom  left/right pan  s l",
        View::Ranks => "up/down choose  left/right sort  r reverse",
        View::Log => "up/down scroll  left/right whose  w cut",
        View::Samples => "up/down step  PgUp/PgDn scroll",
        View::Runs => "up/down choose  Space hide  PgUp/PgDn scroll",
    };
    let runs = if watch.subjects.len() > 1 { "n/p run  " } else { "" };
    let text = format!(" ? help  q quit  Tab view  {runs}{own}");
    put(Line::styled(fit(&text, usize::from(area.width)), Theme::quiet()), area, 0, screen);
}

/// All keys.
pub(super) fn help(area: Rect, screen: &mut Buffer) {
    let inside = titled(Line::styled("keys", Theme::title()), area, screen);
    // Where the screen is low, there is no room for what only parts them.
    let rows = HELP.iter().filter(|(key, _)| !key.is_empty() || usize::from(inside.height) >= HELP.len());
    for (row, (key, what)) in rows.enumerate() {
        let spans = vec![Span::styled(format!(" {key:<12}"), Theme::title()), Span::raw(*what)];
        put(Line::from(spans), inside, row as u16, screen);
    }
}

/// That there is no run yet, and why.
pub(super) fn no_runs(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let inside = titled(Line::styled("no run yet", Theme::title()), area, screen);
    let mut row = 1;
    for note in &watch.notes {
        for line in wrap(&clean(note), usize::from(inside.width).saturating_sub(2)) {
            put(Line::raw(format!(" {line}")), inside, row, screen);
            row += 1;
        }
        row += 1;
    }
    put(Line::styled(" It is shown as soon as it is there.", Theme::quiet()), inside, row, screen);
}
