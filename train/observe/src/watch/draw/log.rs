//! The last lines that ranks have written, and what has happened to the run.

use std::collections::BTreeSet;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};

use super::super::state::{Source, Watch};
use super::super::subject::News;
use super::super::text::{clean, fit, time_of_day, width, wrap};
use super::super::theme::Theme;
use super::frame::{nothing, put, titled};

/// What is said where there is no output.
const NO_OUTPUT: &str =
    "no output of ranks is kept here: kiln launch keeps it, in the folder logs of the run";

/// A line, and what stands before it.
struct Entry {
    before: String,
    style: Style,
    text: String,
    text_style: Style,
}

/// The view.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let Some(news) = watch.front().cloned() else { return };
    let mut sources = vec![Source::Events];
    let ranks: BTreeSet<usize> = news.log.iter().map(|line| line.rank).collect();
    if !ranks.is_empty() {
        sources.push(Source::All);
        sources.extend(ranks.into_iter().map(Source::Rank));
    }
    watch.log.source = resolved(watch.log.source, &news);
    watch.log.sources = sources;
    let source = watch.log.source;
    let mut title = vec![Span::styled(title(source), Theme::title())];
    if watch.log.back > 0 {
        title.push(Span::styled("  scrolled back; End follows", Theme::quiet()));
    }
    let inside = titled(Line::from(title), area, screen);
    watch.log.page = usize::from(inside.height);
    let entries = entries(source, &news);
    if entries.is_empty() {
        return nothing(
            if source == Source::Events { "nothing has been noted yet" } else { NO_OUTPUT },
            inside,
            screen,
        );
    }
    watch.log.back = tail(&entries, watch.log.back, watch.log.is_cut, inside, screen);
}

/// The last lines alone.
pub(super) fn pane(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let Some(news) = watch.front() else { return };
    let source = resolved(Source::Either, news);
    let inside = titled(Line::styled(title(source), Theme::title()), area, screen);
    let entries = entries(source, news);
    match entries.is_empty() {
        true => nothing(NO_OUTPUT, inside, screen),
        false => _ = tail(&entries, 0, true, inside, screen),
    }
}

fn resolved(source: Source, news: &News) -> Source {
    match source {
        Source::Either if news.log.is_empty() => Source::Events,
        Source::Either => Source::All,
        source => source,
    }
}

fn title(source: Source) -> String {
    match source {
        Source::Either | Source::All => "output of all ranks".to_owned(),
        Source::Events => "events (UTC)".to_owned(),
        Source::Rank(rank) => format!("output of rank {rank}"),
    }
}

fn entries(source: Source, news: &News) -> Vec<Entry> {
    if source == Source::Events {
        let events = news.folder.events.iter().map(|event| Entry {
            before: format!("{} {:>7} ", time_of_day(event.time), event.step),
            style: Theme::quiet(),
            text: clean(&format!("{}: {}", event.kind, event.text)),
            text_style: match event.kind.as_str() {
                "failure" | "skipped" => Theme::bad(),
                "resume" | "start" => Style::new().fg(Color::Blue),
                _ => Style::new(),
            },
        });
        return events.collect();
    }
    let wanted = |rank: usize| !matches!(source, Source::Rank(only) if only != rank);
    let columns = news.log.iter().map(|line| line.rank.to_string().len()).max().unwrap_or(1);
    let lines = news.log.iter().filter(|line| wanted(line.rank));
    let entry = |line: &super::super::subject::LogLine| Entry {
        before: format!("{:>columns$}{}", line.rank, if line.is_error { "! " } else { "  " }),
        style: Theme::run(line.rank),
        text: clean(&line.text),
        text_style: if line.is_error { Style::new().fg(Color::Yellow) } else { Style::new() },
    };
    lines.map(entry).collect()
}

/// Draws the last lines up to `back` lines before the end. Returns how far back it really goes.
fn tail(entries: &[Entry], back: usize, is_cut: bool, area: Rect, screen: &mut Buffer) -> usize {
    let rows = usize::from(area.height);
    let columns = usize::from(area.width).saturating_sub(1);
    let mut lines: Vec<Line<'_>> = Vec::new();
    for entry in entries.iter().rev() {
        let indent = width(&entry.before);
        let room = columns.saturating_sub(indent).max(1);
        let texts = if is_cut { vec![fit(&entry.text, room)] } else { wrap(&entry.text, room) };
        let count = texts.len();
        for (index, text) in texts.into_iter().enumerate().rev() {
            let before = if index == 0 { entry.before.clone() } else { " ".repeat(indent) };
            lines.push(Line::from(vec![
                Span::raw(" "),
                Span::styled(before, entry.style),
                Span::styled(text, entry.text_style),
            ]));
        }
        if lines.len() >= back.saturating_add(rows).saturating_add(count) {
            break;
        }
    }
    let back = back.min(lines.len().saturating_sub(rows));
    let shown = lines.into_iter().skip(back).take(rows).collect::<Vec<_>>();
    for (row, line) in shown.into_iter().rev().enumerate() {
        put(line, area, row as u16, screen);
    }
    back
}
