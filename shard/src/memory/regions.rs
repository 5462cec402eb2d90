//! The memory of the pool: regions that are mapped when they are needed and never unmapped.
//!
//! Until the end of the first step, the first regions have small pages. On a hypervisor that reclaims a guest's freed
//! memory, large free blocks are taken and small ones left: huge pages are then slow to get, and the first thread
//! that touches one must clear all of it. After the first step, a separate thread moves existing memory into huge
//! pages, because fewer TLB misses then outweigh that cost. Memory beyond the needs of a small model is in huge pages
//! from the start: if nothing was reclaimed, mapping that much in small pages would take longer.

use std::alloc::Layout;
use std::iter::successors;
use std::ops::Range;
use std::ptr::null_mut;
use std::thread;

use talc::base::Talc;
use talc::base::binning::Binning;
use talc::source::Source;

/// Size of a huge page; regions are aligned to it.
const HUGE_PAGE: usize = 2 << 20;
/// Minimum size of a region. A region for a single larger block is larger. Untouched parts take no memory.
const SIZE: usize = 64 << 20;
/// Upper bound of the bytes that `talc` needs at the ends of a region and of a block.
const OVERHEAD: usize = 16 << 10;
/// Upper bound of the bytes that `talc` writes at the start of free memory for bookkeeping.
const BOOKKEEPING: usize = 4 << 10;

/// Total size of the regions that start with small pages.
const SMALL_PAGES: usize = 512 << 20;

/// The regions of a pool.
#[derive(Debug)]
pub struct Regions {
    /// Addresses in the newest region that have never been part of a block.
    fresh: Range<usize>,
    /// Number of bytes for which new regions may still start with small pages.
    left: usize,
    /// The newest region that started with small pages.
    newest: Option<&'static Region>,
}

/// A region with small pages. This description lies behind it, in the same mapping.
#[derive(Debug)]
pub struct Region {
    start: usize,
    size: usize,
    older: Option<&'static Region>,
}

impl Regions {
    pub const fn new() -> Self {
        Regions { fresh: 0..0, left: SMALL_PAGES, newest: None }
    }

    /// Registers a block of `size` bytes at `start`. Returns the offset from which the block is still zero, because
    /// nothing has ever been written there.
    pub fn note(&mut self, start: usize, size: usize) -> usize {
        let end = start + size;
        if end <= self.fresh.start || start >= self.fresh.end {
            return size;
        }
        let zero_from = start.max(self.fresh.start) + BOOKKEEPING;
        self.fresh.start = end;
        zero_from.min(end) - start
    }

    /// Makes new regions use huge pages. Returns the newest region without them.
    pub fn use_huge_pages(&mut self) -> Option<&'static Region> {
        self.left = 0;
        self.newest.take()
    }
}

impl Region {
    /// Moves this region and all older ones into huge pages, on a separate thread; if the thread cannot
    /// start, the kernel moves them gradually.
    pub fn move_into_huge_pages(&'static self) {
        let regions = move || successors(Some(self), |region| region.older);
        regions().for_each(|region| {
            // SAFETY: the region is never unmapped, and the advice does not change its contents.
            unsafe { libc::madvise(region.start as *mut _, region.size, libc::MADV_HUGEPAGE) };
        });
        let collapse = move || {
            let pages = |region: &Region| (region.start..region.start + region.size).step_by(HUGE_PAGE);
            regions().flat_map(pages).for_each(|page| {
                // Kernels before 6.1 refuse it. One call per page, because a process can end only between two
                // calls.
                // SAFETY: as above; threads that read and write meanwhile are not affected.
                unsafe { libc::madvise(page as *mut _, HUGE_PAGE, libc::MADV_COLLAPSE) };
            })
        };
        drop(thread::Builder::new().name("huge-pages".to_owned()).spawn(collapse));
    }
}

// SAFETY: `acquire` allocates only from the kernel.
unsafe impl Source for Regions {
    fn acquire<B: Binning>(talc: &mut Talc<Self, B>, layout: Layout) -> Result<(), ()> {
        let needed = layout.size().checked_add(layout.align() + OVERHEAD).ok_or(())?;
        let size = needed.max(SIZE).checked_next_multiple_of(HUGE_PAGE).ok_or(())?;
        let mapped = size.checked_add(HUGE_PAGE).ok_or(())?;
        // SAFETY: a new private mapping at an address chosen by the kernel. The claimed part lies inside it,
        // and nothing else refers to it. Mappings begin at a page, so that at least one page is left after
        // that part, and its first bytes contain only the region's description.
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
            let regions = &mut talc.source;
            if let Some(left) = regions.left.checked_sub(size) {
                let description = start.add(size).cast::<Region>();
                let older = regions.newest;
                description.write(Region { start: start.expose_provenance(), size, older });
                (regions.left, regions.newest) = (left, Some(&*description));
            } else {
                libc::madvise(start.cast(), size, libc::MADV_HUGEPAGE);
            }
            regions.fresh = start.addr()..start.addr() + size;
            talc.claim(start, size).map(|_| ()).ok_or(())
        }
    }
}
