//! The allocator itself: blocks keep their content and are reused.

use std::alloc::{GlobalAlloc, Layout};
use std::collections::HashSet;
use std::sync::PoisonError;

use kiln_shard::memory;

use super::{ALLOCATOR, ONE_AT_A_TIME};

/// A block filled with one byte.
struct Block {
    data: *mut u8,
    layout: Layout,
    byte: u8,
}

impl Block {
    fn new(layout: Layout, byte: u8, zeroed: bool) -> Self {
        // SAFETY: sizes are not zero.
        let data = unsafe { if zeroed { ALLOCATOR.alloc_zeroed(layout) } else { ALLOCATOR.alloc(layout) } };
        assert!(!data.is_null() && data.addr().is_multiple_of(layout.align()), "{layout:?}");
        let mut block = Block { data, layout, byte };
        assert!(!zeroed || block.bytes().iter().all(|&byte| byte == 0), "{layout:?}");
        block.bytes().fill(byte);
        block
    }

    fn bytes(&mut self) -> &mut [u8] {
        // SAFETY: the block has this many bytes, all written since its creation, and one owner.
        unsafe { std::slice::from_raw_parts_mut(self.data, self.layout.size()) }
    }

    fn resize(&mut self, size: usize) {
        let kept = size.min(self.layout.size());
        // SAFETY: the block came from this allocator with this layout; sizes are not zero.
        self.data = unsafe { ALLOCATOR.realloc(self.data, self.layout, size) };
        self.layout = Layout::from_size_align(size, self.layout.align()).unwrap();
        assert!(!self.data.is_null() && self.data.addr().is_multiple_of(self.layout.align()));
        // SAFETY: these bytes were written before the block was resized.
        let old = unsafe { std::slice::from_raw_parts(self.data, kept) };
        assert!(old.iter().all(|&byte| byte == self.byte), "after a change of size to {size}");
        // SAFETY: the block has this many bytes.
        unsafe { self.data.write_bytes(self.byte, size) };
    }
}

impl Drop for Block {
    fn drop(&mut self) {
        let (byte, layout) = (self.byte, self.layout);
        assert!(self.bytes().iter().all(|&value| value == byte), "{layout:?} was overwritten");
        // SAFETY: the block came from this allocator with this layout.
        unsafe { ALLOCATOR.dealloc(self.data, self.layout) };
    }
}

/// Pseudo-random numbers (splitmix64).
struct Random(u64);

impl Random {
    fn below(&mut self, limit: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % limit as u64) as usize
    }

    /// Returns a size from 1 byte to 8 MiB, with the same frequency for each order of magnitude.
    fn size(&mut self) -> usize {
        let magnitude = self.below(23);
        1 + (1 << magnitude) + self.below(1 << magnitude)
    }
}

#[test]
fn blocks_of_many_threads_keep_what_is_written() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    const RANK: usize = 40;
    let threads: Vec<_> = (0..4)
        .map(|seed| {
            std::thread::spawn(move || {
                memory::bind_to_rank(RANK);
                let (mut random, mut blocks) = (Random(seed), Vec::<Block>::new());
                for turn in 0..2_000 {
                    if turn == 1_000 {
                        // Blocks also keep their content when they are moved to huge pages.
                        memory::use_huge_pages();
                    }
                    let index = random.below(24);
                    match random.below(3) {
                        0 if index < blocks.len() => blocks[index].resize(random.size()),
                        1 if index < blocks.len() => drop(blocks.swap_remove(index)),
                        _ if blocks.len() < 24 => {
                            let layout = Layout::from_size_align(random.size(), 1 << random.below(9));
                            let byte = random.below(256) as u8;
                            blocks.push(Block::new(layout.unwrap(), byte, random.below(2) == 0));
                        }
                        _ => drop(blocks.swap_remove(index)),
                    }
                }
            })
        })
        .collect();
    for thread in threads {
        thread.join().unwrap();
    }
    assert_eq!(memory::live_bytes(RANK), 0, "what was counted for blocks that are gone");
}

/// Buffers often have a power of two as their length, plus a header. They still lie next to each other.
#[test]
fn blocks_lie_next_to_each_other() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    const SIZE: usize = 1 << 20;
    let mut blocks: Vec<_> =
        (0..48).map(|_| Block::new(Layout::from_size_align(SIZE, 64).unwrap(), 1, false)).collect();
    blocks.sort_by_key(|block| block.data.addr());
    let distances: Vec<_> = blocks.windows(2).map(|pair| pair[1].data.addr() - pair[0].data.addr()).collect();
    // Other blocks may lie between some of them, and a region may end. If sizes were rounded up to a
    // sixteenth, none would be close.
    let close = distances.iter().filter(|distance| **distance <= SIZE + SIZE / 50).count();
    assert!(close >= 24, "{close} of {distances:?}");
}

#[test]
fn freed_blocks_are_used_again() {
    let _one = ONE_AT_A_TIME.lock().unwrap_or_else(PoisonError::into_inner);
    let sizes = [40_000, 1 << 20, (3 << 20) + 5, 100 << 20];
    let layouts = sizes.map(|size| Layout::from_size_align(size, 64).unwrap());
    let mut seen = HashSet::new();
    for _ in 0..100 {
        // SAFETY: the layouts are not empty, and the blocks are deallocated with the layouts of their
        // allocation.
        unsafe {
            let blocks = layouts.map(|layout| ALLOCATOR.alloc(layout));
            seen.extend(blocks.map(|block| block.addr()));
            for (block, layout) in blocks.into_iter().zip(layouts) {
                ALLOCATOR.dealloc(block, layout);
            }
        }
    }
    assert!(seen.len() <= 2 * sizes.len(), "{} places for {} blocks", seen.len(), sizes.len());
}
