//! The screen that shows the current run's ranks.

use kiln_sys::words::{in_ranges, number_of, size};
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Row, StatefulWidget, Table, TableState, Widget};

use super::feed::Snapshot;
use super::format::{bytes, clean, fit, nothing, paragraph, plain_title, titled, width};
use super::state::Watch;
use super::theme::Theme;
use crate::status::{Call, Look, ProcessLook, RankLook};

const DETAILS: u16 = 5;

/// Longer text is cut to this number of columns.
const MOST: usize = 24;

/// Title, usual width, order of omission if there is no room (smallest first), and true for text columns.
pub(super) const COLUMNS: [(&str, usize, usize, bool); 12] = [
    ("rank", 6, 12, false),
    ("step", 5, 7, false),
    ("doing", 9, 11, true),
    ("module", 9, 4, true),
    ("collective", 14, 10, true),
    ("for", 6, 9, false),
    ("awaits", 7, 8, true),
    ("mem", 5, 6, false),
    ("peak", 5, 2, false),
    ("cpu", 4, 1, false),
    ("gpu", 4, 5, false),
    ("°C", 3, 3, false),
];

struct Rank<'a> {
    look: &'a RankLook,
    is_culprit: bool,
    /// Text of each column, and the number by which it is sorted first.
    cells: [(String, f64); COLUMNS.len()],
}

impl<'a> Rank<'a> {
    fn new(run: &Snapshot, look: &Look, rank: &'a RankLook) -> Self {
        let (pending, doing) = (rank.pending.as_ref(), rank.activity.as_ref());
        let is_culprit = look.culprits.contains(&rank.rank);
        let gauges = run.gauges.get(&rank.rank).copied().unwrap_or_default();
        let text = |text: Option<&str>| (clean(text.unwrap_or_default()), 0.0);
        let number = |value: Option<f64>, text: &dyn Fn(f64) -> String| match value {
            Some(value) => (text(value), -value),
            None => ("-".to_owned(), f64::INFINITY),
        };
        let memory =
            |count: Option<u64>| number(count.map(|count| count as f64), &|count| bytes(count as u64));
        let percent = |share: Option<f64>| number(share, &|share| format!("{:.0}%", 100.0 * share));
        let step = match rank.step {
            None => "-".to_owned(),
            Some(0) => "start".to_owned(),
            Some(step) => step.to_string(),
        };
        let awaited = if rank.waits_for.is_empty() { "-".to_owned() } else { in_ranges(&rank.waits_for) };
        let cells = [
            (format!("{}{:>5}", if is_culprit { "!" } else { " " }, rank.rank), rank.rank as f64),
            (step, rank.step.map_or(-1.0, |step| step as f64)),
            text(doing.map(|doing| &*doing.name)),
            text(pending.or(rank.last.as_ref()).map(|call| &*call.module)),
            (pending.map_or_else(|| "-".to_owned(), |call| call.operation.to_string()), 0.0),
            number(
                Some(pending.map(|call| call.seconds).or(doing.map(|doing| doing.seconds)).unwrap_or(0.0)),
                &seconds,
            ),
            (awaited, -(rank.waits_for.len() as f64)),
            memory(rank.bytes),
            memory(rank.peak_bytes),
            percent(gauges.cpu),
            percent(gauges.gpu),
            number(gauges.celsius, &|degrees| format!("{degrees:.0}")),
        ];
        Rank { look: rank, is_culprit, cells }
    }

    fn row(&self, columns: &[(usize, usize)]) -> Row<'static> {
        let cell = |(column, width): &(usize, usize)| {
            let (title, _, _, is_text) = COLUMNS[*column];
            let style = match title {
                _ if self.is_culprit => Style::new(),
                "module" if self.look.pending.is_none() => Theme::QUIET,
                "collective" if self.look.pending.is_some() => Color::Blue.into(),
                "awaits" if !self.look.waits_for.is_empty() => Color::Yellow.into(),
                _ => Style::new(),
            };
            let line = Line::styled(fit(&self.cells[*column].0, *width), style);
            Cell::new(if is_text { line } else { line.right_aligned() })
        };
        match &self.look.silent {
            _ if columns.is_empty() => Row::default(),
            None => Row::new(columns.iter().map(cell)),
            Some(silent) => {
                let room: usize = columns[1..].iter().map(|(_, width)| width + 1).sum();
                let silent = Cell::new(fit(&clean(silent), room)).column_span(columns.len() as u16 - 1);
                Row::new([cell(&columns[0]), silent]).style(Theme::QUIET)
            }
        }
        .style(if self.is_culprit { Theme::BAD } else { Style::new() })
    }
}

fn seconds(seconds: f64) -> String {
    match seconds {
        ..0.1 => format!("{:.0}ms", 1000.0 * seconds),
        ..1000.0 => format!("{seconds:.1}s"),
        _ => format!("{:.0}min", seconds / 60.0),
    }
}

fn ranks<'a>(watch: &Watch, run: &Snapshot, look: &'a Look) -> Vec<Rank<'a>> {
    let mut ranks: Vec<_> = look.ranks.iter().map(|rank| Rank::new(run, look, rank)).collect();
    ranks.sort_by(|a, b| {
        let (a, b) = (&a.cells[watch.rows.sort], &b.cells[watch.rows.sort]);
        let order = a.1.total_cmp(&b.1).then_with(|| a.0.cmp(&b.0));
        if watch.rows.is_reversed { order.reverse() } else { order }
    });
    ranks
}

pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let Some(run) = watch.front().cloned() else { return };
    let Some(look) = run.look.as_ref().filter(|look| !look.ranks.is_empty()) else {
        return no_ranks(&run, area, screen);
    };
    let details = if area.height >= 14 { DETAILS } else { 0 };
    let [above, below] = area.layout(&Layout::vertical([Constraint::Fill(1), Constraint::Length(details)]));
    watch.rows.page = usize::from(above.height).saturating_sub(2).max(1);
    let ranks = ranks(watch, &run, look);
    let mut state = watch.rows.ranks.with_selected(watch.rows.ranks.selected().unwrap_or(0));
    *state.offset_mut() = state.offset().min(ranks.len().saturating_sub(watch.rows.page));
    table(watch, &ranks, &mut state, above, screen);
    watch.rows.ranks = state;
    if let Some(rank) = state.selected().and_then(|selected| ranks.get(selected)) {
        let inside = titled(plain_title(format!("rank {}", rank.look.rank)), below, screen);
        let details = clean(&details_of(look, rank.look).join("\n"));
        paragraph(&details, inside.width).render(inside, screen);
    }
}

pub(super) fn pane(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let Some(run) = watch.front() else { return };
    let Some(look) = run.look.as_ref().filter(|look| !look.ranks.is_empty()) else {
        return no_ranks(run, area, screen);
    };
    let mut ranks = ranks(watch, run, look);
    ranks.sort_by_key(|rank| !rank.is_culprit);
    table(watch, &ranks, &mut TableState::default(), area, screen);
}

fn no_ranks(run: &Snapshot, area: Rect, screen: &mut Buffer) {
    let inside = titled(plain_title("ranks"), area, screen);
    let why =
        if run.look.is_some() { "this run has no live process" } else { "asking the processes of the run" };
    nothing(why, inside, screen);
}

/// Returns the columns that have content and fit, as indices in [`COLUMNS`], with their widths.
fn columns(ranks: &[Rank<'_>], room: usize) -> Vec<(usize, usize)> {
    let mut columns = Vec::new();
    for (at, (title, least, ..)) in COLUMNS.into_iter().enumerate() {
        let longest = ranks.iter().map(|rank| width(&rank.cells[at].0)).max().unwrap_or(0).min(MOST);
        let is_gauge = matches!(title, "cpu" | "gpu" | "°C");
        if !is_gauge || ranks.iter().any(|rank| rank.cells[at].0 != "-") {
            columns.push((at, longest.max(least)));
        }
    }
    while columns.iter().map(|(_, width)| width + 1).sum::<usize>() > room + 1 {
        let Some(first) = columns.iter().map(|(at, _)| COLUMNS[*at].2).min() else { break };
        columns.retain(|(at, _)| COLUMNS[*at].2 != first);
    }
    columns
}

fn table(watch: &Watch, ranks: &[Rank<'_>], state: &mut TableState, area: Rect, screen: &mut Buffer) {
    let inside = Rect { y: area.y + 1, height: area.height.saturating_sub(1), ..area };
    let columns = columns(ranks, usize::from(inside.width));
    let head = columns.iter().map(|(column, width)| {
        let (title, _, _, is_text) = COLUMNS[*column];
        let line = match (*column == watch.rows.sort, watch.rows.is_reversed) {
            (false, _) => Line::styled(title, Theme::QUIET),
            (true, is_reversed) => {
                let mark = if is_reversed { "▲" } else { "▼" };
                Line::styled(fit(&format!("{title}{mark}"), *width), Theme::TITLE)
            }
        };
        if is_text { line } else { line.right_aligned() }
    });
    let taken: usize = columns.iter().map(|(_, width)| width + 1).sum();
    let spacing = 1 + (usize::from(inside.width).saturating_sub(taken) / columns.len().max(1)).min(2);
    let widths = columns.iter().map(|(_, width)| Constraint::Length(*width as u16));
    let table = Table::new(ranks.iter().map(|rank| rank.row(&columns)), widths)
        .header(Row::new(head))
        .column_spacing(spacing as u16)
        .row_highlight_style(Theme::SELECTED);
    StatefulWidget::render(table, inside, screen, state);

    let page = usize::from(inside.height).saturating_sub(1);
    let first = state.offset();
    let mut title = vec![plain_title(number_of(ranks.len(), "rank"))];
    if ranks.len() > page {
        let rows = format!("  rows {}-{}", first + 1, (first + page).min(ranks.len()));
        title.push(Span::styled(rows, Theme::QUIET));
    }
    title.push(Span::raw(format!("  {}", census(ranks))));
    titled(title, area, screen);
}

/// Counts the activities of ranks, as in `61 in all_gather, 2 in data loading, 1 silent`.
fn census(ranks: &[Rank<'_>]) -> String {
    let mut counts: Vec<(String, usize)> = Vec::new();
    for rank in ranks.iter().map(|rank| rank.look) {
        let activity = match (&rank.silent, &rank.pending, &rank.activity) {
            (Some(_), ..) => "silent".to_owned(),
            (None, Some(call), _) => format!("in {}", call.operation),
            (None, None, Some(activity)) => format!("in {}", clean(&activity.name)),
            (None, None, None) => "idle".to_owned(),
        };
        match counts.iter_mut().find(|(known, _)| *known == activity) {
            Some((_, count)) => *count += 1,
            None => counts.push((activity, 1)),
        }
    }
    counts.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    let words = counts.into_iter().map(|(activity, count)| format!("{count} {activity}"));
    words.collect::<Vec<_>>().join(", ")
}

fn details_of(look: &Look, rank: &RankLook) -> Vec<String> {
    let process = look.processes.iter().find(|process| process.ranks.contains(&rank.rank));
    let process = process.map(|ProcessLook { process, host, ranks, .. }| {
        let ranks =
            if ranks.len() > 1 { format!(", with ranks {}", in_ranges(ranks)) } else { String::new() };
        format!("process {process} on {host}{ranks}")
    });
    let waits = match &rank.waits_for[..] {
        [] => String::new(),
        ranks => format!(", waits for {}", in_ranges(ranks)),
    };
    let call = rank.pending.as_ref().or(rank.last.as_ref()).map(|call| {
        let Call { group, sequence, operation, module, phase, seconds } = call;
        let call = format!("#{sequence} {operation} of {module} in {phase}, group {group}");
        match rank.pending {
            Some(_) => format!("in {call} for {seconds:.1} s{waits}"),
            None => format!("called {call} {seconds:.1} s ago"),
        }
    });
    let memory = rank.bytes.zip(rank.peak_bytes);
    let memory = memory.map(|(now, peak)| format!("holds {}, at most {}", size(now), size(peak)));
    [process, rank.silent.clone(), call, memory].into_iter().flatten().collect()
}
