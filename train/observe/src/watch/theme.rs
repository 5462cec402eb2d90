//! What the terminal can show: colours and characters, and what stands for them where it cannot.

use std::ffi::OsString;

use ratatui::buffer::Buffer;
use ratatui::style::{Color, Modifier, Style};

use crate::status::State;

/// What the terminal can show.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Theme {
    /// Whether there are colours. They never say anything that characters do not say as well.
    pub has_colours: bool,
    /// Whether there are more characters than ASCII has.
    pub has_unicode: bool,
}

/// Colours of runs, by their number.
const RUNS: [Color; 6] = [Color::Cyan, Color::Yellow, Color::Magenta, Color::Green, Color::Blue, Color::Red];

/// What stands for characters that ASCII does not have.
const STAND_INS: [(&str, &str); 24] = [
    ("─", "-"),
    ("━", "="),
    ("│", "|"),
    ("┌", "+"),
    ("┐", "+"),
    ("└", "+"),
    ("┘", "+"),
    ("├", "+"),
    ("┤", "|"),
    ("┬", "+"),
    ("┴", "+"),
    ("…", "~"),
    ("·", "-"),
    ("●", "o"),
    ("○", "."),
    ("▲", "^"),
    ("▼", "v"),
    ("▸", ">"),
    ("×", "x"),
    ("°", " "),
    ("→", ">"),
    ("↓", "v"),
    ("↑", "^"),
    ("✓", "+"),
];

impl Theme {
    /// What the environment says: `NO_COLOR`, `TERM`, and the locale.
    pub fn of_environment(variable: impl Fn(&str) -> Option<OsString>) -> Self {
        let text = |name: &str| {
            variable(name).filter(|value| !value.is_empty()).map(|value| value.to_string_lossy().into_owned())
        };
        let term = text("TERM").unwrap_or_default();
        // The first one that is set counts.
        let locale = ["LC_ALL", "LC_CTYPE", "LANG"].into_iter().find_map(text).unwrap_or_default();
        let locale = locale.to_ascii_lowercase().replace('-', "");
        Theme {
            has_colours: text("NO_COLOR").is_none() && term != "dumb" && !term.ends_with("-m"),
            has_unicode: locale.contains("utf8") && term != "linux",
        }
    }

    /// Of the run with this number.
    pub(super) fn run(run: usize) -> Style {
        Style::new().fg(RUNS[run % RUNS.len()])
    }

    /// Of what is of less interest.
    pub(super) fn quiet() -> Style {
        Style::new().fg(Color::DarkGray)
    }

    /// Of titles.
    pub(super) fn title() -> Style {
        Style::new().add_modifier(Modifier::BOLD)
    }

    /// Of what is chosen.
    pub(super) fn chosen() -> Style {
        Style::new().add_modifier(Modifier::REVERSED)
    }

    /// Of what somebody should look after.
    pub(super) fn bad() -> Style {
        Style::new().fg(Color::Red).add_modifier(Modifier::BOLD)
    }

    /// Of a state, and the character in front of it.
    pub(super) fn state(state: Option<State>) -> (Style, &'static str) {
        match state {
            None => (Theme::quiet(), "○"),
            Some(state) if state.is_bad() => (Theme::bad(), "!"),
            Some(State::Held | State::Slow | State::Stopped) => (Style::new().fg(Color::Yellow), "▲"),
            Some(State::Finished) => (Style::new().fg(Color::Green), "✓"),
            Some(State::Starting) => (Style::new().fg(Color::Blue), "○"),
            Some(_) => (Style::new().fg(Color::Green), "●"),
        }
    }

    /// Takes from a screen what the terminal cannot show.
    pub(super) fn apply(self, screen: &mut Buffer) {
        for cell in &mut screen.content {
            if !self.has_colours {
                // What is grey is dim instead.
                if cell.fg == Color::DarkGray {
                    cell.modifier |= Modifier::DIM;
                }
                cell.fg = Color::Reset;
                cell.bg = Color::Reset;
            }
            if !self.has_unicode && !cell.symbol().is_ascii() {
                let known = STAND_INS.iter().find(|(symbol, _)| *symbol == cell.symbol());
                cell.set_symbol(known.map_or("?", |(_, plain)| plain));
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use ratatui::layout::Rect;

    use super::*;

    #[test]
    fn the_environment_says_what_can_be_shown() {
        let theme = |variables: &[(&str, &str)]| {
            let find = |name: &str| {
                let (_, value) = variables.iter().find(|(known, _)| *known == name)?;
                Some(OsString::from(value))
            };
            let Theme { has_colours, has_unicode } = Theme::of_environment(find);
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
    fn what_cannot_be_shown_is_replaced() {
        let mut screen = Buffer::empty(Rect::new(0, 0, 8, 1));
        screen.set_string(0, 0, "a━…é中!", Theme::quiet());
        Theme { has_colours: false, has_unicode: false }.apply(&mut screen);
        let text: String = screen.content.iter().map(|cell| cell.symbol()).collect();
        assert_eq!(text, "a=~?? ! ");
        assert!(screen.content.iter().all(|cell| cell.fg == Color::Reset));
        assert!(screen.content[0].modifier.contains(Modifier::DIM));
    }
}
