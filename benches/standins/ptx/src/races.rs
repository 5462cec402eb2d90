//! Books of device memory while a kernel runs: the block and warp that last wrote and read each word.
//!
//! The blocks of a launch are unordered, so no block may read or write what another one writes. The warps of
//! a block are ordered by its barriers. Lanes of the same warp are not distinguished here.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Fault, Other, Space};

/// The author of an access.
#[derive(Debug, Clone, Copy)]
pub struct Party {
    /// Number of the launch, counted from 1.
    pub launch: u64,
    pub block: u32,
    pub warp: u32,
    /// Number of barriers that the block has reached.
    pub barriers: u32,
    /// Set if reads are checked: see [`Checks::Strict`](crate::Checks::Strict).
    pub strict: bool,
}

/// Layout of a record's bits, from the lowest: bytes of the word, a flag, barriers, warp, block, launch.
const BYTES: u64 = 0xf;
const FLAG: u64 = 1 << 4;
const BARRIERS: u32 = 5;
const WARP: u32 = 17;
const BLOCK: u32 = 22;
const LAUNCH: u32 = 44;
const BLOCK_BITS: u64 = (1 << 22) - 1;

/// Represents several blocks, so the last block with its own number is the one before.
const SEVERAL: u64 = BLOCK_BITS;

/// A record in 64 bits.
#[derive(Clone, Copy, PartialEq)]
struct Record(u64);

impl Record {
    fn new(party: Party, bytes: u64, flag: bool) -> Record {
        let block = u64::from(party.block) % SEVERAL;
        let barriers = u64::from(party.barriers) % (1 << 12);
        let place = block << BLOCK | u64::from(party.warp) << WARP | barriers << BARRIERS;
        Record(party.launch << LAUNCH | place | if flag { FLAG } else { 0 } | bytes)
    }

    fn block(self) -> u64 {
        self.0 >> BLOCK & BLOCK_BITS
    }

    fn warp(self) -> u64 {
        self.0 >> WARP & 31
    }

    fn flag(self) -> bool {
        self.0 & FLAG != 0
    }

    fn same_launch(self, other: Record) -> bool {
        self.0 >> LAUNCH == other.0 >> LAUNCH
    }

    fn same_block_and_time(self, other: Record) -> bool {
        self.block() == other.block() && self.0 >> BARRIERS & 0xfff == other.0 >> BARRIERS & 0xfff
    }

    /// Returns `true` if two accesses of the same launch are unordered. `several` is set if this record's
    /// flag means that it represents several warps.
    fn unordered(self, other: Record, several: bool) -> bool {
        if !self.same_launch(other) || self.0 & other.0 & BYTES == 0 {
            return false;
        }
        match self.block() == other.block() {
            true => {
                self.same_block_and_time(other) && (self.warp() != other.warp() || several && self.flag())
            }
            false => true,
        }
    }

    fn other(self) -> Other {
        // The first block represents several blocks.
        let block = if self.block() == SEVERAL { 0 } else { self.block() as u32 };
        Other { block, thread: 32 * self.warp() as u32, line: 0 }
    }
}

/// The last write and the last read of a word of four bytes.
#[derive(Debug, Default)]
pub struct Word {
    /// The flag means that the write was atomic.
    write: AtomicU64,
    /// The flag means that several warps of the block have read since its last barrier.
    read: AtomicU64,
}

impl Word {
    /// Records a read of `bytes` of the word at `address`. Fails if others have written them.
    #[inline]
    pub fn read(&self, address: u64, party: Party, bytes: u64) -> Result<(), Fault> {
        if !party.strict {
            return Ok(());
        }
        let new = Record::new(party, bytes, false);
        let write = Record(self.write.load(Ordering::Relaxed));
        if write.unordered(new, false) {
            return Err(Fault::ReadAfterWrite { space: Space::Global, address, other: write.other() });
        }
        let old = Record(self.read.load(Ordering::Relaxed));
        // One record cannot hold all reads: those of common bytes are merged, otherwise the last one is kept.
        let both = old.0 & new.0 & BYTES;
        let merged = if !old.same_launch(new) {
            new.0
        } else if old.block() == SEVERAL {
            old.0
        } else if old.block() != new.block() && both != 0 {
            new.0 & !BYTES | SEVERAL << BLOCK | both
        } else if !old.same_block_and_time(new) {
            new.0
        } else if old.warp() == new.warp() {
            new.0 | old.0 & (BYTES | FLAG)
        } else if both != 0 {
            new.0 & !BYTES | FLAG | both
        } else {
            new.0
        };
        if merged != old.0 {
            self.read.store(merged, Ordering::Relaxed);
        }
        Ok(())
    }

    /// Records a write. Fails if others have written or read the bytes.
    #[inline]
    pub fn write(&self, address: u64, party: Party, bytes: u64, atomic: bool) -> Result<(), Fault> {
        let mut new = Record::new(party, bytes, atomic);
        let write = Record(self.write.load(Ordering::Relaxed));
        if write.unordered(new, false) && !(atomic && write.flag()) {
            return Err(Fault::WriteAfterWrite { space: Space::Global, address, other: write.other() });
        }
        let read = Record(self.read.load(Ordering::Relaxed));
        if read.unordered(new, true) {
            return Err(Fault::WriteAfterRead { space: Space::Global, address, other: read.other() });
        }
        if write.0 & !BYTES == new.0 & !BYTES {
            new = Record(new.0 | write.0 & BYTES);
        }
        self.write.store(new.0, Ordering::Relaxed);
        Ok(())
    }
}
