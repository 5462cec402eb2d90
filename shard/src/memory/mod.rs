//! Memory accounting per rank.
//!
//! Ranks that are threads share one heap, so the memory of the process does not show what each rank uses.
//! [`CountingAllocator`] counts what each rank's threads allocate: a thread calls [`bind_to_rank`] to declare its
//! rank, and every large allocation stores its owner, so that another thread can free it. Small allocations are not
//! counted, because tensors and buffers are large. Allocations of threads that are bound to no rank, such as those
//! that prepare data, are counted for no rank. Gathered weights that several ranks share count in full for each of
//! them.
//!
//! On a GPU, the device's memory is counted instead: see [`Engine::peak_bytes`](crate::Engine::peak_bytes).

mod changes;
mod owners;
mod pool;
mod profile;
mod regions;

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};

use self::owners::{BOUND, NO_RANK, RANK, Tag, check_failure, check_limit};
pub use self::owners::{
    MAX_RANKS, MemoryOwner, limit, lower_limit, on_failure, owned_by, write_holders, write_module_of,
};
pub(crate) use self::owners::{enter_module, name_modules};
use self::pool::Pool;
pub use self::profile::{Change, HeldFor, Profile, Profiler};

/// Allocations smaller than this many bytes are not counted.
const COUNTED_FROM: usize = 4096;

/// Size of the header that precedes a counted allocation and stores its owner; keeps the data aligned to a cache
/// line.
const HEADER: usize = 64;

static POOL: Pool = Pool::new();

/// Counts live bytes, and their maximum.
#[derive(Default)]
pub(crate) struct Counter {
    live: AtomicUsize,
    peak: AtomicUsize,
}

static COUNTERS: [Counter; MAX_RANKS + 1] =
    [const { Counter { live: AtomicUsize::new(0), peak: AtomicUsize::new(0) } }; MAX_RANKS + 1];

impl Counter {
    pub(crate) fn add(&self, size: usize) {
        let live = self.live.fetch_add(size, Ordering::Relaxed) + size;
        self.peak.fetch_max(live, Ordering::Relaxed);
    }

    pub(crate) fn remove(&self, size: usize) {
        self.live.fetch_sub(size, Ordering::Relaxed);
    }

    /// Returns the maximum since the last call.
    pub(crate) fn take_peak(&self) -> usize {
        self.peak.swap(self.live.load(Ordering::Relaxed), Ordering::Relaxed)
    }
}

/// Counts the calling thread's later allocations for `rank`.
pub fn bind_to_rank(rank: usize) {
    RANK.with(|bound| bound.set(rank.min(MAX_RANKS - 1)));
    BOUND.set(Some(rank));
}

/// Returns the rank that the calling thread was bound to with [`bind_to_rank`]. May be called in a signal
/// handler.
pub fn bound_rank() -> Option<usize> {
    BOUND.try_with(Cell::get).ok().flatten()
}

/// Makes a test allocation and returns whether [`CountingAllocator`] is the global allocator.
pub fn is_counting() -> bool {
    let block = std::hint::black_box(Vec::<u8>::with_capacity(COUNTED_FROM));
    let counts = COUNTERS.iter().any(|counter| counter.live.load(Ordering::Relaxed) > 0);
    drop(block);
    counts
}

/// Returns the bytes that `rank` holds now. Zero unless [`CountingAllocator`] is the global allocator.
pub fn live_bytes(rank: usize) -> usize {
    COUNTERS[rank.min(MAX_RANKS - 1)].live.load(Ordering::Relaxed)
}

/// Returns the bytes that the rank of the calling thread holds now, like [`live_bytes`].
pub(crate) fn bytes_here() -> u64 {
    COUNTERS[RANK.get()].live.load(Ordering::Relaxed) as u64
}

/// Returns the maximum bytes that `rank` has held since the last [`reset_peak`].
pub fn peak_bytes(rank: usize) -> usize {
    COUNTERS[rank.min(MAX_RANKS - 1)].peak.load(Ordering::Relaxed)
}

/// Resets the peak of `rank` to its current bytes.
pub fn reset_peak(rank: usize) {
    COUNTERS[rank.min(MAX_RANKS - 1)].take_peak();
}

/// Starts recording the allocations of `rank`, with their owners. `None` if allocations are not counted, or if
/// several ranks share a counter.
pub fn begin_profile(rank: usize) -> Option<Profiler> {
    (is_counting() && rank + 1 < MAX_RANKS).then(|| Profiler::begin(rank, live_bytes))
}

/// Memory that several ranks share. While this value lives, the memory counts in full for this rank, as if the rank
/// had its own copy.
pub(crate) struct Held {
    counter: &'static Counter,
    tag: Tag,
    size: usize,
}

impl Held {
    /// Counts `size` bytes for the calling thread's rank.
    pub(crate) fn new(size: usize) -> Held {
        let rank = RANK.get();
        let (counter, tag) = (&COUNTERS[rank], Tag::gathered(rank));
        // A rank that allocates never holds zero bytes, unless allocations are not counted.
        let size = if counter.live.load(Ordering::Relaxed) == 0 { 0 } else { size };
        counter.add(size);
        changes::record(tag.word(), size.cast_signed());
        Held { counter, tag, size }
    }
}

impl Drop for Held {
    fn drop(&mut self) {
        self.counter.remove(self.size);
        changes::record(self.tag.word(), -self.size.cast_signed());
    }
}

/// Makes [`CountingAllocator`] use huge pages for large blocks from now on; a separate thread moves existing blocks.
/// [`Engine::update`](crate::Engine::update) calls this at the end of the first step, because small pages are
/// available sooner. Programs that never update should call this when they start.
pub fn use_huge_pages() {
    POOL.use_huge_pages();
}

/// An allocator that counts memory per rank, and keeps large blocks for reuse. Install it in a binary with
/// `#[global_allocator]`.
pub struct CountingAllocator;

impl CountingAllocator {
    /// Returns the layout with room for the header, or `None` for allocations that are not counted.
    fn counted(layout: Layout) -> Option<Layout> {
        if layout.size() < COUNTED_FROM || layout.align() > HEADER {
            return None;
        }
        Layout::from_size_align(layout.size().checked_add(HEADER)?, HEADER).ok()
    }

    /// Writes the owner into the header at `base` and returns the address of the data.
    ///
    /// # Safety
    /// `base` must be null, or the start of an allocation of at least `HEADER` bytes that is aligned to `HEADER`.
    unsafe fn own(base: *mut u8, size: usize) -> *mut u8 {
        if base.is_null() {
            return base;
        }
        let tag = match kiln_collectives::allocates_for_all() {
            true => Tag::gathered(NO_RANK),
            false => Tag::here(RANK.try_with(Cell::get).unwrap_or(NO_RANK)),
        };
        COUNTERS[tag.rank()].add(size);
        tag.add(size);
        // SAFETY: the header is inside the allocation and aligned for a usize (see above).
        unsafe {
            base.cast::<usize>().write(tag.word());
            base.add(HEADER)
        }
    }
}

// SAFETY: every counted block comes from `POOL` with the layout computed by `counted`, which depends only on
// the caller's layout, and is returned to it with the same layout and the same base address.
unsafe impl GlobalAlloc for CountingAllocator {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract, passed on; the counted layout is larger, hence not empty.
        unsafe {
            match Self::counted(layout) {
                None => check_failure(System.alloc(layout), layout.size()),
                Some(counted) => {
                    check_limit(layout.size());
                    Self::own(check_failure(POOL.alloc(counted), layout.size()), layout.size())
                }
            }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: as in `alloc`; `own` returns null or the start of `layout.size()` bytes.
        unsafe {
            match Self::counted(layout) {
                None => check_failure(System.alloc_zeroed(layout), layout.size()),
                Some(counted) => {
                    check_limit(layout.size());
                    Self::own(check_failure(POOL.alloc_zeroed(counted), layout.size()), layout.size())
                }
            }
        }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: `ptr` came from `alloc` with `layout`, so a counted block has its header, with the owner's
        // rank, right before it.
        unsafe {
            match Self::counted(layout) {
                None => System.dealloc(ptr, layout),
                Some(counted) => {
                    let base = ptr.sub(HEADER);
                    let tag = Tag::from_word(base.cast::<usize>().read());
                    COUNTERS[tag.rank()].remove(layout.size());
                    tag.remove(layout.size());
                    POOL.dealloc(base, counted);
                }
            }
        }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: `new_size` with the old alignment is a valid layout by the caller's contract.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        match (Self::counted(layout), Self::counted(new_layout)) {
            // SAFETY: an uncounted block is the system allocator's own.
            (None, None) => unsafe { check_failure(System.realloc(ptr, layout, new_size), new_size) },
            // SAFETY: the block starts at its header and has the counted layout; the pool
            // keeps the header when it moves the block.
            (Some(counted), Some(new_counted)) => unsafe {
                let base = ptr.sub(HEADER);
                let tag = Tag::from_word(base.cast::<usize>().read());
                check_limit(new_size.saturating_sub(layout.size()));
                let moved = check_failure(POOL.realloc(base, counted, new_counted.size()), new_size);
                if moved.is_null() {
                    return moved;
                }
                COUNTERS[tag.rank()].remove(layout.size());
                COUNTERS[tag.rank()].add(new_size);
                tag.remove(layout.size());
                tag.add(new_size);
                moved.add(HEADER)
            },
            // SAFETY: a new block, filled with the bytes that fit in both blocks; then the old block is freed
            // with the layout it was allocated with.
            _ => unsafe {
                let moved = self.alloc(new_layout);
                if !moved.is_null() {
                    std::ptr::copy_nonoverlapping(ptr, moved, layout.size().min(new_size));
                    self.dealloc(ptr, layout);
                }
                moved
            },
        }
    }
}
