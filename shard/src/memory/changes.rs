//! Records the changes of counted memory in this process, in order, while recording is on.
//!
//! If recording is off, a change costs only the load of one flag. Records are written to preallocated static memory,
//! so that recording allocates nothing.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock};
use std::time::{Duration, Instant};

use crate::sync::lock;

/// Maximum number of recorded changes, for all ranks of the process together.
const CAPACITY: usize = 1 << 20;

/// A recorded change: nanoseconds since [`EPOCH`], the owner, and the number of bytes.
struct Slot {
    time: AtomicU64,
    tag: AtomicUsize,
    bytes: AtomicUsize,
}

static SLOTS: [Slot; CAPACITY] =
    [const { Slot { time: AtomicU64::new(0), tag: AtomicUsize::new(0), bytes: AtomicUsize::new(0) } };
        CAPACITY];

/// Number of changes since recording began; changes beyond [`CAPACITY`] are not recorded.
static NEXT: AtomicUsize = AtomicUsize::new(0);
/// True while changes are recorded.
static IS_ON: AtomicBool = AtomicBool::new(false);
static WANTED: Mutex<usize> = Mutex::new(0);
static EPOCH: OnceLock<Instant> = OnceLock::new();

/// Records that the owner encoded as `tag` holds `bytes` more, or fewer if negative.
#[inline]
pub(super) fn record(tag: usize, bytes: isize) {
    if IS_ON.load(Ordering::Relaxed) {
        record_now(tag, bytes);
    }
}

#[cold]
fn record_now(tag: usize, bytes: isize) {
    let Some(slot) = SLOTS.get(NEXT.fetch_add(1, Ordering::Relaxed)) else { return };
    let time = EPOCH.get().map_or(Duration::ZERO, Instant::elapsed);
    slot.time.store(time.as_nanos() as u64, Ordering::Relaxed);
    slot.tag.store(tag, Ordering::Relaxed);
    slot.bytes.store(bytes.cast_unsigned(), Ordering::Release);
}

/// A recorded change.
#[derive(Clone, Copy)]
pub(super) struct Recorded {
    /// Time since recording began.
    pub(super) after: Duration,
    pub(super) tag: usize,
    pub(super) bytes: isize,
}

/// Keeps recording on until it is dropped.
#[derive(Debug)]
pub(super) struct Recording {
    first: usize,
    begun: Duration,
}

impl Recording {
    pub(super) fn begin() -> Self {
        let epoch = EPOCH.get_or_init(Instant::now);
        // Threads of other ranks begin and end concurrently.
        let mut wanted = lock(&WANTED);
        if *wanted == 0 {
            NEXT.store(0, Ordering::Relaxed);
        }
        *wanted += 1;
        IS_ON.store(true, Ordering::Relaxed);
        Recording { first: NEXT.load(Ordering::Relaxed), begun: epoch.elapsed() }
    }

    /// Returns the number of changes so far, for [`Recording::take`].
    pub(super) fn count(&self) -> usize {
        NEXT.load(Ordering::Relaxed)
    }

    /// Returns the first `count` changes of all ranks, and the number of changes that did not fit.
    pub(super) fn take(&self, count: usize) -> (impl Iterator<Item = Recorded>, usize) {
        let slots = SLOTS.get(self.first..count.min(CAPACITY)).unwrap_or_default();
        let begun = self.begun;
        let read = move |slot: &Slot| {
            let bytes = slot.bytes.load(Ordering::Acquire).cast_signed();
            let time = Duration::from_nanos(slot.time.load(Ordering::Relaxed));
            Recorded { after: time.saturating_sub(begun), tag: slot.tag.load(Ordering::Relaxed), bytes }
        };
        (slots.iter().map(read), count.saturating_sub(CAPACITY))
    }
}

impl Drop for Recording {
    fn drop(&mut self) {
        let mut wanted = lock(&WANTED);
        *wanted -= 1;
        IS_ON.store(*wanted > 0, Ordering::Relaxed);
    }
}
