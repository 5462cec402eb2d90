//! Filters a rank's log for a terminal: omits lines below `warn`, which are in the rank's file.

use kiln_sys::is_detail;

/// Maximum bytes from which a line is recognised as such a line.
const BEGIN: usize = 512;

/// Filters an output that arrives in parts, and omits detail lines.
#[derive(Debug, Default)]
pub(super) struct Quiet {
    /// The beginning of a line that is not yet known to be shown or omitted.
    begin: Vec<u8>,
    /// `Some(true)` if the current line is shown, `None` while that is unknown.
    is_shown: Option<bool>,
}

impl Quiet {
    /// Returns the part of `bytes`, the next piece of output, that is shown.
    pub(super) fn shown(&mut self, bytes: &[u8]) -> Vec<u8> {
        let mut shown = Vec::with_capacity(bytes.len());
        for piece in bytes.split_inclusive(|byte| *byte == b'\n') {
            let is_whole = piece.ends_with(b"\n");
            if self.is_shown.is_none() {
                self.begin.extend(piece);
                let is_detail = is_detail(&self.begin);
                // A prompt or a progress bar must not wait for the end of its line.
                let may_be_one = self.begin.len() < BEGIN && matches!(self.begin[0], b'0'..=b'9' | b' ');
                if !is_whole && !is_detail && may_be_one {
                    continue;
                }
                let begin = std::mem::take(&mut self.begin);
                self.is_shown = Some(!is_detail);
                if !is_detail {
                    shown.extend(begin);
                }
            } else if self.is_shown == Some(true) {
                shown.extend(piece);
            }
            if is_whole {
                self.is_shown = None;
            }
        }
        shown
    }

    /// Returns the rest at the end.
    pub(super) fn rest(self) -> Vec<u8> {
        self.begin
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TEXT: &str = "2026-11-24T18:03:59.042Z host=n rank=0 step=3 phase=- unit=- DEBUG kiln::run: a step\n\
                        step 3 of 5\n INFO device: CPU\n\
                        2026-11-24T18:03:59.043Z host=n rank=0 step=3 phase=- unit=- WARN kiln::run: slow\n\
                        \n bar";
    const SHOWN: &str = "step 3 of 5\n\
                         2026-11-24T18:03:59.043Z host=n rank=0 step=3 phase=- unit=- WARN kiln::run: slow\n\
                         \n bar";

    #[test]
    fn details_are_left_out_however_they_come() {
        for size in [1, 2, 7, 60, 61, 64, 1000] {
            let mut quiet = Quiet::default();
            let mut shown: Vec<u8> =
                TEXT.as_bytes().chunks(size).flat_map(|part| quiet.shown(part)).collect();
            shown.extend(quiet.rest());
            assert_eq!(String::from_utf8(shown).unwrap(), SHOWN, "{size}");
        }
    }

    #[test]
    fn what_is_no_line_yet_is_shown_at_once() {
        let mut quiet = Quiet::default();
        assert_eq!(quiet.shown(b"go on? "), b"go on? ");
        assert_eq!(quiet.shown(b"yes\n"), b"yes\n");
        assert_eq!(quiet.shown(b" I"), b"");
        assert_eq!(quiet.shown(b"NFO a\nb"), b"b");
    }
}
