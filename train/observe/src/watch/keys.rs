//! What keys do.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyEventKind, KeyModifiers};

use super::curve::SMOOTHING;
use super::draw::COLUMNS;
use super::state::{View, Watch};

/// The reaction of the owner of the terminal to a key.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Action {
    /// Draw.
    Draw,
    /// Draw every cell: another program has written on the terminal.
    DrawAll,
    /// Restore the terminal and stop until the shell continues the program.
    Suspend,
    Quit,
}

/// Applies a key. Returns `None` if it changes nothing.
pub(super) fn on_key(watch: &mut Watch, key: KeyEvent) -> Option<Action> {
    // Some terminals also report when a key is released.
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
        return on_list(watch, key.code).then_some(Action::Draw);
    }
    if key.code == KeyCode::Char('q') {
        return Some(Action::Quit);
    }
    if std::mem::take(&mut watch.shows_help) {
        return Some(Action::Draw);
    }
    let rows = &mut watch.rows;
    match (watch.view, key.code) {
        (_, KeyCode::Char('?') | KeyCode::F(1)) => watch.shows_help = true,
        (_, KeyCode::Tab) | (View::Overview, KeyCode::Right) => watch.view = watch.view.step(1),
        (_, KeyCode::BackTab) | (View::Overview, KeyCode::Left) => watch.view = watch.view.step(-1),
        (_, KeyCode::Char(digit @ '1'..='6')) => watch.view = View::ALL[usize::from(digit as u8 - b'1')].0,
        (_, KeyCode::Char('n')) => watch.go_to_run(1),
        (_, KeyCode::Char('p')) => watch.go_to_run(-1),
        (View::Overview | View::Curves, code) => return on_curves(watch, code).then_some(Action::Draw),
        (View::Ranks, KeyCode::Left) => rows.sort = (rows.sort + COLUMNS.len() - 1) % COLUMNS.len(),
        (View::Ranks, KeyCode::Right | KeyCode::Char('s')) => rows.sort = (rows.sort + 1) % COLUMNS.len(),
        (View::Ranks, KeyCode::Char('r')) => rows.is_reversed = !rows.is_reversed,
        (View::Log, KeyCode::Left) => watch.go_to_source(-1),
        (View::Log, KeyCode::Right) => watch.go_to_source(1),
        (View::Log, KeyCode::Char('w')) => (rows.cuts_lines, rows.log_back) = (!rows.cuts_lines, 0),
        (View::Runs, KeyCode::Up) if watch.front > 0 => watch.go_to_run(-1),
        (View::Runs, KeyCode::Down) if watch.front + 1 < watch.runs.len() => watch.go_to_run(1),
        (View::Runs, KeyCode::Char(' ')) => {
            if !watch.curves.hidden.remove(&watch.front) {
                watch.curves.hidden.insert(watch.front);
            }
            watch.curves.is_alone = false;
        }
        (view, code) => {
            let by = distance(code, rows.page)?;
            let is_page = matches!(code, KeyCode::PageUp | KeyCode::PageDown);
            match view {
                View::Ranks => {
                    let chosen = rows.ranks.selected().unwrap_or(0);
                    rows.ranks.select(Some(chosen.saturating_add_signed(by)));
                }
                View::Log => rows.log_back = rows.log_back.saturating_add_signed(-by),
                View::Samples if is_page => rows.sample_line = rows.sample_line.saturating_add_signed(by),
                View::Samples => {
                    (rows.sample_back, rows.sample_line) = (rows.sample_back.saturating_add_signed(-by), 0);
                }
                View::Runs if is_page => rows.difference = rows.difference.saturating_add_signed(by),
                _ => return None,
            }
        }
    }
    Some(Action::Draw)
}

/// The rows that a key moves down. Home and End move beyond any end.
fn distance(code: KeyCode, page: usize) -> Option<isize> {
    Some(match code {
        KeyCode::Up => -1,
        KeyCode::Down => 1,
        KeyCode::PageUp => -(page as isize),
        KeyCode::PageDown => page as isize,
        KeyCode::Home => -isize::MAX / 2,
        KeyCode::End => isize::MAX / 2,
        _ => return None,
    })
}

fn on_curves(watch: &mut Watch, code: KeyCode) -> bool {
    let keys: Vec<String> = watch.keys().into_iter().map(str::to_owned).collect();
    let extent = watch.extent();
    let curves = &mut watch.curves;
    let at = keys.iter().position(|key| *key == curves.key).unwrap_or(0);
    if matches!(code, KeyCode::Char('k') | KeyCode::Up | KeyCode::Down) {
        watch.view = View::Curves;
    }
    match code {
        KeyCode::Char('+' | '=') => curves.window.zoom(true, extent),
        KeyCode::Char('-' | '_') => curves.window.zoom(false, extent),
        KeyCode::Char('0') | KeyCode::Home => curves.window = Default::default(),
        KeyCode::Left | KeyCode::Char('<' | ',') => curves.window.pan(true, extent),
        KeyCode::Right | KeyCode::Char('>' | '.') => curves.window.pan(false, extent),
        KeyCode::Char('s') => curves.smoothing = (curves.smoothing + 1).min(SMOOTHING.len() - 1),
        KeyCode::Char('S') => curves.smoothing = curves.smoothing.saturating_sub(1),
        KeyCode::Char('l') => curves.is_log_y = !curves.is_log_y,
        KeyCode::Char('L') => curves.is_log_x = !curves.is_log_x,
        KeyCode::Char('c') => curves.is_alone = !curves.is_alone,
        KeyCode::Char('k') => curves.list = Some((String::new(), at)),
        KeyCode::Up | KeyCode::Down => {
            let next = if code == KeyCode::Up { at.saturating_sub(1) } else { at + 1 };
            curves.key = keys.get(next).unwrap_or(&curves.key).clone();
        }
        _ => return false,
    }
    true
}

fn on_list(watch: &mut Watch, code: KeyCode) -> bool {
    let listed = watch.listed_keys();
    let curves = &mut watch.curves;
    let Some((typed, at)) = &mut curves.list else { return false };
    match code {
        KeyCode::Esc => curves.list = None,
        KeyCode::Enter => {
            curves.key = listed.get(*at).unwrap_or(&curves.key).clone();
            curves.list = None;
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
        _ => return false,
    }
    true
}
