//! Keys, from the bytes that a terminal sends.
//!
//! crossterm has a reader of its own, which never returns once the terminal is gone (0.29): a program whose terminal
//! was closed would keep a core busy for ever.

use ratatui::crossterm::event::{KeyCode, KeyEvent, KeyModifiers};

/// Bytes that are no whole key yet.
#[derive(Debug, Default)]
pub(super) struct Input {
    bytes: Vec<u8>,
}

impl Input {
    /// Adds what the terminal has sent.
    pub(super) fn add(&mut self, bytes: &[u8]) {
        self.bytes.extend_from_slice(bytes);
    }

    /// Whether there are bytes that more may belong to.
    pub(super) fn is_waiting(&self) -> bool {
        !self.bytes.is_empty()
    }

    /// The next key, if all of it is there. If nothing else comes (`is_all`), an escape character is the key Esc.
    pub(super) fn next(&mut self, is_all: bool) -> Option<KeyEvent> {
        loop {
            let (taken, key) = match key(&self.bytes) {
                Some(found) => found,
                // What is there is no key, nor the beginning of one.
                None if is_all && !self.bytes.is_empty() => {
                    let is_escape = self.bytes == [0x1b];
                    (self.bytes.len(), is_escape.then(|| KeyEvent::new(KeyCode::Esc, KeyModifiers::NONE)))
                }
                None => return None,
            };
            self.bytes.drain(..taken);
            if key.is_some() {
                return key;
            }
        }
    }
}

/// The first key with the number of its bytes; `None` for the key if it is not known. `None` if more has to come.
fn key(bytes: &[u8]) -> Option<(usize, Option<KeyEvent>)> {
    let plain = |code| Some(KeyEvent::new(code, KeyModifiers::NONE));
    let first = *bytes.first()?;
    Some(match first {
        0x1b => return escape(bytes),
        b'\r' | b'\n' => (1, plain(KeyCode::Enter)),
        b'\t' => (1, plain(KeyCode::Tab)),
        0x7f | 0x08 => (1, plain(KeyCode::Backspace)),
        0x01..=0x1a => {
            let letter = char::from(first - 1 + b'a');
            (1, Some(KeyEvent::new(KeyCode::Char(letter), KeyModifiers::CONTROL)))
        }
        0x00..0x20 => (1, None),
        0x20..0x80 => (1, plain(KeyCode::Char(char::from(first)))),
        _ => {
            let length = match first {
                0xc0..0xe0 => 2,
                0xe0..0xf0 => 3,
                0xf0..0xf8 => 4,
                _ => 1,
            };
            let character =
                std::str::from_utf8(bytes.get(..length)?).ok().and_then(|text| text.chars().next());
            (length, character.and_then(|character| plain(KeyCode::Char(character))))
        }
    })
}

/// A key that begins with an escape character.
fn escape(bytes: &[u8]) -> Option<(usize, Option<KeyEvent>)> {
    let second = *bytes.get(1)?;
    let (end, code) = match second {
        b'O' => (3, letter(*bytes.get(2)?)),
        // The console of Linux.
        b'[' if bytes.get(2) == Some(&b'[') => (4, (*bytes.get(3)? == b'A').then_some(KeyCode::F(1))),
        b'[' => {
            let last = bytes.iter().skip(2).position(|byte| (0x40..0x7f).contains(byte))? + 2;
            let parameter = bytes[2..last].split(|byte| *byte == b';').next().unwrap_or_default();
            let code = match (bytes[last], parameter) {
                (b'~', b"1" | b"7") => Some(KeyCode::Home),
                (b'~', b"4" | b"8") => Some(KeyCode::End),
                (b'~', b"5") => Some(KeyCode::PageUp),
                (b'~', b"6") => Some(KeyCode::PageDown),
                (b'~', b"11") => Some(KeyCode::F(1)),
                (last, _) => letter(last),
            };
            (last + 1, code)
        }
        // Two times Esc, of which the second may begin another key.
        0x1b => (1, Some(KeyCode::Esc)),
        // Alt with another key, which means nothing here.
        _ => (2, None),
    };
    Some((end, code.map(|code| KeyEvent::new(code, KeyModifiers::NONE))))
}

/// The key that the last letter of a sequence stands for.
fn letter(letter: u8) -> Option<KeyCode> {
    Some(match letter {
        b'A' => KeyCode::Up,
        b'B' => KeyCode::Down,
        b'C' => KeyCode::Right,
        b'D' => KeyCode::Left,
        b'H' => KeyCode::Home,
        b'F' => KeyCode::End,
        b'P' => KeyCode::F(1),
        b'Z' => KeyCode::BackTab,
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn keys(parts: &[&[u8]]) -> Vec<KeyCode> {
        let mut input = Input::default();
        let mut keys = Vec::new();
        for part in parts {
            input.add(part);
            keys.extend(std::iter::from_fn(|| input.next(false)).map(|key| key.code));
        }
        keys.extend(std::iter::from_fn(|| input.next(true)).map(|key| key.code));
        assert!(!input.is_waiting());
        keys
    }

    #[test]
    fn keys_are_read_from_bytes() {
        use KeyCode::{
            BackTab, Backspace, Char, Down, End, Enter, Esc, F, Home, Left, PageDown, PageUp, Right, Tab, Up,
        };
        let all = b"a\r\t\x7f\x1b[A\x1b[B\x1bOC\x1b[D\x1b[H\x1b[4~\x1b[5~\x1b[6~\x1b[Z\x1bOP\x1b[[A\xc3\xa9";
        let expected = [
            Char('a'),
            Enter,
            Tab,
            Backspace,
            Up,
            Down,
            Right,
            Left,
            Home,
            End,
            PageUp,
            PageDown,
            BackTab,
            F(1),
            F(1),
            Char('é'),
        ];
        assert_eq!(keys(&[all]), expected);
        // In whatever parts they come.
        let one_by_one: Vec<&[u8]> = all.chunks(1).collect();
        assert_eq!(keys(&one_by_one), expected);
        assert_eq!(keys(&[b"\x1b"]), [Esc]);
        assert_eq!(keys(&[b"\x1b\x1b[A"]), [Esc, Up]);
        // With modifiers, unknown, Alt, no text.
        assert_eq!(keys(&[b"\x1b[1;5Cx\x1b[99~\x1bq\xff\xfe\x00y\x1b["]), [Right, Char('x'), Char('y')]);
        let mut input = Input::default();
        input.add(b"\x03");
        assert_eq!(input.next(false), Some(KeyEvent::new(Char('c'), KeyModifiers::CONTROL)));
    }
}
