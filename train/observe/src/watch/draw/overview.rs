//! A part of everything: as much as there is room for.

use ratatui::buffer::Buffer;
use ratatui::layout::{Constraint, Layout, Rect};

use super::super::state::Watch;
use super::{curves, log, ranks, samples};

/// The smallest screen that shows all panes.
const LARGE: (u16, u16) = (120, 32);

/// Metrics below the loss, in order of preference.
const MORE: [&str; 6] = ["tokens_per_s", "grad_norm", "lr", "mfu", "step_s", "peak_bytes"];

/// Metrics below the loss, at most.
const MOST_MORE: usize = 3;

/// Draws the view.
pub(super) fn draw(watch: &Watch, area: Rect, screen: &mut Buffer) {
    let ranks = watch.front().and_then(|run| run.look.as_ref()).map_or(0, |look| look.ranks.len()) as u16;
    let key = watch.curves.key.as_str();
    let split = |area: Rect, low: u16| {
        area.layout(&Layout::vertical([Constraint::Fill(1), Constraint::Length(low)])) as [Rect; 2]
    };
    if area.width < LARGE.0 || area.height < LARGE.1 {
        // Ranks get the rows they need, and the curve half at least. Without ranks, the log is worth more.
        let low = if ranks == 0 { area.height / 3 } else { (ranks + 2).min(area.height / 2) };
        let [above, below] = split(area, low);
        curves::pane(watch, key, true, above, screen);
        return if ranks == 0 { log::pane(watch, below, screen) } else { ranks::pane(watch, below, screen) };
    }
    let left = Constraint::Length(area.width * 52 / 100);
    let [left, right] = area.layout(&Layout::horizontal([left, Constraint::Fill(1)]).spacing(2));
    let keys = watch.keys();
    let more = MORE.into_iter().filter(|more| *more != key && keys.contains(more));
    let more: Vec<&str> = more.take(MOST_MORE).collect();
    let small = area.height / 2 / MOST_MORE as u16;
    let (mut rest, mut lower) = (left, Vec::new());
    for more in more.into_iter().rev() {
        let [above, below] = split(rest, small);
        rest = above;
        lower.push((more, below));
    }
    curves::pane(watch, key, true, rest, screen);
    for (more, area) in lower {
        curves::pane(watch, more, false, area, screen);
    }
    let table = (ranks + 3).clamp(4, area.height / 2);
    let [above, below] = split(right, area.height - table);
    ranks::pane(watch, above, screen);
    let output = below.height * 6 / 10;
    let [output, samples] = split(below, below.height - output);
    log::pane(watch, output, screen);
    samples::pane(watch, samples, screen);
}
