//! Draws the screen: a head of three lines, the view, the verdict on the run in front, and the keys.

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};
use ratatui::text::Line;
use ratatui::widgets::{Paragraph, Widget};

mod curves;
mod frame;
mod log;
mod overview;
mod ranks;
mod runs;
mod samples;

pub(super) use ranks::COLUMNS;

use super::state::{View, Watch};
use super::theme::Theme;

/// The smallest usable screen.
const LEAST: (u16, u16) = (40, 10);

/// Draws everything.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    if area.width < LEAST.0 || area.height < LEAST.1 {
        return Line::raw(format!("too small: {}x{} at least", LEAST.0, LEAST.1)).render(area, screen);
    }
    let verdict = frame::verdict(watch, area.width);
    let rows = verdict.len().min(if area.height < 30 { 3 } else { 8 });
    let (three, one) = (Constraint::Length(3), Constraint::Length(1));
    let [top, body, below, bottom] =
        area.layout(&Layout::vertical([three, Constraint::Fill(1), Constraint::Length(rows as u16), one]));
    frame::head(watch, top, screen);
    let hidden = verdict.len() - rows;
    Paragraph::new(verdict).render(below, screen);
    if let Some(last) = below.rows().next_back().filter(|_| hidden > 0) {
        Line::styled(format!(" … {hidden} more "), Theme::quiet()).right_aligned().render(last, screen);
    }
    frame::hints(watch, bottom.width).render(bottom, screen);
    match watch.view {
        _ if watch.shows_help => frame::help(body, screen),
        _ if watch.runs.is_empty() => frame::no_runs(watch, body, screen),
        View::Overview => overview::draw(watch, body, screen),
        View::Curves => curves::draw(watch, body, screen),
        View::Ranks => ranks::draw(watch, body, screen),
        View::Log => log::draw(watch, body, screen),
        View::Samples => samples::draw(watch, body, screen),
        View::Runs => runs::draw(watch, body, screen),
    }
    watch.theme.apply(screen);
}
