//! Reads of shared memory by `wgmma`, which use a different path than those of other instructions (the async
//! proxy).
//!
//! A write is visible to a product if its thread has executed `fence.proxy.async` after it, and the block has
//! met at a barrier since. Memory that a product reads must not be written until each warp has waited for it.
//! The wait orders the read before later writes of its own warp, and a barrier before those of the others.

use crate::wgmma::descriptor::CHUNK;

/// Represents several warps.
const MANY: u32 = u32::MAX;

/// The products that read a chunk of shared memory.
#[derive(Debug, Clone, Copy, Default)]
struct Chunk {
    /// Number of products, over all warps, that have not been waited for.
    flying: u32,
    /// The time of the last wait for a product that had read the chunk, its warp, and the product's line.
    time: u32,
    warp: u32,
    line: u32,
}

/// A product that its warp has not waited for.
#[derive(Debug)]
struct Flight {
    warp: u32,
    group: u32,
    line: u32,
    chunks: Vec<u32>,
}

/// A read that conflicts with a write: its warp and its line.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Reader {
    pub warp: u32,
    pub line: u32,
    /// Set if the product has not been waited for.
    pub flying: bool,
}

/// The reads of a block.
#[derive(Debug)]
pub struct Reads {
    chunks: Vec<Chunk>,
    flights: Vec<Flight>,
    /// Chunks read by the product that is being executed.
    current: Vec<u32>,
    /// For each thread, the time of its last fence, and of its last fence before a barrier.
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

    /// Returns `true` if products see a write by `thread` at `time`.
    pub fn sees(&self, thread: u32, time: u32) -> bool {
        self.met[thread as usize] > time
    }

    /// Records that the current product reads 16 bytes.
    pub fn read(&mut self, address: u32) {
        let chunk = address / CHUNK;
        self.chunks[chunk as usize].flying += 1;
        self.current.push(chunk);
    }

    /// Assigns the executed product to this warp and group.
    pub fn issued(&mut self, warp: u32, group: u32, line: u32) {
        let chunks = std::mem::take(&mut self.current);
        self.flights.push(Flight { warp, group, line, chunks });
    }

    /// Records that a warp has waited for its first `groups` groups at `time`; the last barrier was at
    /// `barrier`.
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
            // Reuses its memory.
            *current = std::mem::take(&mut flight.chunks);
            current.clear();
            false
        });
    }

    /// Returns the read that conflicts with a write by a thread of `warp`, and its address.
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
