//! Views of rank output, events and generated samples.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::{Color, Style};
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Widget};

use super::feed::Snapshot;
use super::format::{clean, fit, nothing, plain_title, time_of_day, titled, wrap};
use super::state::{Source, Watch};
use super::theme::Theme;
use crate::run::Sample;

pub(super) fn draw_log(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    watch.rows.page = usize::from(area.height.saturating_sub(1));
    watch.rows.log_back = log(watch, watch.rows.log_back, watch.rows.cuts_lines, area, screen);
}

/// Draws the log down to the line `back` lines before its end. Returns `back`, limited to the available lines.
pub(super) fn log(watch: &Watch, back: usize, cuts: bool, area: Rect, screen: &mut Buffer) -> usize {
    let (Some(run), Some(source)) = (watch.front(), watch.source()) else { return 0 };
    let mut title = vec![plain_title(match source {
        Source::All => "output of all ranks".to_owned(),
        Source::Events => "events (UTC)".to_owned(),
        Source::Rank(rank) => format!("output of rank {rank}"),
    })];
    if back > 0 {
        title.push(Span::styled("  scrolled back; End follows", Theme::QUIET));
    }
    let inside = titled(title, area, screen);
    let entries = entries(source, run);
    if entries.is_empty() {
        let why = match source {
            Source::Events => "no event has been recorded yet",
            _ => "no output: kiln launch stores the output of ranks in the folder logs of the run",
        };
        nothing(why, inside, screen);
        return 0;
    }
    let rows = usize::from(inside.height);
    let mut lines: Vec<Line<'_>> = Vec::new();
    for (prefix, text, style) in entries.into_iter().rev() {
        let indent = prefix.width();
        let room = usize::from(inside.width).saturating_sub(indent + 1).max(1);
        let mut texts = if cuts { vec![fit(&text, room)] } else { wrap(&text, room) };
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
    Paragraph::new(visible.collect::<Vec<_>>()).render(inside, screen);
    back
}

fn entries(source: Source, run: &Snapshot) -> Vec<(Span<'static>, String, Style)> {
    if source == Source::Events {
        let events = run.run.iter().flat_map(|run| run.events()).map(|event| {
            let prefix = format!("{} {:>7} ", time_of_day(event.time), event.step);
            let style = match event.kind.as_str() {
                "failure" | "skipped" => Theme::BAD,
                "resume" | "start" => Color::Blue.into(),
                _ => Style::new(),
            };
            let text = clean(&format!("{}: {}", event.kind, event.text));
            (Span::styled(prefix, Theme::QUIET), text, style)
        });
        return events.collect();
    }
    let columns = run.log.iter().map(|line| line.rank.to_string().len()).max().unwrap_or(1);
    let lines = run.log.iter().filter(|line| source == Source::All || source == Source::Rank(line.rank));
    let entry = lines.map(|line| {
        let mark = if line.is_error { "!" } else { " " };
        let prefix = Span::styled(format!("{:>columns$}{mark} ", line.rank), Theme::run(line.rank));
        let style = if line.is_error { Color::Yellow.into() } else { Style::new() };
        (prefix, clean(&line.text), style)
    });
    entry.collect()
}

pub(super) fn draw_samples(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let Some(run) = watch.front().cloned() else { return };
    let steps: Vec<&[Sample]> = samples_of(&run).chunk_by(|a, b| a.step == b.step).collect();
    watch.rows.sample_back = watch.rows.sample_back.min(steps.len().saturating_sub(1));
    let at = steps.len().saturating_sub(watch.rows.sample_back + 1);
    let Some(samples) = steps.get(at) else { return last_sample(watch, area, screen) };
    let title = plain_title(format!("samples of step {}", samples[0].step));
    let place = Span::styled(format!("  {} of {}", at + 1, steps.len()), Theme::QUIET);
    let inside = titled(vec![title, place], area, screen);
    let lines: Vec<_> = samples.iter().flat_map(|sample| lines_of(sample, inside.width)).collect();
    watch.rows.page = usize::from(inside.height);
    watch.rows.sample_line = watch.rows.sample_line.min(lines.len().saturating_sub(watch.rows.page));
    Paragraph::new(lines.into_iter().skip(watch.rows.sample_line).collect::<Vec<_>>()).render(inside, screen);
}

pub(super) fn last_sample(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let Some(last) = watch.front().and_then(|run| samples_of(run).last()) else {
        let inside = titled(plain_title("samples"), area, screen);
        return nothing(
            "no text has been generated yet; set sample.every to a number of steps",
            inside,
            screen,
        );
    };
    let inside = titled(plain_title(format!("sample of step {}", last.step)), area, screen);
    Paragraph::new(lines_of(last, inside.width)).render(inside, screen);
}

fn samples_of(run: &Snapshot) -> &[Sample] {
    run.run.as_ref().map_or(&[], |run| run.samples())
}

fn lines_of(sample: &Sample, columns: u16) -> Vec<Line<'static>> {
    let wrapped = |text: &str| wrap(&clean(text), usize::from(columns).saturating_sub(4)).into_iter();
    let prompt = if sample.prompt.is_empty() { "(no prompt)" } else { &sample.prompt };
    let prompt = wrapped(prompt).enumerate().map(|(at, line)| {
        let mark = if at == 0 { " ▸ " } else { "   " };
        Line::styled(format!("{mark}{line}"), Theme::TITLE)
    });
    let text = wrapped(&sample.text).map(|line| Line::raw(format!("   {line}")));
    prompt.chain(text).chain([Line::default()]).collect()
}
