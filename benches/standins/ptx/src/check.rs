//! Books of a block's shared memory: the thread that last wrote and read each part, and the time.
//!
//! Time is counted in barriers. Two accesses are ordered if the same thread makes both, if a barrier of the
//! block is between them, or, within one warp, a barrier of that warp.

use crate::error::{Fault, Other, Space};
use crate::wgmma::descriptor::CHUNK;
use crate::wgmma::reads::Reads;

/// The author of an access: a thread of the block and the line that it executes.
#[derive(Debug, Clone, Copy)]
pub struct Who {
    pub thread: u32,
    pub line: u32,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
enum State {
    #[default]
    Unwritten,
    Written,
    /// `cp.async` has begun to write, but the thread has not waited for it.
    Pending,
}

/// Represents threads of several warps. With the highest bit set, any other number represents threads of one
/// warp.
const MANY: u16 = u16::MAX;
const MANY_OF_WARP: u16 = 1 << 15;

fn warp_of(thread: u16) -> u32 {
    match thread {
        MANY => u32::MAX,
        thread if thread >= MANY_OF_WARP => u32::from(thread - MANY_OF_WARP),
        thread => u32::from(thread) / 32,
    }
}

/// The last write, and the last read, of some bytes.
#[derive(Debug, Clone, Copy, Default)]
struct Cell {
    write_time: u32,
    write_line: u32,
    read_time: u32,
    read_line: u32,
    write_thread: u16,
    read_thread: u16,
    state: State,
}

/// The books of one block.
#[derive(Debug)]
pub struct Books {
    block: u32,
    granule: u32,
    cells: Vec<Cell>,
    clock: u32,
    /// Times of the last barrier of the block and of each warp.
    block_barrier: u32,
    warp_barriers: Vec<u32>,
    /// Reads by products of warpgroups, in kernels that have such products.
    products: Option<Box<Reads>>,
}

impl Books {
    /// Creates books of `bytes` bytes. `products` is set if the kernel has products of warpgroups.
    pub fn new(bytes: u32, granule: u32, warps: usize, products: bool) -> Books {
        Books {
            block: 0,
            granule,
            cells: vec![Cell::default(); bytes.div_ceil(granule) as usize],
            clock: 1,
            block_barrier: 0,
            warp_barriers: vec![0; warps],
            products: products.then(|| Box::new(Reads::new(bytes, 32 * warps))),
        }
    }

    /// Begins a block, whose shared memory is unwritten.
    pub fn begin(&mut self, block: u32) {
        self.block = block;
        self.cells.fill(Cell::default());
        self.clock = 1;
        self.block_barrier = 0;
        self.warp_barriers.fill(0);
        if let Some(products) = &mut self.products {
            products.begin();
        }
    }

    pub fn barrier(&mut self) {
        self.clock += 1;
        self.block_barrier = self.clock;
        if let Some(products) = &mut self.products {
            products.barrier();
        }
    }

    pub fn warp_barrier(&mut self, warp: usize) {
        self.clock += 1;
        self.warp_barriers[warp] = self.clock;
    }

    /// Returns `true` if the access of `thread` at `time` comes before one that `who` makes now.
    #[inline]
    fn before(&self, thread: u16, time: u32, who: Who) -> bool {
        if u32::from(thread) == who.thread || time < self.block_barrier {
            return true;
        }
        warp_of(thread) == who.thread / 32 && time < self.warp_barriers[who.thread as usize / 32]
    }

    fn cells(&self, address: u32, bytes: u32) -> std::ops::Range<usize> {
        (address / self.granule) as usize..(address + bytes).div_ceil(self.granule) as usize
    }

    fn other(&self, thread: u16, line: u32) -> Other {
        // The first thread of the warp represents several threads.
        let thread = if thread >= MANY_OF_WARP { warp_of(thread).min(31) * 32 } else { u32::from(thread) };
        Other { block: self.block, thread, line }
    }

    #[inline]
    pub fn read(&mut self, address: u32, bytes: u32, who: Who) -> Result<(), Fault> {
        for at in self.cells(address, bytes) {
            let cell = self.cells[at];
            let place = u64::from(at as u32 * self.granule);
            match cell.state {
                State::Unwritten => {
                    return Err(Fault::Uninitialised { space: Space::Shared, address: place });
                }
                State::Pending => {
                    let copy = self.other(cell.write_thread, cell.write_line);
                    return Err(Fault::Pending { address: place, copy });
                }
                State::Written => {}
            }
            if !self.before(cell.write_thread, cell.write_time, who) {
                let other = self.other(cell.write_thread, cell.write_line);
                return Err(Fault::ReadAfterWrite { space: Space::Shared, address: place, other });
            }
            let reader = match cell.read_time > 0 && !self.before(cell.read_thread, cell.read_time, who) {
                false => who.thread as u16,
                true if warp_of(cell.read_thread) == who.thread / 32 => {
                    MANY_OF_WARP + (who.thread / 32) as u16
                }
                true => MANY,
            };
            let cell = &mut self.cells[at];
            cell.read_thread = reader;
            cell.read_time = self.clock;
            cell.read_line = who.line;
        }
        Ok(())
    }

    #[inline]
    pub fn write(&mut self, address: u32, bytes: u32, who: Who) -> Result<(), Fault> {
        self.change(address, bytes, who, State::Written)
    }

    /// Records that `cp.async` begins to write.
    pub fn begin_copy(&mut self, address: u32, bytes: u32, who: Who) -> Result<(), Fault> {
        self.change(address, bytes, who, State::Pending)
    }

    /// Records that the thread has waited for a copy, which counts as its write from now on.
    pub fn end_copy(&mut self, address: u32, bytes: u32) {
        for at in self.cells(address, bytes) {
            self.cells[at].state = State::Written;
            self.cells[at].write_time = self.clock;
        }
    }

    fn change(&mut self, address: u32, bytes: u32, who: Who, state: State) -> Result<(), Fault> {
        for at in self.cells(address, bytes) {
            let cell = self.cells[at];
            let place = u64::from(at as u32 * self.granule);
            let writer = self.other(cell.write_thread, cell.write_line);
            if cell.state == State::Pending {
                return Err(Fault::Pending { address: place, copy: writer });
            }
            if cell.state == State::Written && !self.before(cell.write_thread, cell.write_time, who) {
                return Err(Fault::WriteAfterWrite { space: Space::Shared, address: place, other: writer });
            }
            if cell.read_time > 0 && !self.before(cell.read_thread, cell.read_time, who) {
                let other = self.other(cell.read_thread, cell.read_line);
                return Err(Fault::WriteAfterRead { space: Space::Shared, address: place, other });
            }
            if let Some(reads) = &self.products {
                let range = [at as u32 * self.granule, self.granule];
                if let Some((address, reader)) = reads.meets(range, who.thread / 32, self.block_barrier) {
                    let address = u64::from(address);
                    let other = Other { block: self.block, thread: 32 * reader.warp, line: reader.line };
                    return Err(match reader.flying {
                        true => Fault::AsyncRead { address, other },
                        false => Fault::WriteAfterRead { space: Space::Shared, address, other },
                    });
                }
            }
            let cell = &mut self.cells[at];
            cell.write_thread = who.thread as u16;
            cell.write_time = self.clock;
            cell.write_line = who.line;
            cell.state = state;
        }
        Ok(())
    }

    /// Records that a product of a warpgroup reads 16 bytes.
    pub fn read_by_product(&mut self, address: u32) -> Result<(), Fault> {
        let Some(products) = &mut self.products else { return Ok(()) };
        for at in (address / self.granule) as usize..(address + CHUNK).div_ceil(self.granule) as usize {
            let cell = self.cells[at];
            let address = u64::from(at as u32 * self.granule);
            let other =
                Other { block: self.block, thread: u32::from(cell.write_thread), line: cell.write_line };
            match cell.state {
                State::Unwritten => return Err(Fault::Uninitialised { space: Space::Shared, address }),
                State::Pending => return Err(Fault::Pending { address, copy: other }),
                State::Written => {}
            }
            if cell.write_time >= self.block_barrier {
                return Err(Fault::ReadAfterWrite { space: Space::Shared, address, other });
            }
            if !products.sees(u32::from(cell.write_thread), cell.write_time) {
                return Err(Fault::Proxy { address, other });
            }
        }
        products.read(address);
        Ok(())
    }

    /// Records that a warp has issued a product in this line. The product made the reads recorded by
    /// [`Books::read_by_product`].
    pub fn issued_product(&mut self, warp: usize, group: u32, line: u32) {
        if let Some(products) = &mut self.products {
            products.issued(warp as u32, group, line);
        }
    }

    /// Records that a warp has waited for the products of its first `groups` groups.
    pub fn waited_for_products(&mut self, warp: usize, groups: u32) {
        if let Some(products) = &mut self.products {
            products.waited(warp as u32, groups, [self.clock, self.block_barrier]);
        }
    }

    /// Records a proxy fence by threads of a warp: after the next barrier, products see their writes.
    pub fn fence_products(&mut self, threads: impl Iterator<Item = u32>) {
        self.clock += 1;
        if let Some(products) = &mut self.products {
            threads.for_each(|thread| products.fence(thread, self.clock));
        }
    }

    /// Records an atomic update. Atomic updates do not race with each other.
    pub fn atomic(&mut self, address: u32, bytes: u32) -> Result<(), Fault> {
        for at in self.cells(address, bytes) {
            if self.cells[at].state == State::Unwritten {
                let address = u64::from(at as u32 * self.granule);
                return Err(Fault::Uninitialised { space: Space::Shared, address });
            }
        }
        Ok(())
    }
}
