//! Output of ranks, and events of the run.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Widget};

use super::super::feed::Snapshot;
use super::super::state::{Source, Watch};
use super::super::text::{clean, fit, time_of_day, wrap};
use super::super::theme::Theme;
use super::frame::{nothing, plain_title, titled};

/// A line with its prefix.
struct Entry {
    prefix: Span<'static>,
    text: String,
    style: Style,
}

/// Draws the view.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let Some(run) = watch.front().cloned() else { return };
    let source = watch.rows.source.resolve(&run);
    let mut title = vec![plain_title(title(source))];
    if watch.rows.log_back > 0 {
        title.push(Span::styled("  scrolled back; End follows", Theme::quiet()));
    }
    let inside = titled(title, area, screen);
    watch.rows.page = usize::from(inside.height);
    watch.rows.log_back = tail(source, &run, watch.rows.log_back, watch.rows.cuts_lines, inside, screen);
}

/// Draws the last lines.
pub(super) fn pane(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let Some(run) = watch.front() else { return };
    let source = Source::Either.resolve(run);
    let inside = titled(plain_title(title(source)), area, screen);
    tail(source, run, 0, true, inside, screen);
}

fn title(source: Source) -> String {
    match source {
        Source::Either | Source::All => "output of all ranks".to_owned(),
        Source::Events => "events (UTC)".to_owned(),
        Source::Rank(rank) => format!("output of rank {rank}"),
    }
}

fn entries(source: Source, run: &Snapshot) -> Vec<Entry> {
    if source == Source::Events {
        let events = run.run.iter().flat_map(|run| run.events()).map(|event| Entry {
            prefix: Span::styled(format!("{} {:>7} ", time_of_day(event.time), event.step), Theme::quiet()),
            text: clean(&format!("{}: {}", event.kind, event.text)),
            style: match event.kind.as_str() {
                "failure" | "skipped" => Theme::bad(),
                "resume" | "start" => Color::Blue.into(),
                _ => Style::new(),
            },
        });
        return events.collect();
    }
    let columns = run.log.iter().map(|line| line.rank.to_string().len()).max().unwrap_or(1);
    let lines = run.log.iter().filter(|line| match source {
        Source::Rank(rank) => rank == line.rank,
        _ => true,
    });
    let entry = lines.map(|line| {
        let mark = if line.is_error { "!" } else { " " };
        Entry {
            prefix: Span::styled(format!("{:>columns$}{mark} ", line.rank), Theme::run(line.rank)),
            text: clean(&line.text),
            style: if line.is_error { Color::Yellow.into() } else { Style::new() },
        }
    });
    entry.collect()
}

/// Draws the last lines down to the one `back` lines before the end. Returns the `back` that there are lines for.
fn tail(source: Source, run: &Snapshot, back: usize, is_cut: bool, area: Rect, screen: &mut Buffer) -> usize {
    let entries = entries(source, run);
    if entries.is_empty() {
        let why = match source {
            Source::Events => "no event has been recorded yet",
            _ => "no output of ranks is kept here: kiln launch keeps it, in the folder logs of the run",
        };
        nothing(why, area, screen);
        return 0;
    }
    let rows = usize::from(area.height);
    // From the last one up, until there are enough.
    let mut lines: Vec<Line<'_>> = Vec::new();
    for Entry { prefix, text, style } in entries.into_iter().rev() {
        let indent = prefix.width();
        let room = usize::from(area.width).saturating_sub(indent + 1).max(1);
        let mut texts = if is_cut { vec![fit(&text, room)] } else { wrap(&text, room) };
        let first = Span::styled(texts.remove(0), style);
        let indented = |text| Line::styled(format!(" {}{text}", " ".repeat(indent)), style);
        lines.extend(texts.into_iter().rev().map(indented));
        lines.push(Line::from(vec![Span::raw(" "), prefix, first]));
        if lines.len() > back.saturating_add(2 * rows) {
            break;
        }
    }
    let back = back.min(lines.len().saturating_sub(rows));
    let visible = lines.into_iter().skip(back).take(rows).rev();
    Paragraph::new(visible.collect::<Vec<_>>()).render(area, screen);
    back
}
