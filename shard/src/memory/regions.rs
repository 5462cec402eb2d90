//! Where the pool's memory comes from: regions that are mapped when they are needed and stay.
//!
//! Until the first step is done, the first regions have pages of the usual size. Where a hypervisor takes
//! back what a guest has freed, it takes large blocks of free memory and leaves small ones: huge pages are
//! slow to get there, and they are cleared as a whole by the thread that touches them first. Then they are
//! worth it, since every access misses less often in the translation of addresses: a thread of its own moves
//! into them what there is. More memory than a small model needs is in huge pages from the start; the usual
//! ones take longer for so much where nothing has been taken back.

use std::alloc::Layout;
use std::iter::successors;
use std::ops::Range;
use std::ptr::null_mut;
use std::thread;

use talc::base::Talc;
use talc::base::binning::Binning;
use talc::source::Source;

/// Size of a huge page, to which regions are aligned.
const HUGE_PAGE: usize = 2 << 20;
/// Size of a region, if no single block needs more. What is not touched takes no memory.
const SIZE: usize = 64 << 20;
/// What `talc` needs at the ends of a region and of a block; an upper bound.
const OVERHEAD: usize = 16 << 10;
/// What `talc` writes at most at the start of free memory, to keep book of it; an upper bound.
const BOOKKEEPING: usize = 4 << 10;

/// Bytes of regions that begin with pages of the usual size.
const SMALL_PAGES: usize = 512 << 20;

/// The regions of a pool.
#[derive(Debug)]
pub struct Regions {
    /// Addresses in the newest region that have never been part of a block.
    fresh: Range<usize>,
    /// Bytes of regions that may still begin with pages of the usual size.
    left: usize,
    /// The newest of those that did.
    newest: Option<&'static Region>,
}

/// A region with pages of the usual size. Its description lies behind it, in the same mapping.
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

    /// Notes that there is a block of `size` bytes at `start`, and returns from which of its bytes on it is
    /// zero because nothing has ever written there.
    pub fn note(&mut self, start: usize, size: usize) -> usize {
        let end = start + size;
        if end <= self.fresh.start || start >= self.fresh.end {
            return size;
        }
        let zero_from = start.max(self.fresh.start) + BOOKKEEPING;
        self.fresh.start = end;
        zero_from.min(end) - start
    }

    /// From now on regions have huge pages. Returns the newest of those that have none.
    pub fn use_huge_pages(&mut self) -> Option<&'static Region> {
        self.left = 0;
        self.newest.take()
    }
}

impl Region {
    /// Moves this region and all that are older into huge pages: a thread of its own does it, and if there is
    /// none, the kernel does it by and by.
    pub fn move_into_huge_pages(&'static self) {
        let regions = move || successors(Some(self), |region| region.older);
        regions().for_each(|region| {
            // SAFETY: the region is mapped for good, and the advice leaves its content alone.
            unsafe { libc::madvise(region.start as *mut _, region.size, libc::MADV_HUGEPAGE) };
        });
        let collapse = move || {
            let pages = |region: &Region| (region.start..region.start + region.size).step_by(HUGE_PAGE);
            regions().flat_map(pages).for_each(|page| {
                // Kernels before 6.1 refuse it. One call for each, since a process ends only between two.
                // SAFETY: as above; threads that read and write meanwhile find what they would have found.
                unsafe { libc::madvise(page as *mut _, HUGE_PAGE, libc::MADV_COLLAPSE) };
            })
        };
        drop(thread::Builder::new().name("huge-pages".to_owned()).spawn(collapse));
    }
}

// SAFETY: `acquire` allocates from the kernel alone.
unsafe impl Source for Regions {
    fn acquire<B: Binning>(talc: &mut Talc<Self, B>, layout: Layout) -> Result<(), ()> {
        let needed = layout.size().checked_add(layout.align() + OVERHEAD).ok_or(())?;
        let size = needed.max(SIZE).checked_next_multiple_of(HUGE_PAGE).ok_or(())?;
        let mapped = size.checked_add(HUGE_PAGE).ok_or(())?;
        // SAFETY: a new private mapping, wherever the kernel likes. The part that is claimed lies inside
        // it, and nobody else knows of it. Mappings begin at a page, so that one page at least is left
        // behind that part, and its first bytes are the region's description alone.
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
