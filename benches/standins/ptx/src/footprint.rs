//! Determines the bytes of device memory that a kernel reads and writes, while it runs.

use std::collections::HashMap;

use crate::streams::operation::{Access, Use};

/// Bytes of a page, each of which is represented by a bit.
const PAGE: u64 = 4096;
const WORDS: usize = (PAGE / 64) as usize;

/// Number of pages that are found without a table lookup.
const RECENT: usize = 64;

/// The bytes of a page that are read and written, with one bit for each.
struct Page {
    number: u64,
    reads: [u64; WORDS],
    writes: [u64; WORDS],
}

/// The bytes that a launch has read and written, or the part of it that one thread of the host executes.
pub struct Footprint {
    pages: Vec<Page>,
    /// Indices in `pages` by page.
    places: HashMap<u64, u32>,
    /// Pages used most recently, and their indices in `pages`.
    recent: [(u64, u32); RECENT],
}

impl Default for Footprint {
    fn default() -> Footprint {
        Footprint { pages: Vec::new(), places: HashMap::new(), recent: [(u64::MAX, 0); RECENT] }
    }
}

impl Footprint {
    fn page(&mut self, number: u64) -> &mut Page {
        let slot = number as usize % RECENT;
        let (page, place) = self.recent[slot];
        if page == number {
            return &mut self.pages[place as usize];
        }
        let pages = &mut self.pages;
        let place = *self.places.entry(number).or_insert_with(|| {
            pages.push(Page { number, reads: [0; WORDS], writes: [0; WORDS] });
            (pages.len() - 1) as u32
        });
        self.recent[slot] = (number, place);
        &mut self.pages[place as usize]
    }

    /// Records an access of 1, 2, 4, 8 or 16 bytes, whose address is aligned to its size.
    #[inline]
    pub fn note(&mut self, address: u64, bytes: u32, writes: bool) {
        let bits = ((1u64 << bits_of(bytes)) - 1) << (address % 64);
        let word = (address % PAGE / 64) as usize;
        let page = self.page(address / PAGE);
        let words = if writes { &mut page.writes } else { &mut page.reads };
        words[word] |= bits;
    }

    /// Adds the bytes recorded by another thread of the host.
    pub fn merge(&mut self, other: &Footprint) {
        for page in &other.pages {
            let into = self.page(page.number);
            for word in 0..WORDS {
                into.reads[word] |= page.reads[word];
                into.writes[word] |= page.writes[word];
            }
        }
    }

    /// Returns all bytes as ranges of maximal length. Bytes that are both read and written are reported as written.
    pub fn accesses(&self) -> Vec<Access> {
        let mut pages: Vec<&Page> = self.pages.iter().collect();
        pages.sort_unstable_by_key(|page| page.number);
        let mut accesses = Vec::new();
        ranges(&pages, |page, word| page.writes[word], Use::Write, &mut accesses);
        ranges(&pages, |page, word| page.reads[word] & !page.writes[word], Use::Read, &mut accesses);
        accesses
    }
}

/// Limits the bits of a shift. No access has more bytes than a word has bits.
fn bits_of(bytes: u32) -> u32 {
    bytes.min(63)
}

fn ranges(pages: &[&Page], word_of: impl Fn(&Page, usize) -> u64, how: Use, found: &mut Vec<Access>) {
    let first = found.len();
    for page in pages {
        for word in 0..WORDS {
            let (mut bits, start) = (word_of(page, word), page.number * PAGE + 64 * word as u64);
            let mut at = 0;
            while bits != 0 {
                let gap = bits.trailing_zeros();
                bits >>= gap;
                let len = bits.trailing_ones();
                let from = start + u64::from(at + gap);
                match found[first..].last_mut() {
                    Some(last) if last.end == from => last.end += u64::from(len),
                    _ => found.push(Access { start: from, end: from + u64::from(len), how }),
                }
                bits = bits.checked_shr(len).unwrap_or(0);
                at += gap + len;
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn accesses_become_ranges() {
        let (mut all, mut other) = (Footprint::default(), Footprint::default());
        // 32 lanes of four bytes, across the border of a page.
        for lane in 0..32 {
            all.note(2 * PAGE - 64 + 4 * lane, 4, false);
        }
        other.note(2 * PAGE, 16, true);
        other.note(7, 1, false);
        all.merge(&other);
        let range = |start, end, how| Access { start, end, how };
        assert_eq!(
            all.accesses(),
            [
                range(2 * PAGE, 2 * PAGE + 16, Use::Write),
                range(7, 8, Use::Read),
                range(2 * PAGE - 64, 2 * PAGE, Use::Read),
                range(2 * PAGE + 16, 2 * PAGE + 64, Use::Read),
            ]
        );
    }

    #[test]
    fn whole_words_become_one_range() {
        let mut all = Footprint::default();
        for at in (0..4 * PAGE).step_by(16) {
            all.note(at, 16, true);
        }
        assert_eq!(all.accesses(), [Access { start: 0, end: 4 * PAGE, how: Use::Write }]);
    }
}
