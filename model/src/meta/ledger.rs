//! Who holds how much memory, and the most that was held.

use std::cell::RefCell;
use std::rc::Rc;

/// What memory is for, in words.
pub type Owner = &'static str;

/// A count of bytes by owner. Clones are the same ledger.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Rc<RefCell<Book>>);

#[derive(Debug, Default)]
struct Book {
    live: Vec<(Owner, u64)>,
    total: u64,
    /// Bytes that have been asked for, freed or not.
    allocated: u64,
    /// The most bytes that were asked for at once.
    largest: u64,
    moment: String,
    peak: MemoryPeak,
    /// What was asked for and freed, in order.
    events: Vec<LedgerEvent>,
    buffers: u32,
}

/// A buffer that was asked for, or that is free again.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerEvent {
    /// A buffer of so many bytes.
    Hold {
        /// Its number.
        buffer: u32,
        /// Its size.
        bytes: u64,
    },
    /// The buffer of this number.
    Free(u32),
}

/// The moment at which most was held.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPeak {
    /// Bytes of all owners.
    pub bytes: u64,
    /// Bytes of each owner, in the order in which they first held something.
    pub owners: Vec<(Owner, u64)>,
    /// The moment, as [`Ledger::enter`] has named it.
    pub moment: String,
}

impl MemoryPeak {
    /// Bytes that `owner` held.
    pub fn of(&self, owner: Owner) -> u64 {
        self.owners.iter().find(|(name, _)| *name == owner).map_or(0, |(_, bytes)| *bytes)
    }
}

/// Memory that is held as long as this lives.
#[derive(Debug)]
pub struct Held {
    ledger: Ledger,
    owner: Owner,
    bytes: u64,
    buffer: u32,
}

impl Ledger {
    /// `bytes` more for `owner`.
    pub fn hold(&self, owner: Owner, bytes: u64) -> Held {
        let mut book = self.0.borrow_mut();
        match book.live.iter_mut().find(|(name, _)| *name == owner) {
            Some((_, live)) => *live = live.saturating_add(bytes),
            None => book.live.push((owner, bytes)),
        }
        book.total = book.total.saturating_add(bytes);
        book.allocated = book.allocated.saturating_add(bytes);
        book.largest = book.largest.max(bytes);
        if book.total > book.peak.bytes {
            let Book { live, total, moment, peak, .. } = &mut *book;
            peak.bytes = *total;
            peak.owners.clone_from(live);
            peak.moment.clone_from(moment);
        }
        let buffer = book.buffers;
        book.buffers += 1;
        if bytes > 0 {
            book.events.push(LedgerEvent::Hold { buffer, bytes });
        }
        Held { ledger: self.clone(), owner, bytes, buffer }
    }

    /// An operation writes `bytes` of memory that is held already.
    pub(super) fn write(&self, bytes: u64) {
        let mut book = self.0.borrow_mut();
        book.allocated = book.allocated.saturating_add(bytes);
    }

    /// What was asked for and freed since the last call, in order.
    pub fn take_events(&self) -> Vec<LedgerEvent> {
        std::mem::take(&mut self.0.borrow_mut().events)
    }

    /// What happens from now on, for [`MemoryPeak::moment`].
    pub fn enter(&self, moment: impl Into<String>) {
        self.0.borrow_mut().moment = moment.into();
    }

    /// The most bytes that were asked for at once so far.
    pub fn largest(&self) -> u64 {
        self.0.borrow().largest
    }

    /// The moment at which most was held so far.
    pub fn peak(&self) -> MemoryPeak {
        self.0.borrow().peak.clone()
    }

    /// Bytes that have been asked for so far, freed or not, and those that were written into memory that was
    /// there: what operations have written, about.
    pub fn allocated(&self) -> u64 {
        self.0.borrow().allocated
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        let mut book = self.ledger.0.borrow_mut();
        book.total = book.total.saturating_sub(self.bytes);
        if let Some((_, live)) = book.live.iter_mut().find(|(name, _)| *name == self.owner) {
            *live = live.saturating_sub(self.bytes);
        }
        if self.bytes > 0 {
            book.events.push(LedgerEvent::Free(self.buffer));
        }
    }
}
