//! What keys do.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::curve::SMOOTHING;
use super::rows::Column;
use super::state::{Source, View, Watch};

/// What whoever has the terminal is to do after a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Draw.
    Draw,
    /// Draw every cell again: somebody else has written on the terminal.
    DrawAll,
    /// Give the terminal back and stop, until the shell says that it goes on.
    Suspend,
    /// Leave.
    Quit,
}

/// Keys and what they do, for the help: the keys, what they do, and where, if not everywhere.
pub(super) const HELP: [(&str, &str); 18] = [
    ("Tab, 1-6", "next view (Shift-Tab: the one before); a view by its number"),
    ("n p", "next run, run before"),
    ("?", "this help"),
    ("q, Ctrl-C", "leave; Ctrl-Z stops, fg goes on; Ctrl-L draws all again"),
    ("", ""),
    ("k, up down", "Curves: list of metrics (type to narrow it); metric before, next"),
    ("+ -", "Curves, Overview: half as many steps, twice as many; 0 shows all"),
    ("left right", "Curves: earlier steps, later steps (also < > in Overview)"),
    ("s S", "Curves, Overview: more smoothing, less"),
    ("l L", "Curves, Overview: logarithmic values, logarithmic steps"),
    ("c", "Curves, Overview: curves of this run alone, or of all"),
    ("left right", "Ranks: column to sort by; r reverses the order"),
    ("up down", "Ranks: choose a rank, of which all is told below"),
    ("left right", "Log: whose lines (events, all ranks, one rank); w cuts long ones"),
    ("up down", "Log: scroll, as PgUp PgDn Home; End follows new lines"),
    ("up down", "Samples: earlier step, later step; PgUp PgDn scroll"),
    ("up down", "Runs: choose a run; Space hides it from curves or shows it"),
    ("PgUp PgDn", "Runs: scroll the differences of configurations"),
];

/// What a key does.
pub(super) fn on_key(watch: &mut Watch, key: KeyEvent) -> Option<Action> {
    // Some terminals tell also when a key is let go.
    if key.kind == KeyEventKind::Release {
        return None;
    }
    if key.modifiers.contains(KeyModifiers::CONTROL) {
        return match key.code {
            KeyCode::Char('c' | 'C') => Some(Action::Quit),
            KeyCode::Char('z' | 'Z') => Some(Action::Suspend),
            KeyCode::Char('l' | 'L') => Some(Action::DrawAll),
            _ => None,
        };
    }
    if watch.curves.list.is_some() {
        return on_list(watch, key.code);
    }
    if watch.shows_help {
        watch.shows_help = false;
        // The key that closes the help does nothing else, but to leave.
        return Some(if key.code == KeyCode::Char('q') { Action::Quit } else { Action::Draw });
    }
    match key.code {
        KeyCode::Char('q') => return Some(Action::Quit),
        KeyCode::Char('?') | KeyCode::F(1) => watch.shows_help = true,
        KeyCode::Tab => watch.view = watch.view.step(1),
        KeyCode::BackTab => watch.view = watch.view.step(-1),
        KeyCode::Char(digit @ '1'..='6') => {
            watch.view = View::ALL[usize::from(digit as u8 - b'1')];
        }
        KeyCode::Char('n') => watch.go_to_run(1),
        KeyCode::Char('p') => watch.go_to_run(-1),
        code => {
            return match watch.view {
                View::Overview => on_overview(watch, code),
                View::Curves => on_curves(watch, code),
                View::Ranks => on_ranks(watch, code),
                View::Log => on_log(watch, code),
                View::Samples => on_samples(watch, code),
                View::Runs => on_runs(watch, code),
            }
            .then_some(Action::Draw);
        }
    }
    Some(Action::Draw)
}

fn on_overview(watch: &mut Watch, code: KeyCode) -> bool {
    match code {
        KeyCode::Right => watch.view = watch.view.step(1),
        KeyCode::Left => watch.view = watch.view.step(-1),
        KeyCode::Char('k') | KeyCode::Up | KeyCode::Down => {
            watch.view = View::Curves;
            return on_curves(watch, code);
        }
        code => return on_curves(watch, code),
    }
    true
}

fn on_curves(watch: &mut Watch, code: KeyCode) -> bool {
    let curves = &mut watch.curves;
    let (first, last) = curves.extent;
    match code {
        KeyCode::Char('+' | '=') => curves.window.zoom(true, first, last),
        KeyCode::Char('-' | '_') => curves.window.zoom(false, first, last),
        KeyCode::Char('0') | KeyCode::Home => curves.window = Default::default(),
        KeyCode::Left | KeyCode::Char('<' | ',') => curves.window.pan(true, first, last),
        KeyCode::Right | KeyCode::Char('>' | '.') => curves.window.pan(false, first, last),
        KeyCode::Char('s') => curves.smoothing = (curves.smoothing + 1).min(SMOOTHING.len() - 1),
        KeyCode::Char('S') => curves.smoothing = curves.smoothing.saturating_sub(1),
        KeyCode::Char('l') => curves.is_log_y = !curves.is_log_y,
        KeyCode::Char('L') => curves.is_log_x = !curves.is_log_x,
        KeyCode::Char('c') => {
            watch.is_alone = !watch.is_alone;
        }
        KeyCode::Char('k') => {
            let at = curves.keys.iter().position(|key| *key == curves.key).unwrap_or(0);
            curves.list = Some((String::new(), at));
        }
        KeyCode::Up | KeyCode::Down => {
            let at = curves.keys.iter().position(|key| *key == curves.key).unwrap_or(0);
            let next = if code == KeyCode::Up { at.saturating_sub(1) } else { at + 1 };
            if let Some(key) = curves.keys.get(next) {
                curves.key = key.clone();
            }
        }
        _ => return false,
    }
    true
}

fn on_list(watch: &mut Watch, code: KeyCode) -> Option<Action> {
    let listed = watch.listed();
    let (typed, at) = watch.curves.list.as_mut()?;
    match code {
        KeyCode::Esc => watch.curves.list = None,
        KeyCode::Enter => {
            if let Some(key) = listed.get(*at) {
                watch.curves.key = key.clone();
            }
            watch.curves.list = None;
        }
        KeyCode::Up => *at = at.saturating_sub(1),
        KeyCode::Down => *at = (*at + 1).min(listed.len().saturating_sub(1)),
        KeyCode::Backspace => {
            typed.pop();
            *at = 0;
        }
        KeyCode::Char(c) => {
            typed.push(c);
            *at = 0;
        }
        _ => return None,
    }
    Some(Action::Draw)
}

fn on_ranks(watch: &mut Watch, code: KeyCode) -> bool {
    let count = watch.front().and_then(|news| news.look.as_ref()).map_or(0, |look| look.ranks.len());
    let ranks = &mut watch.ranks;
    let (last, page) = (count.saturating_sub(1), ranks.page.max(1));
    let sort = Column::ALL.iter().position(|column| *column == ranks.sort).unwrap_or(0);
    match code {
        KeyCode::Up => ranks.chosen = ranks.chosen.saturating_sub(1),
        KeyCode::Down => ranks.chosen = (ranks.chosen + 1).min(last),
        KeyCode::PageUp => ranks.chosen = ranks.chosen.saturating_sub(page),
        KeyCode::PageDown => ranks.chosen = (ranks.chosen + page).min(last),
        KeyCode::Home => ranks.chosen = 0,
        KeyCode::End => ranks.chosen = last,
        KeyCode::Left => ranks.sort = Column::ALL[(sort + Column::ALL.len() - 1) % Column::ALL.len()],
        KeyCode::Right | KeyCode::Char('s') => ranks.sort = Column::ALL[(sort + 1) % Column::ALL.len()],
        KeyCode::Char('r') => ranks.is_reversed = !ranks.is_reversed,
        _ => return false,
    }
    true
}

fn on_log(watch: &mut Watch, code: KeyCode) -> bool {
    let log = &mut watch.log;
    let page = log.page.max(1);
    let next_source = |log: &super::state::Log, by: isize| {
        let at = log.sources.iter().position(|source| *source == log.source).unwrap_or(0) as isize;
        let count = log.sources.len().max(1) as isize;
        log.sources.get((at + by).rem_euclid(count) as usize).copied().unwrap_or(Source::Either)
    };
    match code {
        KeyCode::Up => log.back += 1,
        KeyCode::Down => log.back = log.back.saturating_sub(1),
        KeyCode::PageUp => log.back += page,
        KeyCode::PageDown => log.back = log.back.saturating_sub(page),
        // As far as it goes, which drawing finds.
        KeyCode::Home => log.back = usize::MAX / 2,
        KeyCode::End => log.back = 0,
        KeyCode::Left => (log.source, log.back) = (next_source(log, -1), 0),
        KeyCode::Right => (log.source, log.back) = (next_source(log, 1), 0),
        KeyCode::Char('w') => (log.is_cut, log.back) = (!log.is_cut, 0),
        _ => return false,
    }
    true
}

fn on_samples(watch: &mut Watch, code: KeyCode) -> bool {
    let samples = &mut watch.samples;
    let (last, page) = (samples.count.saturating_sub(1), samples.page.max(1));
    match code {
        KeyCode::Up => (samples.back, samples.down) = ((samples.back + 1).min(last), 0),
        KeyCode::Down => (samples.back, samples.down) = (samples.back.saturating_sub(1), 0),
        KeyCode::Home => (samples.back, samples.down) = (last, 0),
        KeyCode::End => (samples.back, samples.down) = (0, 0),
        KeyCode::PageUp => samples.down = samples.down.saturating_sub(page),
        KeyCode::PageDown => samples.down += page,
        _ => return false,
    }
    true
}

fn on_runs(watch: &mut Watch, code: KeyCode) -> bool {
    let last = watch.subjects.len().saturating_sub(1);
    match code {
        KeyCode::Up if watch.at > 0 => watch.go_to_run(-1),
        KeyCode::Down if watch.at < last => watch.go_to_run(1),
        KeyCode::Char(' ') => {
            if !watch.hidden.remove(&watch.at) {
                watch.hidden.insert(watch.at);
            }
            watch.is_alone = false;
        }
        // Drawing finds how far it goes.
        KeyCode::PageDown => watch.differences += 5,
        KeyCode::PageUp => watch.differences = watch.differences.saturating_sub(5),
        _ => return false,
    }
    true
}
