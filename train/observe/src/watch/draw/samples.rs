//! Texts that the run has generated.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::style::Style;
use ratatui::text::{Line, Span};

use super::super::state::Watch;
use super::super::text::{clean, wrap};
use super::super::theme::Theme;
use super::frame::{nothing, put, titled};
use crate::run::Sample;

/// What is said where there is none.
const NO_SAMPLES: &str =
    "no text has been generated yet: sample.every says after how many steps that is done";

/// The view: all texts of a step.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let Some(news) = watch.front().cloned() else { return };
    let steps: Vec<&[Sample]> = news.folder.samples.chunk_by(|a, b| a.step == b.step).collect();
    watch.samples.count = steps.len();
    watch.samples.back = watch.samples.back.min(steps.len().saturating_sub(1));
    let at = steps.len().saturating_sub(watch.samples.back + 1);
    let Some(samples) = steps.get(at) else {
        let inside = titled(Line::styled("samples", Theme::title()), area, screen);
        return nothing(NO_SAMPLES, inside, screen);
    };
    let step = samples.first().map_or(0, |sample| sample.step);
    let title = vec![
        Span::styled(format!("samples of step {step}"), Theme::title()),
        Span::styled(format!("  {} of {}", at + 1, steps.len()), Theme::quiet()),
    ];
    let inside = titled(Line::from(title), area, screen);
    let lines: Vec<_> = samples.iter().flat_map(|sample| lines_of(sample, inside.width)).collect();
    let page = usize::from(inside.height);
    watch.samples.page = page;
    watch.samples.down = watch.samples.down.min(lines.len().saturating_sub(page));
    for (row, line) in lines.into_iter().skip(watch.samples.down).take(page).enumerate() {
        put(line, inside, row as u16, screen);
    }
}

/// The last text alone.
pub(super) fn pane(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let last = watch.front().and_then(|news| news.folder.samples.last().cloned());
    let Some(last) = last else {
        let inside = titled(Line::styled("samples", Theme::title()), area, screen);
        return nothing(NO_SAMPLES, inside, screen);
    };
    let title = Line::styled(format!("sample of step {}", last.step), Theme::title());
    let inside = titled(title, area, screen);
    for (row, line) in lines_of(&last, inside.width).into_iter().take(usize::from(inside.height)).enumerate()
    {
        put(line, inside, row as u16, screen);
    }
}

/// A prompt and what the model went on with.
fn lines_of(sample: &Sample, width: u16) -> Vec<Line<'static>> {
    let columns = usize::from(width).saturating_sub(4);
    let mut lines = Vec::new();
    let prompt = if sample.prompt.is_empty() { "(no prompt)" } else { &sample.prompt };
    for (index, line) in wrap(&clean(prompt), columns).into_iter().enumerate() {
        let mark = if index == 0 { " ▸ " } else { "   " };
        lines.push(Line::styled(format!("{mark}{line}"), Theme::title()));
    }
    let text = wrap(&clean(&sample.text), columns);
    lines.extend(text.into_iter().map(|line| Line::styled(format!("   {line}"), Style::new())));
    lines.push(Line::default());
    lines
}
