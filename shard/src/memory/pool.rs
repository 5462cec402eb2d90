//! Large blocks of memory, kept from step to step.
//!
//! Every training step requests blocks of the same sizes. The system's allocator returns large blocks to the kernel,
//! which must then map and clear the pages again, 4 KiB at a time. This pool keeps them, in regions that are soon
//! backed by huge pages ([`regions`](super::regions)), so that later steps neither wait for the kernel nor have TLB
//! misses. Blocks of all sizes are cut from the same regions, and adjacent free blocks are merged (`talc`).

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::null_mut;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard};

use talc::base::Talc;
use talc::base::binning::{Binning, linear_extent_then_linearly_divided_exponential_binning};

use super::regions::Regions;
use crate::sync::lock;

/// Minimum size of blocks from the pool, in bytes. The system's allocator keeps smaller blocks for reuse itself.
const POOLED_FROM: usize = 32 << 10;
/// Number of bytes at the end of a block that `talc` uses.
const TAIL: usize = size_of::<usize>();
/// Number of words in the bit field that has one bit for each list of free blocks.
const WORDS: usize = 24;
/// Number of size classes between a power of two and the next.
const CLASSES: usize = 64;

/// The system's allocator, with a pool for large blocks.
pub struct Pool {
    large: Mutex<Talc<Regions, Classes>>,
    huge: AtomicBool,
}

impl Pool {
    pub const fn new() -> Self {
        Pool { large: Mutex::new(Talc::new(Regions::new())), huge: AtomicBool::new(false) }
    }

    /// Uses huge pages for blocks from now on, and moves existing blocks. Later calls cost nothing.
    pub fn use_huge_pages(&self) {
        if self.huge.swap(true, Ordering::Relaxed) {
            return;
        }
        // Not while the pool is locked, because starting a thread allocates memory.
        let newest = self.lock().source.use_huge_pages();
        if let Some(newest) = newest {
            newest.move_into_huge_pages();
        }
    }

    /// Returns the layout of the block for a request, or `None` if the request is not served by the pool.
    ///
    /// Sizes are rounded up to the size classes of the free lists, so that a freed block fits the next request of its
    /// class. This adds at most 1.6 %. Buffers of a power of two are just above a class limit because of their
    /// header.
    fn pooled(layout: Layout) -> Option<Layout> {
        if layout.size() < POOLED_FROM {
            return None;
        }
        let size = layout.size().checked_add(TAIL)?;
        let size = size.checked_next_multiple_of((1 << size.ilog2()) / CLASSES)? - TAIL;
        Layout::from_size_align(size, layout.align()).ok()
    }

    /// Allocates a block. Also returns how many of its first bytes may be nonzero; all following bytes are
    /// zero.
    ///
    /// # Safety
    /// `pooled` must not be empty.
    unsafe fn allocate(&self, pooled: Layout) -> (*mut u8, usize) {
        let mut large = self.lock();
        // SAFETY: the caller's contract.
        match unsafe { large.allocate(pooled) } {
            None => (null_mut(), 0),
            Some(block) => {
                let block = block.as_ptr();
                (block, large.source.note(block.addr(), pooled.size()))
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Talc<Regions, Classes>> {
        lock(&self.large)
    }
}

// SAFETY: the layout alone decides whether a block belongs to the pool or to the system's allocator, and it
// is returned to the allocator that it came from, with the same layout.
unsafe impl GlobalAlloc for Pool {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract; a pooled layout is not empty.
        unsafe {
            match Self::pooled(layout) {
                None => System.alloc(layout),
                Some(pooled) => self.allocate(pooled).0,
            }
        }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's contract; a pooled layout is not empty, and the block has its length.
        unsafe {
            match Self::pooled(layout) {
                None => System.alloc_zeroed(layout),
                Some(pooled) => {
                    let (block, written) = self.allocate(pooled);
                    if !block.is_null() {
                        block.write_bytes(0, written.min(layout.size()));
                    }
                    block
                }
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
            // SAFETY: the block belongs to the system allocator.
            (None, None) => return unsafe { System.realloc(ptr, layout, new_size) },
            // SAFETY: the block belongs to the pool, with this layout.
            (Some(old), Some(new)) => unsafe {
                let mut large = self.lock();
                let in_place = large.try_realloc_in_place(ptr, old, new.size());
                if in_place {
                    large.source.note(ptr.addr(), new.size());
                }
                in_place
            },
            _ => false,
        };
        if in_place {
            return ptr;
        }
        // SAFETY: a new block, filled with the bytes that fit in both; then the old one is freed.
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

/// The size classes of free blocks: 64 for every power of two, up to 4 GiB.
enum Classes {}

impl Binning for Classes {
    type AvailabilityBitField = [usize; WORDS];

    const BIN_COUNT: u32 = WORDS as u32 * usize::BITS - 1;

    fn size_to_bin(size: usize) -> u32 {
        linear_extent_then_linearly_divided_exponential_binning::<CLASSES, 1>(size)
    }
}
