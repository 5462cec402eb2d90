//! Texts that the run has generated.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;
use ratatui::text::{Line, Span};
use ratatui::widgets::{Paragraph, Widget};

use super::super::feed::Snapshot;
use super::super::state::Watch;
use super::super::text::{clean, wrap};
use super::super::theme::Theme;
use super::frame::{nothing, plain_title, titled};
use crate::run::Sample;

/// Draws the view: all texts of a step.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let Some(run) = watch.front().cloned() else { return };
    let steps: Vec<&[Sample]> = samples_of(&run).chunk_by(|a, b| a.step == b.step).collect();
    watch.rows.sample_back = watch.rows.sample_back.min(steps.len().saturating_sub(1));
    let at = steps.len().saturating_sub(watch.rows.sample_back + 1);
    let Some(samples) = steps.get(at) else { return no_samples(area, screen) };
    let title = plain_title(format!("samples of step {}", samples[0].step));
    let place = Span::styled(format!("  {} of {}", at + 1, steps.len()), Theme::quiet());
    let inside = titled(vec![title, place], area, screen);
    let lines: Vec<_> = samples.iter().flat_map(|sample| lines_of(sample, inside.width)).collect();
    watch.rows.page = usize::from(inside.height);
    watch.rows.sample_line = watch.rows.sample_line.min(lines.len().saturating_sub(watch.rows.page));
    Paragraph::new(lines.into_iter().skip(watch.rows.sample_line).collect::<Vec<_>>()).render(inside, screen);
}

/// Draws the last text.
pub(super) fn pane(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let last = watch.front().and_then(|run| samples_of(run).last());
    let Some(last) = last else { return no_samples(area, screen) };
    let inside = titled(plain_title(format!("sample of step {}", last.step)), area, screen);
    Paragraph::new(lines_of(last, inside.width)).render(inside, screen);
}

fn samples_of(run: &Snapshot) -> &[Sample] {
    run.run.as_ref().map_or(&[], |run| run.samples())
}

fn no_samples(area: Rect, screen: &mut Buffer) {
    let inside = titled(plain_title("samples"), area, screen);
    nothing("no text has been generated yet: set sample.every to a number of steps", inside, screen);
}

/// A prompt and the text that follows it.
fn lines_of(sample: &Sample, columns: u16) -> Vec<Line<'static>> {
    let wrapped = |text: &str| wrap(&clean(text), usize::from(columns).saturating_sub(4)).into_iter();
    let prompt = if sample.prompt.is_empty() { "(no prompt)" } else { &sample.prompt };
    let prompt = wrapped(prompt).enumerate().map(|(at, line)| {
        let mark = if at == 0 { " ▸ " } else { "   " };
        Line::styled(format!("{mark}{line}"), Theme::title())
    });
    let text = wrapped(&sample.text).map(|line| Line::raw(format!("   {line}")));
    prompt.chain(text).chain([Line::default()]).collect()
}
