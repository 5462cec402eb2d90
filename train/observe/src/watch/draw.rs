//! Draws the screen: header, view, state of the current run, and key hints.

use std::time::Duration;

use kiln_sys::words::flops_per_s;
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::Style;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Tabs, Widget};

use super::format::{
    clean, duration, fit, name_of, paragraph, plain_title, short, titled, value, width, wrap,
};
use super::keys::KEYS;
use super::state::{View, Watch, label};
use super::theme::Theme;
use super::{curves, log_and_samples, ranks, runs};
use crate::page::Progress;
use crate::status::State;

const LEAST: (u16, u16) = (40, 10);

const LARGE: (u16, u16) = (120, 32);

const MORE: [&str; 6] = ["tokens_per_s", "grad_norm", "lr", "mfu", "step_s", "peak_bytes"];
const MOST_MORE: usize = 3;

const OLD: Duration = Duration::from_secs(4);

pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    if area.width < LEAST.0 || area.height < LEAST.1 {
        return Line::raw(format!("too small: {}x{} at least", LEAST.0, LEAST.1)).render(area, screen);
    }
    let verdict = verdict(watch, area.width);
    let rows = verdict.len().min(if area.height < 30 { 3 } else { 8 });
    let rows =
        [Constraint::Length(3), Constraint::Fill(1), Constraint::Length(rows as u16), Constraint::Length(1)];
    let [top, body, below, bottom] = area.layout(&Layout::vertical(rows));
    head(watch, top, screen);
    let hidden = verdict.len() - usize::from(below.height);
    Paragraph::new(verdict).render(below, screen);
    if let Some(last) = below.rows().next_back().filter(|_| hidden > 0) {
        Line::styled(format!(" … {hidden} more "), Theme::QUIET).right_aligned().render(last, screen);
    }
    hints(watch, bottom.width).render(bottom, screen);
    match watch.view {
        _ if watch.shows_help => help(body, screen),
        _ if watch.runs.is_empty() => no_runs(watch, body, screen),
        View::Overview => overview(watch, body, screen),
        View::Curves => curves::draw(watch, body, screen),
        View::Ranks => ranks::draw(watch, body, screen),
        View::Log => log_and_samples::draw_log(watch, body, screen),
        View::Samples => log_and_samples::draw_samples(watch, body, screen),
        View::Runs => runs::draw(watch, body, screen),
    }
    watch.theme.apply(screen);
}

fn head(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let [first, second, third] = area.layout(&Layout::vertical([Constraint::Length(1); 3]));
    Line::styled("kiln watch ", Theme::QUIET).right_aligned().render(first, screen);
    if let Some(run) = watch.front() {
        let (style, state) = Theme::state(run.state());
        let mut line = Line::from(" ");
        if watch.runs.len() > 1 {
            let style = Theme::TITLE.fg(Theme::run(watch.front));
            line.push_span(Span::styled(format!("{} ", label(watch.front)), style));
        }
        let room = usize::from(area.width).saturating_sub(45).max(10);
        line.push_span(plain_title(fit(&name_of(&run.folder), room)));
        line.push_span(Span::styled(format!("  {state}"), style));
        if watch.runs.len() > 1 {
            let place = format!("  run {} of {}", watch.front + 1, watch.runs.len());
            line.push_span(Span::styled(place, Theme::QUIET));
        }
        line.render(first, screen);
        progress(&run.progress, area.width).render(second, screen);
    }
    let titles = View::ALL.iter().enumerate().map(|(at, view)| format!(" {} {view:?} ", at + 1));
    let tabs = Tabs::new(titles).select(watch.view as usize).highlight_style(Theme::SELECTED);
    tabs.divider("").padding("", "").render(Rect { x: third.x + 1, width: third.width - 1, ..third }, screen);
}

fn progress(run: &Progress, columns: u16) -> Line<'static> {
    let Some(step) = run.step else {
        return Line::styled(" no step has been logged yet", Theme::QUIET);
    };
    let steps = run.steps.map_or_else(String::new, |steps| format!("/{steps}"));
    let mut line = Line::from(format!(" step {step}{steps} "));
    if let Some(steps @ 1..) = run.steps {
        let share = (step as f64 / steps as f64).min(1.0);
        let columns = usize::from(columns / 8).clamp(8, 24);
        let done = (share * columns as f64).floor() as usize;
        line.push_span(Span::styled("━".repeat(done), Theme::run(0)));
        line.push_span(Span::styled("─".repeat(columns - done), Theme::QUIET));
        line.push_span(format!(" {:.0} %", (100.0 * share).floor()));
    }
    let mfu = run.mfu.map(|mfu| format!("mfu {}", value("mfu", mfu)));
    let parts = [
        run.loss.map(|loss| format!("loss {loss:.4}")),
        run.eta_s.map(|left| format!("{} left", duration(left))),
        run.tokens_per_s.map(|speed| format!("{} tok/s", short(speed))),
        run.val_loss.map(|loss| format!("val {loss:.4}")),
        mfu.or(run.tflops.map(|tflops| flops_per_s(1e12 * tflops))),
        run.peak_bytes.map(|peak| format!("peak {}", value("peak_bytes", peak))),
    ];
    for part in parts.into_iter().flatten().map(|part| format!("  {part}")) {
        if line.width() + width(&part) > usize::from(columns) {
            break;
        }
        line.push_span(part);
    }
    line
}

fn verdict(watch: &Watch, columns: u16) -> Vec<Line<'static>> {
    let Some(run) = watch.front() else { return Vec::new() };
    let mut parts: Vec<(String, Style)> = Vec::new();
    if let Some(error) = &run.look_error {
        parts.push((format!("cannot read the state of the run: {error}"), Theme::BAD));
    }
    if let Some(look) = &run.look {
        let age = run.looked.map(|then| watch.now.saturating_duration_since(then)).unwrap_or_default();
        let is_old = age >= OLD && !look.state.is_over();
        let age =
            if is_old { format!(" (as of {} ago)", duration(age.as_secs_f64())) } else { String::new() };
        let style = Some(Theme::state(Some(look.state)).0).filter(|_| look.state != State::Healthy);
        parts.push((format!("{}: {}{age}", look.state, look.text), style.unwrap_or_default()));
    }
    parts.extend(run.problems.iter().map(|problem| (format!("missing: {problem}"), Theme::QUIET)));
    parts.extend(watch.problems.iter().map(|problem| (problem.clone(), Theme::QUIET)));
    let wrapped = |(part, style): (String, Style)| {
        let lines = wrap(&clean(&part), usize::from(columns).saturating_sub(2)).into_iter();
        lines.map(move |line| Line::styled(format!(" {line}"), style))
    };
    parts.into_iter().flat_map(wrapped).collect()
}

fn hints(watch: &Watch, columns: u16) -> Line<'static> {
    let mut line = String::new();
    let list = "type to filter  up/down select  Enter take  Esc close";
    let is_useful = |hint: &&str| watch.runs.len() > 1 || *hint != "n/p run";
    let of_view = KEYS.iter().filter(|(views, _)| views.contains(&watch.view)).map(|(_, [.., hint])| *hint);
    let hints = if watch.curves.list.is_some() { vec![list] } else { of_view.filter(is_useful).collect() };
    for hint in hints.iter().flat_map(|hints| hints.split("  ")).filter(|hint| !hint.is_empty()) {
        if width(&line) + 2 + width(hint) > usize::from(columns) {
            break;
        }
        line += &format!("{}{hint}", if line.is_empty() { " " } else { "  " });
    }
    Line::styled(line, Theme::QUIET)
}

fn help(area: Rect, screen: &mut Buffer) {
    let inside = titled(plain_title("keys"), area, screen);
    let line = |(_, [keys, effect, _]): &(_, [&'static str; 3])| {
        Line::from(vec![plain_title(format!(" {keys:<12}")), Span::raw(*effect)])
    };
    Paragraph::new(KEYS.iter().map(line).collect::<Vec<_>>()).render(inside, screen);
}

fn no_runs(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let inside = titled(plain_title("no run yet"), area, screen);
    let problems: String = watch.problems.iter().map(|problem| format!("\n{}\n", clean(problem))).collect();
    let message = format!("{problems}\nA run appears here as soon as its folder exists.");
    paragraph(&message, inside.width).render(inside, screen);
}

fn overview(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let ranks = watch.front().and_then(|run| run.look.as_ref()).map_or(0, |look| look.ranks.len()) as u16;
    let key = watch.curves.key.as_str();
    let split = |area: Rect, low: u16| {
        area.layout(&Layout::vertical([Constraint::Fill(1), Constraint::Length(low)])) as [Rect; 2]
    };
    if area.width < LARGE.0 || area.height < LARGE.1 {
        // Ranks use at most half of the height. Without ranks, the log is more useful.
        let low = if ranks == 0 { area.height / 3 } else { (ranks + 2).min(area.height / 2) };
        let [above, below] = split(area, low);
        curves::pane(watch, key, true, above, screen);
        if ranks == 0 {
            log_and_samples::log(watch, 0, true, below, screen);
        } else {
            ranks::pane(watch, below, screen);
        }
        return;
    }
    let left = Constraint::Length(area.width * 52 / 100);
    let [left, right] = area.layout(&Layout::horizontal([left, Constraint::Fill(1)]).spacing(2));
    let keys = watch.keys();
    let more = MORE.into_iter().filter(|more| *more != key && keys.contains(more));
    let more: Vec<&str> = more.take(MOST_MORE).collect();
    let mut rest = left;
    for more in more.into_iter().rev() {
        let [above, below] = split(rest, area.height / 2 / MOST_MORE as u16);
        rest = above;
        curves::pane(watch, more, false, below, screen);
    }
    curves::pane(watch, key, true, rest, screen);
    let table = (ranks + 3).clamp(4, area.height / 2);
    let [above, below] = split(right, area.height - table);
    ranks::pane(watch, above, screen);
    let output = below.height * 6 / 10;
    let [output, samples] = split(below, below.height - output);
    log_and_samples::log(watch, 0, true, output, screen);
    log_and_samples::last_sample(watch, samples, screen);
}
