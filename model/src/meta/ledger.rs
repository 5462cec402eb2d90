//! A ledger of the memory held by each owner, and its peak.

use std::cell::RefCell;
use std::rc::Rc;

/// Name of a purpose for which memory is held.
pub type Owner = &'static str;

/// Counts bytes by owner. Clones share the same counts.
#[derive(Clone, Debug, Default)]
pub struct Ledger(Rc<RefCell<Book>>);

#[derive(Debug, Default)]
struct Book {
    live: Vec<(Owner, u64)>,
    total: u64,
    /// Total bytes of all requests, freed or not.
    allocated: u64,
    largest: u64,
    moment: String,
    peak: MemoryPeak,
    events: Vec<LedgerEvent>,
    buffers: u32,
}

/// A request for a buffer, or its release.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum LedgerEvent {
    /// Requests a buffer.
    Hold {
        /// Number of the buffer.
        buffer: u32,
        /// Bytes of the buffer.
        bytes: u64,
    },
    /// Frees the buffer with this number.
    Free(u32),
}

/// State of memory at its peak.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryPeak {
    /// Bytes of all owners.
    pub bytes: u64,
    /// Bytes of each owner, in the order of their first requests.
    pub owners: Vec<(Owner, u64)>,
    /// Label of the phase with the peak, from [`Ledger::enter`].
    pub moment: String,
}

impl MemoryPeak {
    /// Returns the bytes that `owner` held.
    pub fn of(&self, owner: Owner) -> u64 {
        self.owners.iter().find(|(name, _)| *name == owner).map_or(0, |(_, bytes)| *bytes)
    }
}

/// Memory that is held while this value lives.
#[derive(Debug)]
pub struct Held {
    ledger: Ledger,
    owner: Owner,
    bytes: u64,
    buffer: u32,
}

impl Ledger {
    /// Records a request for `bytes` by `owner`.
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

    /// Records a write of `bytes` into memory that is already held.
    pub(super) fn write(&self, bytes: u64) {
        let mut book = self.0.borrow_mut();
        book.allocated = book.allocated.saturating_add(bytes);
    }

    /// Returns the requests and frees since the last call, in order.
    pub fn take_events(&self) -> Vec<LedgerEvent> {
        std::mem::take(&mut self.0.borrow_mut().events)
    }

    /// Sets the label of the current phase, for [`MemoryPeak::moment`].
    pub fn enter(&self, moment: impl Into<String>) {
        self.0.borrow_mut().moment = moment.into();
    }

    /// Returns the size of the largest request so far.
    pub fn largest(&self) -> u64 {
        self.0.borrow().largest
    }

    /// Returns the state of memory at its peak so far.
    pub fn peak(&self) -> MemoryPeak {
        self.0.borrow().peak.clone()
    }

    /// Returns all bytes requested or written into held memory: about the bytes that operations write.
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
