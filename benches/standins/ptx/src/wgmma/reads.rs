//! Reads of shared memory by `wgmma`, which go by another way than those of other instructions (the async
//! proxy).
//!
//! A write is seen there if its thread has executed `fence.proxy.async` behind it, and the block has met at a
//! barrier since. What a product reads must not be written until each warp has waited for it; the wait makes
//! that visible to other instructions of its warp, and a barrier to those of the others.

use crate::wgmma::descriptor::CHUNK;

/// Stands for several warps.
const MANY: u32 = u32::MAX;

/// Products that read a chunk of shared memory.
#[derive(Debug, Clone, Copy, Default)]
struct Chunk {
    /// Products that have not been waited for, by all warps.
    flying: u32,
    /// The time of the last wait for one that had read it, the warp, and the line of the product.
    time: u32,
    warp: u32,
    line: u32,
}

/// A product of a warp that has not been waited for.
#[derive(Debug)]
struct Flight {
    warp: u32,
    group: u32,
    line: u32,
    chunks: Vec<u32>,
}

/// A read that a write meets: the warp and the line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    pub warp: u32,
    pub line: u32,
    /// Whether it has not been waited for.
    pub flying: bool,
}

/// The reads of a block.
#[derive(Debug)]
pub struct Reads {
    chunks: Vec<Chunk>,
    flights: Vec<Flight>,
    /// What the product that is executed now has read.
    current: Vec<u32>,
    /// By thread, the time of its last fence, and of the last one before a barrier.
    fences: Vec<u32>,
    met: Vec<u32>,
}

impl Reads {
    pub fn new(bytes: u32, threads: usize) -> Reads {
        Reads {
            chunks: vec![Chunk::default(); bytes.div_ceil(CHUNK) as usize],
            flights: Vec::new(),
            current: Vec::new(),
            fences: vec![0; threads],
            met: vec![0; threads],
        }
    }

    pub fn begin(&mut self) {
        self.chunks.fill(Chunk::default());
        self.flights.clear();
        self.current.clear();
        self.fences.fill(0);
        self.met.fill(0);
    }

    pub fn barrier(&mut self) {
        self.met.copy_from_slice(&self.fences);
    }

    pub fn fence(&mut self, thread: u32, time: u32) {
        self.fences[thread as usize] = time;
    }

    /// Whether a write by `thread` at `time` is seen by products.
    pub fn sees(&self, thread: u32, time: u32) -> bool {
        self.met[thread as usize] > time
    }

    /// The product that is executed now reads 16 bytes.
    pub fn read(&mut self, address: u32) {
        let chunk = address / CHUNK;
        self.chunks[chunk as usize].flying += 1;
        self.current.push(chunk);
    }

    /// The product that was executed is of this warp and group.
    pub fn issued(&mut self, warp: u32, group: u32, line: u32) {
        let chunks = std::mem::take(&mut self.current);
        self.flights.push(Flight { warp, group, line, chunks });
    }

    /// A warp has waited for its first groups, so many, at `time`; the last barrier was at `barrier`.
    pub fn waited(&mut self, warp: u32, groups: u32, [time, barrier]: [u32; 2]) {
        let chunks = &mut self.chunks;
        let current = &mut self.current;
        self.flights.retain_mut(|flight| {
            if flight.warp != warp || flight.group >= groups {
                return true;
            }
            for &number in &flight.chunks {
                let chunk = &mut chunks[number as usize];
                let others = chunk.time >= barrier && chunk.time > 0 && chunk.warp != warp;
                let warp = if others { MANY } else { warp };
                *chunk = Chunk { flying: chunk.flying - 1, time, warp, line: flight.line };
            }
            // Its memory is used again.
            *current = std::mem::take(&mut flight.chunks);
            current.clear();
            false
        });
    }

    /// The read that a write by a thread of `warp` meets, at its address.
    pub fn meets(&self, [address, bytes]: [u32; 2], warp: u32, barrier: u32) -> Option<(u32, Reader)> {
        let numbers = address / CHUNK..(address + bytes).div_ceil(CHUNK);
        let (number, chunk) =
            numbers.map(|number| (number, &self.chunks[number as usize])).find(|(_, chunk)| {
                chunk.flying > 0 || chunk.time > 0 && chunk.time >= barrier && chunk.warp != warp
            })?;
        let reader = match self.flights.iter().find(|flight| flight.chunks.contains(&number)) {
            Some(flight) => Reader { warp: flight.warp, line: flight.line, flying: true },
            None => {
                let warp = if chunk.warp == MANY { 0 } else { chunk.warp };
                Reader { warp, line: chunk.line, flying: false }
            }
        };
        Some((number * CHUNK, reader))
    }
}
