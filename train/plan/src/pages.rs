//! The memory that CubeCL reserves for a GPU's buffers, which it lays out in pages.
//!
//! The layout is that of CubeCL 0.11 (`memory_management/dynamic` in `cubecl-server`): pages have the size of
//! the largest buffer, a buffer goes into the first page with enough room, free neighbours are merged, and
//! pages are never freed. Buffers of up to 64 KiB have a separate page.

use std::collections::HashMap;

use kiln_model::meta::LedgerEvent;

/// Alignment of buffers in bytes.
const ALIGNMENT: u64 = 512;
/// Maximum bytes of a small buffer; all of them go into one separate page of [`SMALL_PAGE`].
const SMALL: u64 = 64 << 10;
/// Size of the page for small buffers.
const SMALL_PAGE: u64 = 8 << 20;
/// Pages are at least this many bytes larger than the largest buffer, and a multiple of it in size.
const GRANULE: u64 = 1 << 20;

/// A page: the offset and bytes of each free range, in order and never adjacent.
struct Page {
    free: Vec<(u64, u64)>,
    most: u64,
}

impl Page {
    fn take(&mut self, bytes: u64) -> Option<u64> {
        if self.most < bytes {
            return None;
        }
        let at = self.free.iter().position(|(_, room)| *room >= bytes)?;
        let (offset, room) = self.free[at];
        if room == bytes {
            self.free.remove(at);
        } else {
            self.free[at] = (offset + bytes, room - bytes);
        }
        self.settle();
        Some(offset)
    }

    fn give_back(&mut self, offset: u64, bytes: u64) {
        let at = self.free.partition_point(|(other, _)| *other < offset);
        self.free.insert(at, (offset, bytes));
        for next in [at + 1, at] {
            if next > 0 && next < self.free.len() {
                let (before, room) = self.free[next - 1];
                if before + room == self.free[next].0 {
                    self.free[next - 1].1 += self.free[next].1;
                    self.free.remove(next);
                }
            }
        }
        self.settle();
    }

    fn settle(&mut self) {
        self.most = self.free.iter().map(|(_, room)| *room).max().unwrap_or(0);
    }
}

/// The pages of one rank.
pub(super) struct Pages {
    size: u64,
    pages: Vec<Page>,
    /// Page, offset and bytes of each buffer.
    buffers: HashMap<u32, (usize, u64, u64)>,
}

impl Pages {
    /// Creates an empty layout for buffers of at most `largest` bytes.
    pub(super) fn for_largest(largest: u64) -> Self {
        let size = largest.saturating_add(GRANULE).checked_next_multiple_of(GRANULE).unwrap_or(u64::MAX);
        Pages { size, pages: Vec::new(), buffers: HashMap::new() }
    }

    /// Lays out the buffers that a rank allocates, and frees those that it frees.
    pub(super) fn follow(&mut self, events: &[LedgerEvent]) {
        for event in events {
            match *event {
                LedgerEvent::Hold { buffer, bytes } if bytes > SMALL => self.hold(buffer, bytes),
                LedgerEvent::Hold { .. } => {}
                LedgerEvent::Free(buffer) => {
                    if let Some((page, offset, bytes)) = self.buffers.remove(&buffer) {
                        self.pages[page].give_back(offset, bytes);
                    }
                }
            }
        }
    }

    fn hold(&mut self, buffer: u32, bytes: u64) {
        // Buffers that the first of two steps allocated and kept still exist in the second.
        if self.buffers.contains_key(&buffer) {
            return;
        }
        // A size beyond all memory is reported by the check of memory.
        let bytes = bytes.checked_next_multiple_of(ALIGNMENT).unwrap_or(u64::MAX).min(self.size);
        let found = self.pages.iter_mut().enumerate().find_map(|(at, page)| Some((at, page.take(bytes)?)));
        let (page, offset) = found.unwrap_or_else(|| {
            let free = if bytes < self.size { vec![(bytes, self.size - bytes)] } else { Vec::new() };
            self.pages.push(Page { free, most: self.size - bytes });
            (self.pages.len() - 1, 0)
        });
        self.buffers.insert(buffer, (page, offset, bytes));
    }

    /// Returns the bytes of all pages.
    pub(super) fn reserved(&self) -> u64 {
        self.size.saturating_mul(self.pages.len() as u64).saturating_add(SMALL_PAGE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn hold(buffer: u32, mebibytes: u64) -> LedgerEvent {
        LedgerEvent::Hold { buffer, bytes: mebibytes << 20 }
    }

    #[test]
    fn first_page_with_room_is_used() {
        let mut pages = Pages::for_largest(9 << 20);
        pages.follow(&[hold(0, 9), hold(1, 4), hold(2, 4)]);
        assert_eq!(pages.reserved(), SMALL_PAGE + (20 << 20), "two pages of 10 MiB");
        pages.follow(&[LedgerEvent::Free(1), hold(3, 5)]);
        assert_eq!(pages.reserved(), SMALL_PAGE + (30 << 20), "4 and 2 MiB are free, and not side by side");
        pages.follow(&[LedgerEvent::Free(2), hold(4, 10)]);
        assert_eq!(pages.reserved(), SMALL_PAGE + (30 << 20), "free neighbours become one");
        pages.follow(&[LedgerEvent::Hold { buffer: 5, bytes: SMALL }]);
        assert_eq!(pages.reserved(), SMALL_PAGE + (30 << 20), "small buffers have a page of their own");
        pages.follow(&[hold(6, 9)]);
        let once = pages.reserved();
        pages.follow(&[hold(6, 9)]);
        assert_eq!(pages.reserved(), once, "a buffer that was kept is not taken again");
    }
}
