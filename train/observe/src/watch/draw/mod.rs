//! Draws the screen: a head of three lines, the view, what there is to say about the run, and the keys.

mod curves;
mod frame;
mod log;
mod overview;
mod ranks;
mod runs;
mod samples;

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use super::state::{View, Watch};
use frame::{Areas, areas};

/// The smallest screen on which anything can be read.
const LEAST: (u16, u16) = (40, 10);

/// Draws everything.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    if area.width < LEAST.0 || area.height < LEAST.1 {
        let text = format!("too small: {}x{} at least", LEAST.0, LEAST.1);
        screen.set_stringn(area.x, area.y, text, usize::from(area.width), ratatui::style::Style::new());
        return;
    }
    let Areas { head, body, verdict, keys } = areas(watch, area);
    frame::head(watch, head, screen);
    frame::verdict(watch, verdict, screen);
    frame::keys(watch, keys, screen);
    match watch.view {
        _ if watch.shows_help => frame::help(body, screen),
        _ if watch.subjects.is_empty() => frame::no_runs(watch, body, screen),
        View::Overview => overview::draw(watch, body, screen),
        View::Curves => curves::draw(watch, body, screen),
        View::Ranks => ranks::draw(watch, body, screen),
        View::Log => log::draw(watch, body, screen),
        View::Samples => samples::draw(watch, body, screen),
        View::Runs => runs::draw(watch, body, screen),
    }
    watch.theme.apply(screen);
}
