//! A part of everything: as much as there is room for.

use ratatui::buffer::Buffer;
use ratatui::layout::Rect;

use super::super::state::Watch;
use super::{curves, log, ranks, samples};

/// From this size on, all panes are shown.
const LARGE: (u16, u16) = (120, 32);

/// Metrics below the loss, where there is room, in the order in which they are wanted.
const MORE: [&str; 6] = ["tokens_per_s", "grad_norm", "lr", "mfu", "step_s", "peak_bytes"];

/// Metrics that are shown below the loss, at most.
const MOST_MORE: usize = 3;

/// The view.
pub(super) fn draw(watch: &mut Watch, area: Rect, screen: &mut Buffer) {
    let ranks = watch.front().and_then(|news| news.look.as_ref()).map_or(0, |look| look.ranks.len()) as u16;
    let key = watch.curves.key.clone();
    if area.width < LARGE.0 || area.height < LARGE.1 {
        // Ranks get what they need, and the curve half at least. Where nobody is there, the log is worth more.
        let low = if ranks == 0 { area.height / 3 } else { (ranks + 2).min(area.height / 2) };
        let above = Rect { height: area.height - low, ..area };
        let below = Rect { y: area.y + above.height, height: low, ..area };
        curves::pane(watch, &key, true, above, screen);
        if ranks == 0 {
            log::pane(watch, below, screen)
        } else {
            ranks::pane(watch, below, screen)
        }
        return;
    }
    let left = area.width * 52 / 100;
    let column =
        |x: u16, width: u16| move |y: u16, height: u16| Rect { x: area.x + x, y: area.y + y, width, height };
    let (on_left, on_right) = (column(0, left), column(left + 2, area.width - left - 2));
    let more: Vec<&str> = MORE
        .into_iter()
        .filter(|more| *more != key && watch.curves.keys.iter().any(|key| key == more))
        .take(MOST_MORE)
        .collect();
    let small = if more.is_empty() { 0 } else { area.height / 2 / MOST_MORE as u16 };
    let main = area.height - small * more.len() as u16;
    curves::pane(watch, &key, true, on_left(0, main), screen);
    for (index, more) in more.into_iter().enumerate() {
        curves::pane(watch, more, false, on_left(main + small * index as u16, small), screen);
    }
    let table = (ranks + 3).clamp(4, area.height / 2);
    ranks::pane(watch, on_right(0, table), screen);
    let rest = area.height - table;
    let output = rest * 6 / 10;
    log::pane(watch, on_right(table, output), screen);
    samples::pane(watch, on_right(table + output, rest - output), screen);
}
