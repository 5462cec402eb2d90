//! Large blocks of memory, kept from step to step.
//!
//! A training step asks for the same blocks again and again. The system's allocator gives large ones back to
//! the kernel, which has to map and clear the pages anew, 4 KiB at a time. This pool keeps them, in regions
//! backed by huge pages, so that a step after the first neither waits for the kernel nor misses in the
//! translation of addresses. Blocks of any size are cut from the same regions, and free neighbours become
//! one again (`talc`).

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::{NonNull, null_mut};
use std::sync::{Mutex, MutexGuard, PoisonError};

use talc::base::Talc;
use talc::base::binning::{Binning, linear_extent_then_linearly_divided_exponential_binning};
use talc::source::Source;

/// Blocks of at least this many bytes come from the pool, smaller ones from the system's allocator, which
/// keeps those itself.
const POOLED_FROM: usize = 32 << 10;
/// Size of a huge page, to which regions are aligned.
const HUGE_PAGE: usize = 2 << 20;
/// Size of a region, if no single block needs more. What is not touched takes no memory.
const REGION: usize = 64 << 20;
/// What `talc` needs at the ends of a region and of a block; an upper bound.
const OVERHEAD: usize = 16 << 10;
/// Bytes at the end of a block that belong to `talc`.
const TAIL: usize = size_of::<usize>();
/// Sizes of blocks between a power of two and the next one.
const CLASSES: usize = 16;

/// The system's allocator, but for large blocks.
pub struct Pool {
    large: Mutex<Talc<Regions, Classes>>,
}

impl Pool {
    pub const fn new() -> Self {
        Pool { large: Mutex::new(Talc::new(Regions)) }
    }

    /// The layout of the block for what is asked, or `None` if it is not the pool's.
    ///
    /// Sizes are rounded up to those that lists of free blocks are kept by, so that a freed block serves the
    /// next one of its kind: at most a sixteenth more.
    fn pooled(layout: Layout) -> Option<Layout> {
        if layout.size() < POOLED_FROM {
            return None;
        }
        let size = layout.size().checked_add(TAIL)?;
        let size = size.checked_next_multiple_of((1 << size.ilog2()) / CLASSES)? - TAIL;
        Layout::from_size_align(size, layout.align()).ok()
    }

    fn lock(&self) -> MutexGuard<'_, Talc<Regions, Classes>> {
        // Nothing panics while it is held.
        self.large.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// SAFETY: a block belongs to the pool or to the system's allocator by its layout alone, and goes back to the
// one that it came from, with the same layout.
unsafe impl GlobalAlloc for Pool {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract; a pooled layout is not empty.
        unsafe {
            match Self::pooled(layout) {
                None => System.alloc(layout),
                Some(pooled) => self.lock().allocate(pooled).map_or(null_mut(), NonNull::as_ptr),
            }
        }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        // SAFETY: the block came from `alloc` with this layout.
        unsafe {
            match Self::pooled(layout) {
                None => System.dealloc(ptr, layout),
                Some(pooled) => self.lock().deallocate(ptr, pooled),
            }
        }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        // SAFETY: `new_size` with the old alignment is a valid layout by the caller's contract.
        let new_layout = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        let in_place = match (Self::pooled(layout), Self::pooled(new_layout)) {
            // SAFETY: the block is the system allocator's.
            (None, None) => return unsafe { System.realloc(ptr, layout, new_size) },
            // SAFETY: the block is the pool's, with this layout.
            (Some(old), Some(new)) => unsafe {
                self.lock().try_realloc_in_place(ptr, old, new.size())
            },
            _ => false,
        };
        if in_place {
            return ptr;
        }
        // SAFETY: a new block, filled with what both have room for; then the old one goes back.
        unsafe {
            let moved = self.alloc(new_layout);
            if !moved.is_null() {
                std::ptr::copy_nonoverlapping(ptr, moved, layout.size().min(new_size));
                self.dealloc(ptr, layout);
            }
            moved
        }
    }
}

/// Lists of free blocks by size: 16 for every power of two, up to 4 GiB.
enum Classes {}

impl Binning for Classes {
    type AvailabilityBitField = [usize; 6];

    const BIN_COUNT: u32 = 6 * usize::BITS - 1;

    fn size_to_bin(size: usize) -> u32 {
        linear_extent_then_linearly_divided_exponential_binning::<CLASSES, 1>(size)
    }
}

/// Where the pool's memory comes from: it is mapped when it is needed and stays.
#[derive(Debug)]
struct Regions;

// SAFETY: `acquire` allocates from the kernel alone.
unsafe impl Source for Regions {
    fn acquire<B: Binning>(talc: &mut Talc<Self, B>, layout: Layout) -> Result<(), ()> {
        let needed = layout.size().checked_add(layout.align() + OVERHEAD).ok_or(())?;
        let size = needed.max(REGION).checked_next_multiple_of(HUGE_PAGE).ok_or(())?;
        let mapped = size.checked_add(HUGE_PAGE).ok_or(())?;
        // SAFETY: a new private mapping, wherever the kernel likes. The part that is claimed lies inside
        // it, and nobody else knows of it. The advice leaves the content alone.
        unsafe {
            let start = libc::mmap(
                null_mut(),
                mapped,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            );
            if start == libc::MAP_FAILED {
                return Err(());
            }
            let start = start.cast::<u8>();
            let start = start.add(start.align_offset(HUGE_PAGE));
            libc::madvise(start.cast(), size, libc::MADV_HUGEPAGE);
            talc.claim(start, size).map(|_| ()).ok_or(())
        }
    }
}
