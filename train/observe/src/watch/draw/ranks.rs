//! The ranks of the run in front, as a table.

use std::cmp::Ordering;

use kiln_sys::words::{in_ranges, number_of, size};
use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Cell, Row, StatefulWidget, Table, TableState, Widget};

use super::super::feed::Snapshot;
use super::super::state::Watch;
use super::super::text::{bytes, clean, fit, width};
use super::super::theme::Theme;
use super::frame::{nothing, plain_title, text, titled};
use crate::status::{Call, Look, RankLook};

/// Rows of the details of a rank.
const DETAILS: u16 = 6;

/// A column of the table.
pub(in super::super) struct Column {
    title: &'static str,
    /// Screen columns at least, and as many as cut no usual content.
    least: usize,
    most: usize,
    /// When the column is left out for lack of room: 1 is the first.
    dropped: Option<u8>,
}

pub(in super::super) const COLUMNS: [Column; 12] = [
    Column { title: "rank", least: 5, most: 5, dropped: None },
    Column { title: "step", least: 5, most: 8, dropped: Some(7) },
    Column { title: "doing", least: 9, most: 14, dropped: None },
    Column { title: "module", least: 9, most: 20, dropped: Some(4) },
    Column { title: "collective", least: 14, most: 16, dropped: None },
    Column { title: "for", least: 6, most: 8, dropped: None },
    Column { title: "awaits", least: 7, most: 24, dropped: Some(8) },
    Column { title: "mem", least: 5, most: 7, dropped: Some(6) },
    Column { title: "peak", least: 5, most: 7, dropped: Some(2) },
    Column { title: "cpu", least: 4, most: 6, dropped: Some(1) },
    Column { title: "gpu", least: 4, most: 5, dropped: Some(5) },
    Column { title: "°C", least: 3, most: 4, dropped: Some(3) },
];

/// The value of a cell.
#[derive(Clone, Debug)]
enum Value<'a> {
    Rank(usize),
    Step(Option<u64>),
    Text(String),
    Seconds(f64),
    Ranks(&'a [usize]),
    Bytes(Option<u64>),
    Percent(Option<f64>),
    Degrees(Option<f64>),
}

impl Value<'_> {
    fn text(&self) -> String {
        let dash = |text: Option<String>| text.unwrap_or_else(|| "-".to_owned());
        match self {
            Value::Rank(rank) => rank.to_string(),
            Value::Step(Some(0)) => "start".to_owned(),
            Value::Step(step) => dash(step.map(|step| step.to_string())),
            Value::Text(text) => text.clone(),
            Value::Seconds(seconds) if *seconds < 0.1 => format!("{:.0}ms", 1000.0 * seconds),
            Value::Seconds(seconds) if *seconds < 1000.0 => format!("{seconds:.1}s"),
            Value::Seconds(seconds) => format!("{:.0}min", seconds / 60.0),
            Value::Ranks([]) => "-".to_owned(),
            Value::Ranks(ranks) => in_ranges(ranks),
            Value::Bytes(count) => dash(count.map(bytes)),
            Value::Percent(share) => dash(share.map(|share| format!("{:.0}%", 100.0 * share))),
            Value::Degrees(degrees) => dash(degrees.map(|degrees| format!("{degrees:.0}"))),
        }
    }

    /// Ranks, steps and text ascend; all else starts with the largest.
    fn order(&self, other: &Self) -> Ordering {
        match (self, other) {
            (Value::Rank(a), Value::Rank(b)) => a.cmp(b),
            (Value::Step(a), Value::Step(b)) => a.cmp(b),
            (Value::Text(a), Value::Text(b)) => a.cmp(b),
            (Value::Seconds(a), Value::Seconds(b)) => b.total_cmp(a),
            (Value::Ranks(a), Value::Ranks(b)) => b.cmp(a),
            (Value::Bytes(a), Value::Bytes(b)) => b.cmp(a),
            (Value::Percent(a) | Value::Degrees(a), Value::Percent(b) | Value::Degrees(b)) => {
                b.partial_cmp(a).unwrap_or(Ordering::Equal)
            }
            _ => Ordering::Equal,
        }
    }

    fn is_number(&self) -> bool {
        !matches!(self, Value::Text(_) | Value::Ranks(_))
    }
}

/// A row of the table.
struct Rank<'a> {
    look: &'a RankLook,
    values: [Value<'a>; COLUMNS.len()],
    is_culprit: bool,
}

/// The ranks of a run, sorted.
fn ranks<'a>(watch: &Watch, run: &Snapshot, look: &'a Look) -> Vec<Rank<'a>> {
    let rank = |rank: &'a RankLook| {
        let (pending, doing) = (rank.pending.as_ref(), rank.activity.as_ref());
        let call = pending.or(rank.last.as_ref());
        let seconds = pending.map(|call| call.seconds).or(doing.map(|doing| doing.seconds));
        let gauges = run.gauges.get(&rank.rank).copied().unwrap_or_default();
        let values = [
            Value::Rank(rank.rank),
            Value::Step(rank.step),
            Value::Text(doing.map_or_else(String::new, |doing| clean(&doing.name))),
            Value::Text(call.map_or_else(String::new, |call| clean(&call.unit))),
            Value::Text(pending.map_or_else(|| "-".to_owned(), |call| call.operation.to_string())),
            Value::Seconds(seconds.unwrap_or(0.0)),
            Value::Ranks(&rank.waits_for),
            Value::Bytes(rank.bytes),
            Value::Bytes(rank.peak_bytes),
            Value::Percent(gauges.cpu),
            Value::Percent(gauges.gpu),
            Value::Degrees(gauges.celsius),
        ];
        Rank { look: rank, values, is_culprit: look.culprits.contains(&rank.rank) }
    };
    let mut ranks: Vec<_> = look.ranks.iter().map(rank).collect();
    ranks.sort_by(|a, b| {
        let order = a.values[watch.rows.sort].order(&b.values[watch.rows.sort]);
        if watch.rows.is_reversed { order.reverse() } else { order }
    });
    ranks
}

/// Draws the view: all ranks, and the details of the chosen one.
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
    if let Some(rank) = state.selected().and_then(|chosen| ranks.get(chosen)) {
        let inside = titled(plain_title(format!("rank {}", rank.look.rank)), below, screen);
        let details = clean(&details_of(&run, look, rank.look).join("\n"));
        text(&details, usize::from(inside.width)).render(inside, screen);
    }
}

/// Draws the ranks, the culprits first.
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
    let why = if run.look.is_some() {
        "no process of this run is there"
    } else {
        "the run has not been looked at yet"
    };
    nothing(why, inside, screen);
}

/// The columns that fit, as indices in [`COLUMNS`], with their widths.
fn columns(ranks: &[Rank<'_>], room: usize) -> Vec<(usize, usize)> {
    let longest =
        |column: usize| ranks.iter().map(|rank| width(&rank.values[column].text())).max().unwrap_or(0);
    let longest: Vec<usize> = (0..COLUMNS.len()).map(longest).collect();
    let is_number = |column: usize| ranks.iter().any(|rank| rank.values[column].is_number());
    // A number is never cut.
    let least =
        |column: &usize| COLUMNS[*column].least.max(if is_number(*column) { longest[*column] } else { 0 });
    let is_unknown = |value: &Value<'_>| matches!(value, Value::Percent(None) | Value::Degrees(None));
    let is_known = |column: &usize| {
        COLUMNS[*column].title == "cpu" || !ranks.iter().all(|rank| is_unknown(&rank.values[*column]))
    };
    let mut columns: Vec<usize> = (0..COLUMNS.len()).filter(is_known).collect();
    let needed = |columns: &[usize]| columns.iter().map(|column| least(column) + 1).sum::<usize>();
    for order in 1..=8 {
        if needed(&columns) > room {
            columns.retain(|column| COLUMNS[*column].dropped != Some(order));
        }
    }
    let mut free = room.saturating_sub(needed(&columns));
    let mut wide: Vec<(usize, usize)> = Vec::new();
    for column in columns {
        // From the left, content that would be cut gets the free room.
        let more = longest[column].min(COLUMNS[column].most).saturating_sub(least(&column)).min(free);
        free -= more;
        wide.push((column, least(&column) + more));
    }
    let each = (free / wide.len()).min(3);
    wide.iter_mut().for_each(|(_, width)| *width += each);
    wide
}

fn table(watch: &Watch, ranks: &[Rank<'_>], state: &mut TableState, area: Rect, screen: &mut Buffer) {
    let inside = Rect { y: area.y + 1, height: area.height.saturating_sub(1), ..area };
    let columns = columns(ranks, usize::from(inside.width).saturating_sub(1));
    let head = columns.iter().map(|(column, columns)| {
        let mark = match (*column == watch.rows.sort, watch.rows.is_reversed) {
            (false, _) => "",
            (true, false) => "▼",
            (true, true) => "▲",
        };
        let text = fit(&format!("{}{mark}", COLUMNS[*column].title), *columns);
        let style = if mark.is_empty() { Theme::quiet() } else { Theme::title() };
        let line = Line::styled(text, style);
        if ranks[0].values[*column].is_number() { line.right_aligned() } else { line }
    });
    // The mark of culprits is in front of the first column.
    let widths = columns.iter().map(|(column, width)| (*width + usize::from(*column == 0)) as u16);
    let table = Table::new(ranks.iter().map(|rank| row(rank, &columns)), widths.map(Constraint::Length));
    let table = table.header(Row::new(head)).row_highlight_style(Theme::chosen());
    StatefulWidget::render(table, inside, screen, state);

    let page = usize::from(inside.height).saturating_sub(1);
    let first = state.offset();
    let mut title = vec![plain_title(number_of(ranks.len(), "rank"))];
    if ranks.len() > page {
        let rows = format!("  rows {}-{}", first + 1, (first + page).min(ranks.len()));
        title.push(Span::styled(rows, Theme::quiet()));
    }
    title.push(Span::raw(format!("  {}", census(ranks))));
    titled(title, area, screen);
}

fn row<'a>(rank: &Rank<'a>, columns: &[(usize, usize)]) -> Row<'a> {
    let mark = Span::styled(if rank.is_culprit { "!" } else { " " }, Theme::bad());
    let quiet = if rank.look.silent.is_some() { Theme::quiet() } else { Style::new() };
    let style = if rank.is_culprit { Theme::bad() } else { quiet };
    let cell = |(column, columns): &(usize, usize)| {
        let value = &rank.values[*column];
        let text = fit(&value.text(), *columns);
        let style = match COLUMNS[*column].title {
            "rank" => {
                return Cell::new(Line::from(vec![
                    mark.clone(),
                    Span::styled(format!("{text:>columns$}"), style),
                ]));
            }
            "doing" => style,
            "module" if rank.look.pending.is_none() => Theme::quiet(),
            "collective" if rank.look.pending.is_some() => Color::Blue.into(),
            "awaits" if !rank.look.waits_for.is_empty() => Color::Yellow.into(),
            _ => Style::new(),
        };
        let line = Line::styled(text, style);
        Cell::new(if value.is_number() { line.right_aligned() } else { line })
    };
    let Some(silent) = &rank.look.silent else { return Row::new(columns.iter().map(cell)) };
    let room = columns[1..].iter().map(|(_, width)| width + 1).sum::<usize>().saturating_sub(1);
    let silent = Line::styled(fit(&clean(silent), room), style);
    Row::new([cell(&columns[0]), Cell::new(silent).column_span(columns.len() as u16 - 1)])
}

/// The activities of ranks, the most common first, such as `61 in all_gather, 2 in data loading, 1 silent`.
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

/// All that is known of a rank.
fn details_of(run: &Snapshot, look: &Look, rank: &RankLook) -> Vec<String> {
    let mut lines = Vec::new();
    let process = look.processes.iter().find(|process| process.ranks.contains(&rank.rank));
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
    let has_cpu = run.gauges.get(&rank.rank).is_some_and(|gauges| gauges.cpu.is_some());
    if has_cpu && process.is_some_and(|process| process.ranks.len() > 1) {
        lines.push("cpu is that of the whole process".to_owned());
    }
    if let (Some(deadline), Some(pending)) = (look.deadline_s, &rank.pending) {
        let left = (deadline - pending.seconds).max(0.0);
        lines.push(format!("comm.timeout_s ends the wait after {deadline:.0} s, in {left:.0} s"));
    }
    lines
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn values_are_written_and_sorted() {
        let texts = [0.0042, 0.25, 14.2, 7200.0].map(|seconds| Value::Seconds(seconds).text());
        assert_eq!(texts, ["4ms", "0.2s", "14.2s", "120min"]);
        let texts = [
            Value::Step(Some(0)),
            Value::Step(None),
            Value::Bytes(Some(7)),
            Value::Ranks(&[0, 1, 3]),
            Value::Percent(Some(1.98)),
            Value::Degrees(None),
        ];
        assert_eq!(texts.map(|value| value.text()), ["start", "-", "7B", "0-1, 3", "198%", "-"]);
        let sorted = |mut values: Vec<Value<'_>>| {
            values.sort_by(Value::order);
            values.iter().map(Value::text).collect::<Vec<_>>()
        };
        assert_eq!(sorted(vec![Value::Rank(2), Value::Rank(0)]), ["0", "2"]);
        assert_eq!(sorted(vec![Value::Seconds(1.0), Value::Seconds(5.0)]), ["5.0s", "1.0s"]);
        assert_eq!(sorted([None, Some(7), Some(9)].map(Value::Bytes).to_vec()), ["9B", "7B", "-"]);
        assert_eq!(sorted([None, Some(0.5), Some(1.0)].map(Value::Percent).to_vec()), ["100%", "50%", "-"]);
    }
}
