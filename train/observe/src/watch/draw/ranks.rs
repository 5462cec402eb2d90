//! Ranks as rows.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};

use kiln_process::words::{in_ranges, number_of, size};

use super::super::rows::{Column, Row, census, rows};
use super::super::state::Watch;
use super::super::text::{clean, fit, width, wrap};
use super::super::theme::Theme;
use super::frame::{nothing, put, titled};
use crate::status::{Call, Look};

/// Columns that stay away first where there is no room for all.
const LEAST_WANTED: [Column; 4] = [Column::Cpu, Column::Peak, Column::Celsius, Column::Scope];

/// Rows that the details of a rank take.
const DETAILS: u16 = 6;

/// The view: rows, and the details of the one that is chosen.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let Some(look) = watch.front().and_then(|news| news.look.clone()) else {
        return nothing("the run has not been looked at yet", area, screen);
    };
    if look.ranks.is_empty() {
        return nobody(area, screen);
    }
    let rows = rows_of(watch, &look);
    let details = if area.height >= 14 { DETAILS } else { 0 };
    let above = Rect { height: area.height - details, ..area };
    let page = usize::from(above.height.saturating_sub(2)).max(1);
    let ranks = &mut watch.ranks;
    ranks.page = page;
    ranks.chosen = ranks.chosen.min(rows.len() - 1);
    ranks.first = ranks.first.clamp((ranks.chosen + 1).saturating_sub(page), ranks.chosen);
    ranks.first = ranks.first.min(rows.len().saturating_sub(page));
    let (first, chosen) = (ranks.first, ranks.chosen);
    table(watch, &rows, first, Some(chosen), above, screen);
    let below = Rect { y: area.y + above.height, height: details, ..area };
    detail(watch, &look, &rows[chosen], below, screen);
}

/// The rows alone, those to look at first on top.
pub(super) fn pane(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let Some(look) = watch.front().and_then(|news| news.look.clone()) else {
        let inside = titled(Line::styled("ranks", Theme::title()), area, screen);
        return nothing("the run has not been looked at yet", inside, screen);
    };
    if look.ranks.is_empty() {
        return nobody(area, screen);
    }
    let mut rows = rows_of(watch, &look);
    rows.sort_by_key(|row| !row.is_culprit);
    table(watch, &rows, 0, None, area, screen);
}

fn rows_of(watch: &Watch, look: &Look) -> Vec<Row> {
    let gauges = watch.front().map(|news| news.gauges.clone()).unwrap_or_default();
    rows(look, &gauges, watch.ranks.sort, watch.ranks.is_reversed)
}

fn nobody(area: Rect, screen: &mut Buffer) {
    let inside = titled(Line::styled("ranks", Theme::title()), area, screen);
    nothing("no process of this run is there", inside, screen);
}

/// The columns for which there is room, with their widths.
fn columns(rows: &[Row], room: usize) -> Vec<(Column, usize)> {
    let mut columns: Vec<Column> = Column::ALL.into_iter().filter(|column| column.is_known(rows)).collect();
    let needs = |columns: &[Column]| columns.iter().map(|column| column.widths().0 + 1).sum::<usize>();
    for unwanted in LEAST_WANTED {
        if needs(&columns) > room {
            columns.retain(|column| *column != unwanted);
        }
    }
    let mut free = room.saturating_sub(needs(&columns));
    let mut wide: Vec<(Column, usize)> = Vec::new();
    for column in columns {
        let (least, most) = column.widths();
        let longest = rows.iter().map(|row| width(&column.text(row))).max().unwrap_or(0);
        // What is free goes to what would be cut, from the left.
        let more = longest.min(most).saturating_sub(least).min(free);
        free -= more;
        wide.push((column, least + more));
    }
    // And then to all, so that the table breathes.
    let each = (free / wide.len().max(1)).min(3);
    wide.iter_mut().for_each(|(_, width)| *width += each);
    wide
}

fn table(watch: &Watch, rows: &[Row], first: usize, chosen: Option<usize>, area: Rect, screen: &mut Buffer) {
    let page = usize::from(area.height.saturating_sub(2));
    let last = (first + page).min(rows.len());
    let mut title = vec![Span::styled(number_of(rows.len(), "rank"), Theme::title())];
    if rows.len() > page && last > first {
        title.push(Span::styled(format!("  rows {}-{last}", first + 1), Theme::quiet()));
    }
    title.push(Span::raw(format!("  {}", census(rows))));
    let inside = titled(Line::from(title), area, screen);
    let columns = columns(rows, usize::from(inside.width).saturating_sub(1));
    put(header(watch, &columns), inside, 0, screen);
    for (index, row) in rows.iter().enumerate().skip(first).take(page) {
        let line = line(row, &columns, usize::from(inside.width), chosen == Some(index));
        put(line, inside, (index - first) as u16 + 1, screen);
    }
}

fn header(watch: &Watch, columns: &[(Column, usize)]) -> Line<'static> {
    let mut spans = vec![Span::raw(" ")];
    for (column, width) in columns {
        let is_sorted = *column == watch.ranks.sort;
        let mark = match (is_sorted, watch.ranks.is_reversed) {
            (false, _) => "",
            (true, false) => "▼",
            (true, true) => "▲",
        };
        let text = fit(&format!("{}{mark}", column.title()), *width);
        let style = if is_sorted { Theme::title() } else { Theme::quiet() };
        spans.push(Span::styled(aligned(&text, *column, *width), style));
        spans.push(Span::raw(" "));
    }
    Line::from(spans)
}

fn aligned(text: &str, column: Column, columns: usize) -> String {
    let blanks = " ".repeat(columns.saturating_sub(width(text)));
    if column.is_number() { format!("{blanks}{text}") } else { format!("{text}{blanks}") }
}

fn line(row: &Row, columns: &[(Column, usize)], width: usize, is_chosen: bool) -> Line<'static> {
    let mark = if row.is_culprit { "!" } else { " " };
    let mut spans = vec![Span::styled(mark, Theme::bad())];
    if let Some(silent) = &row.silent {
        let number =
            aligned(&row.rank.to_string(), Column::Rank, columns.first().map_or(4, |(_, width)| *width));
        let text = fit(&format!("{number} {silent}"), width.saturating_sub(1));
        let style = if row.is_culprit { Theme::bad() } else { Theme::quiet() };
        spans.push(Span::styled(text, style));
    } else {
        for (column, width) in columns {
            let text = aligned(&fit(&column.text(row), *width), *column, *width);
            spans.push(Span::styled(text, style_of(*column, row)));
            spans.push(Span::raw(" "));
        }
    }
    let line = Line::from(spans);
    if is_chosen { line.patch_style(Theme::chosen()) } else { line }
}

fn style_of(column: Column, row: &Row) -> Style {
    match column {
        Column::Rank | Column::Doing if row.is_culprit => Theme::bad(),
        Column::Scope if row.collective.is_none() => Theme::quiet(),
        Column::Collective if row.collective.is_some() => Style::new().fg(Color::Blue),
        Column::WaitsFor if !row.waits_for.is_empty() => Style::new().fg(Color::Yellow),
        _ => Style::new(),
    }
}

/// All that is known of a rank.
fn detail(watch: &Watch, look: &Look, row: &Row, area: Rect, screen: &mut Buffer) {
    let Some(rank) = look.ranks.iter().find(|rank| rank.rank == row.rank) else { return };
    let inside = titled(Line::styled(format!("rank {}", row.rank), Theme::title()), area, screen);
    let mut lines = Vec::new();
    let process = look.processes.iter().find(|process| process.ranks.contains(&row.rank));
    if let Some(process) = process {
        let others = match &process.ranks[..] {
            [_] => String::new(),
            ranks => format!(", which has ranks {}", in_ranges(ranks)),
        };
        lines.push(format!("process {} on {}{others}", process.process, process.host));
    }
    lines.extend(rank.silent.clone());
    let call = |call: &Call| {
        let Call { group, sequence, operation, unit, phase, .. } = call;
        format!("#{sequence} {operation} of {unit} in {phase}, group {group}")
    };
    if let Some(activity) = &rank.activity {
        lines.push(format!("in {} for {:.1} s", activity.name, activity.seconds));
    }
    if let Some(pending) = &rank.pending {
        let waits = match &rank.waits_for[..] {
            [] => String::new(),
            ranks => format!(", waits for {}", in_ranges(ranks)),
        };
        lines.push(format!("{:.1} s in {}{waits}", pending.seconds, call(pending)));
    } else if let Some(last) = &rank.last {
        lines.push(format!("called {} {:.1} s ago", call(last), last.seconds));
    }
    if let (Some(now), Some(peak)) = (rank.bytes, rank.peak_bytes) {
        lines.push(format!("holds {}, at most {}", size(now), size(peak)));
    }
    if row.gauges.cpu.is_some() && process.is_some_and(|process| process.ranks.len() > 1) {
        lines.push("cpu is that of the whole process".to_owned());
    }
    let deadline = look.deadline_s.zip(rank.pending.as_ref());
    if let Some((deadline, pending)) = deadline.filter(|_| watch.front().is_some()) {
        lines.push(format!(
            "comm.timeout_s ends the wait after {deadline:.0} s, in {:.0} s",
            (deadline - pending.seconds).max(0.0)
        ));
    }
    let columns = usize::from(inside.width).saturating_sub(2);
    let wrapped = lines.iter().flat_map(|line| wrap(&clean(line), columns));
    for (index, line) in wrapped.enumerate() {
        put(Line::raw(format!(" {line}")), inside, index as u16, screen);
    }
}
