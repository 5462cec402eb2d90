//! The keys and their effects.

use ratatui::crossterm::event::KeyCode::{self, *};
use ratatui::crossterm::event::{KeyEvent, KeyEventKind, KeyModifiers};

use super::ranks::COLUMNS;
use super::state::View::{self, *};
use super::state::{SMOOTHING, Watch, further};

/// Views, keys, help text, and hints (separated by two spaces).
pub(super) const KEYS: [(&[View], [&str; 3]); 18] = [
    (&View::ALL, ["?", "show this help", "? help"]),
    (&View::ALL, ["q, Ctrl-C", "quit; Ctrl-Z suspends the program; Ctrl-L redraws the screen", "q quit"]),
    (&View::ALL, ["Tab, 1-6", "next view (Shift-Tab: previous view); a view by its number", "Tab view"]),
    (&View::ALL, ["n p", "next run, previous run", "n/p run"]),
    (CURVES, ["k, up down", "Curves, Overview: list of metrics; previous, next metric", "k up/down metric"]),
    (CURVES, ["+ -", "Curves, Overview: half as many steps, twice as many; 0 shows all", "+/- zoom"]),
    (
        &[Curves],
        ["left right", "Curves: earlier steps, later steps (also < > in Overview)", "left/right pan"],
    ),
    (CURVES, ["s S", "Curves, Overview: more smoothing, less smoothing", "s smooth"]),
    (CURVES, ["l L", "Curves, Overview: logarithmic values, logarithmic steps", "l log"]),
    (CURVES, ["c", "Curves, Overview: curves of this run alone, or of all runs", ""]),
    (&[Ranks], ["up down", "Ranks: select a rank, whose details are shown below", "up/down select"]),
    (&[Ranks], ["left right", "Ranks: column to sort by; r reverses", "left/right sort  r reverse"]),
    (&[Log], ["up down", "Log: scroll, as PgUp PgDn Home; End follows new lines", "up/down scroll"]),
    (&[Log], ["left right", "Log: events, all ranks, or one rank; w cuts lines", "left/right source  w cut"]),
    (&[Samples], ["up down", "Samples: previous step, next step", "up/down step"]),
    (
        &[Runs],
        ["up down", "Runs: select a run; Space hides or shows its curves", "up/down select  Space hide"],
    ),
    (&[Samples], ["PgUp PgDn", "Samples: scroll", "PgUp/PgDn scroll"]),
    (&[Runs], ["PgUp PgDn", "Runs: scroll the differences of configurations", "PgUp/PgDn scroll"]),
];

const CURVES: &[View] = &[Overview, Curves];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    Draw,
    /// Draws every cell, in case another program has written on the terminal.
    DrawAll,
    Suspend,
    Quit,
}

/// Applies a key. Returns `None` if the key has no effect.
pub(super) fn on_key(watch: &mut Watch, key: KeyEvent) -> Option<Action> {
    // Some terminals also report released keys.
    if key.kind == KeyEventKind::Release {
        return None;
    }
    let key = match (key.modifiers.contains(KeyModifiers::CONTROL), key.code) {
        (true, Char('c' | 'C')) => return Some(Action::Quit),
        (true, Char('z' | 'Z')) => return Some(Action::Suspend),
        (true, Char('l' | 'L')) => return Some(Action::DrawAll),
        (true, _) => return None,
        (false, key) => key,
    };
    if watch.curves.list.is_some() {
        on_list(watch, key);
        return Some(Action::Draw);
    }
    if key == Char('q') {
        return Some(Action::Quit);
    }
    if std::mem::take(&mut watch.shows_help) {
        return Some(Action::Draw);
    }
    let extent = watch.extent();
    let keys: Vec<String> = watch.keys().into_iter().map(str::to_owned).collect();
    let Watch { curves, rows, .. } = watch;
    let metric = keys.iter().position(|key| *key == curves.key).unwrap_or(0);
    let by = match key {
        Up => -1,
        Down => 1,
        PageUp => -(rows.page as isize),
        PageDown => rows.page as isize,
        Home => -isize::MAX / 2,
        End => isize::MAX / 2,
        _ => 0,
    };
    let is_page = matches!(key, PageUp | PageDown);
    match (watch.view, key) {
        (_, Char('?') | F(1)) => watch.shows_help = true,
        (_, Tab) | (Overview, Right) => watch.go_to_view(1),
        (_, BackTab) | (Overview, Left) => watch.go_to_view(-1),
        (_, Char(digit @ '1'..='6')) => watch.view = View::ALL[digit as usize - '1' as usize],
        (_, Char('n')) => watch.go_to_run(1),
        (_, Char('p')) => watch.go_to_run(-1),

        (Overview | Curves, Char('k')) => (watch.view, curves.list) = (Curves, Some((String::new(), metric))),
        (Overview | Curves, Up | Down) => {
            let next = metric.saturating_add_signed(by);
            (watch.view, curves.key) = (Curves, keys.get(next).unwrap_or(&curves.key).clone());
        }
        (Overview | Curves, Char('+' | '=')) => curves.window.zoom(true, extent),
        (Overview | Curves, Char('-' | '_')) => curves.window.zoom(false, extent),
        (Overview | Curves, Char('0') | Home) => curves.window = Default::default(),
        (Overview | Curves, Left | Char('<' | ',')) => curves.window.pan(true, extent),
        (Overview | Curves, Right | Char('>' | '.')) => curves.window.pan(false, extent),
        (Overview | Curves, Char('s')) => curves.smoothing = (curves.smoothing + 1).min(SMOOTHING.len() - 1),
        (Overview | Curves, Char('S')) => curves.smoothing = curves.smoothing.saturating_sub(1),
        (Overview | Curves, Char('l')) => curves.is_log_y = !curves.is_log_y,
        (Overview | Curves, Char('L')) => curves.is_log_x = !curves.is_log_x,
        (Overview | Curves, Char('c')) => curves.is_alone = !curves.is_alone,

        (Ranks, Left) => rows.sort = further(rows.sort, -1, COLUMNS.len()),
        (Ranks, Right | Char('s')) => rows.sort = further(rows.sort, 1, COLUMNS.len()),
        (Ranks, Char('r')) => rows.is_reversed = !rows.is_reversed,
        (Log, Left) => watch.go_to_source(-1),
        (Log, Right) => watch.go_to_source(1),
        (Log, Char('w')) => (rows.cuts_lines, rows.log_back) = (!rows.cuts_lines, 0),
        (Runs, Up) if watch.front > 0 => watch.go_to_run(-1),
        (Runs, Down) if watch.front + 1 < watch.runs.len() => watch.go_to_run(1),
        (Runs, Char(' ')) => {
            if !curves.hidden.remove(&watch.front) {
                curves.hidden.insert(watch.front);
            }
            curves.is_alone = false;
        }

        _ if by == 0 => return None,
        (Ranks, _) => {
            let selected = rows.ranks.selected().unwrap_or(0);
            rows.ranks.select(Some(selected.saturating_add_signed(by)));
        }
        (Log, _) => rows.log_back = rows.log_back.saturating_add_signed(-by),
        (Samples, _) if is_page => rows.sample_line = rows.sample_line.saturating_add_signed(by),
        (Samples, _) => {
            (rows.sample_back, rows.sample_line) = (rows.sample_back.saturating_add_signed(-by), 0);
        }
        (Runs, _) if is_page => rows.difference = rows.difference.saturating_add_signed(by),
        _ => return None,
    }
    Some(Action::Draw)
}

fn on_list(watch: &mut Watch, key: KeyCode) {
    let listed = watch.listed_keys();
    let curves = &mut watch.curves;
    let Some((typed, at)) = &mut curves.list else { return };
    match key {
        Up => *at = at.saturating_sub(1),
        Down => *at = (*at + 1).min(listed.len().saturating_sub(1)),
        Char(c) => {
            typed.push(c);
            *at = 0;
        }
        Backspace => {
            typed.pop();
            *at = 0;
        }
        Enter => {
            curves.key = listed.get(*at).unwrap_or(&curves.key).clone();
            curves.list = None;
        }
        Esc => curves.list = None,
        _ => {}
    }
}
