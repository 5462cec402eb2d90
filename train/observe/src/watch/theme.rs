//! Colours and characters, and their replacements on limited terminals.

use std::ffi::OsString;

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier, Style};

use crate::status::State;

/// The colours and characters that a terminal supports.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Theme {
    /// Support for colours, which are never the only cue.
    pub has_colours: bool,
    /// Support for characters beyond ASCII.
    pub has_unicode: bool,
}

const RUNS: [Color; 6] = [Color::Cyan, Color::Yellow, Color::Magenta, Color::Green, Color::Blue, Color::Red];

fn ascii(symbol: &str) -> &'static str {
    match symbol {
        "─" => "-",
        "━" => "=",
        "│" => "|",
        "└" | "✓" => "+",
        "…" => "~",
        "●" => "o",
        "○" => ".",
        "▲" | "↑" => "^",
        "▼" | "↓" => "v",
        "▸" => ">",
        "×" => "x",
        "°" => " ",
        _ => "?",
    }
}

impl Theme {
    /// Reads `NO_COLOR`, `TERM`, and the locale.
    pub fn from_environment(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let text = |name: &str| {
            variable(name).filter(|value| !value.is_empty()).map(|value| value.to_string_lossy().into_owned())
        };
        let term = text("TERM").unwrap_or_default();
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(text).unwrap_or_default();
        let locale = locale.to_ascii_lowercase().replace('-', "");
        Theme {
            has_colours: text("NO_COLOR").is_none() && term != "dumb" && !term.ends_with("-m"),
            has_unicode: locale.contains("utf8") && term != "linux",
        }
    }

    pub(super) fn run(run: usize) -> Color {
        RUNS[run % RUNS.len()]
    }

    pub(super) const QUIET: Style = Style::new().fg(Color::DarkGray);
    pub(super) const TITLE: Style = Style::new().add_modifier(Modifier::BOLD);
    pub(super) const SELECTED: Style = Style::new().add_modifier(Modifier::REVERSED);
    pub(super) const BAD: Style = Style::new().fg(Color::Red).add_modifier(Modifier::BOLD);

    pub(super) fn state(state: Option<State>) -> (Style, String) {
        let Some(state) = state else { return (Theme::QUIET, "○ unknown".to_owned()) };
        let (style, mark) = match state {
            state if state.is_bad() => (Theme::BAD, "!"),
            State::Held | State::Slow | State::Stopped => (Color::Yellow.into(), "▲"),
            State::Finished => (Color::Green.into(), "✓"),
            State::Starting => (Color::Blue.into(), "○"),
            _ => (Color::Green.into(), "●"),
        };
        (style, format!("{mark} {state}"))
    }

    /// Replaces colours and characters that the terminal does not support.
    pub(super) fn apply(self, screen: &mut Buffer) {
        for cell in &mut screen.content {
            if !self.has_colours {
                if cell.fg == Color::DarkGray {
                    cell.modifier |= Modifier::DIM;
                }
                (cell.fg, cell.bg) = (Color::Reset, Color::Reset);
            }
            if !self.has_unicode && !cell.symbol().is_ascii() {
                cell.set_symbol(ascii(cell.symbol()));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::layout::Rect;

    use super::*;

    #[test]
    fn environment_decides_theme() {
        let theme = |variables: &[(&str, &str)]| {
            let find = |name: &str| {
                let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
                Some(OsString::from(value))
            };
            let Theme { has_colours, has_unicode } = Theme::from_environment(find);
            (has_colours, has_unicode)
        };
        assert_eq!(theme(&[]), (true, false));
        assert_eq!(theme(&[("LANG", "de_DE.UTF-8")]), (true, true));
        assert_eq!(theme(&[("LANG", "de_DE.UTF-8"), ("LC_ALL", "C")]), (true, false));
        assert_eq!(theme(&[("LC_CTYPE", "C.utf8"), ("LC_ALL", ""), ("NO_COLOR", "1")]), (false, true));
        assert_eq!(theme(&[("LANG", "C.UTF-8"), ("NO_COLOR", ""), ("TERM", "linux")]), (true, false));
        assert_eq!(theme(&[("TERM", "dumb")]), (false, false));
    }

    #[test]
    fn missing_characters_are_replaced() {
        let mut screen = Buffer::empty(Rect::new(0, 0, 8, 1));
        screen.set_string(0, 0, "a━…é中!", Theme::QUIET);
        Theme { has_colours: false, has_unicode: false }.apply(&mut screen);
        let text: String = screen.content.iter().map(|cell| cell.symbol()).collect();
        assert_eq!(text, "a=~?? ! ");
        assert!(screen.content.iter().all(|cell| cell.fg == Color::Reset));
        assert!(screen.content[0].modifier.contains(Modifier::DIM));
    }
}
