//! Collective operations between processes. Two algorithms give bitwise equal results. *Direct*: every rank sends every
//! other rank the data that it needs. *Ring*: data passes from rank to rank in order, so that each byte crosses the
//! network between two machines once (Patarasuk and Yuan, 2009). A sum starts at rank 0, and the last rank sends each
//! rank its chunk.

use super::wire::{Stop, Wire};
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::reduce::{self, chunk_range, sum_bytes};
use std::cmp::Ordering;
use std::ops::Range;

/// Bytes received from one rank before they are summed. Four ranks' blocks fill half of a second-level cache.
const BLOCK: usize = 256 << 10;

/// Maximum total bytes of an all-reduce that sends every buffer to every rank, in one exchange instead of two.
const SMALL: usize = 64 << 10;

pub(super) struct Transfer<'a> {
    pub(super) wire: &'a mut Wire,
    pub(super) rank: usize,
    pub(super) ring: bool,
}

impl Transfer<'_> {
    fn world_size(&self) -> usize {
        self.wire.world_size()
    }

    fn peers(&self) -> impl Iterator<Item = usize> + use<> {
        let rank = self.rank;
        (0..self.world_size()).filter(move |peer| *peer != rank)
    }

    /// Repeats `step` until it returns true. Between calls, waits until bytes can be sent or received.
    fn repeat(&mut self, mut step: impl FnMut(&mut Self) -> Result<bool, Stop>) -> Result<(), Stop> {
        while !step(self)? {
            self.wire.wait()?;
        }
        Ok(())
    }

    /// Fills chunk `r` of `output` with the `input` of rank `r`; `chunks` are byte ranges.
    pub(super) fn all_gather(
        &mut self,
        input: &[u8],
        output: &mut [u8],
        chunks: &[Range<usize>],
    ) -> Result<(), Stop> {
        if self.ring && self.world_size() > 2 {
            output[chunks[self.rank].clone()].copy_from_slice(input);
            return self.all_gather_ring(output, chunks);
        }
        self.wire.exchange(true);
        let mut copied = false;
        self.repeat(|this| {
            let mut done = true;
            for peer in this.peers() {
                let chunk = &mut output[chunks[peer].clone()];
                let expected = chunk.len();
                done &= this.wire.send(peer, input)? == Some(input.len());
                done &= this.wire.receive(peer, chunk)? == Some(expected);
            }
            if !copied {
                // Copied after the first sends, so that the other ranks can already receive.
                output[chunks[this.rank].clone()].copy_from_slice(input);
                copied = true;
            }
            Ok(done)
        })?;
        self.finish_peer_reads()
    }

    fn finish_peer_reads(&mut self) -> Result<(), Stop> {
        self.repeat(|this| {
            let mut finished = true;
            for peer in this.peers() {
                finished &= this.wire.finish_peer_reads(peer)?;
            }
            Ok(finished)
        })
    }

    fn all_gather_ring(&mut self, output: &mut [u8], chunks: &[Range<usize>]) -> Result<(), Stop> {
        let (world_size, rank) = (self.world_size(), self.rank);
        let (next, previous) = self.ring_neighbours();
        // In step `s`, a rank sends the chunk that it received in step `s - 1`; in step 0, its own.
        let chunk = |step: usize| chunks[(rank + world_size - step) % world_size].clone();
        let (mut sending, mut receiving) = (0, 1);
        let mut received = 0;
        self.repeat(|this| {
            while receiving < world_size {
                let target = chunk(receiving);
                let expected = target.len();
                let Some(count) = this.wire.receive(previous, &mut output[target])? else { break };
                received = count;
                if count < expected {
                    break;
                }
                receiving += 1;
                received = 0;
                this.wire.next_block(previous);
            }
            while sending < world_size - 1 {
                let whole = chunk(sending);
                let available = match sending.cmp(&receiving) {
                    Ordering::Less => whole.len(),
                    Ordering::Equal => received,
                    Ordering::Greater => break,
                };
                let sent = this.wire.send(next, &output[whole.clone()][..available])?;
                if sent != Some(whole.len()) {
                    break;
                }
                sending += 1;
                this.wire.restart_send(next);
            }
            Ok(receiving == world_size && sending == world_size - 1)
        })
    }

    /// Fills `output` with this rank's chunk of the sum of all inputs.
    pub(super) fn reduce_scatter(
        &mut self,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        chunks: &[Range<usize>],
    ) -> Result<(), Stop> {
        // Partial sums of half types would have to be sent as f32, which gains nothing over direct transfers.
        let is_wide = matches!(dtype, DType::F32 | DType::F64);
        let ring = self.ring && self.world_size() > 2 && is_wide;
        let bytes = if ring { BLOCK } else { self.world_size() * BLOCK };
        let mut staging = self.wire.take_staging(bytes);
        let reduce = if ring { Transfer::reduce_ring } else { Transfer::reduce_direct };
        let outcome = reduce(self, dtype, input, output, chunks, staging.as_bytes_mut());
        self.wire.return_staging(staging);
        outcome
    }

    fn reduce_direct(
        &mut self,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        chunks: &[Range<usize>],
        staging: &mut [u8],
    ) -> Result<(), Stop> {
        self.wire.exchange(true);
        let own = &input[chunks[self.rank].clone()];
        let whole = output.len();
        let mut blocks = blocks(whole).peekable();
        self.repeat(|this| {
            let mut done = true;
            for peer in this.peers() {
                let part = &input[chunks[peer].clone()];
                done &= this.wire.send(peer, part)? == Some(part.len());
            }
            while let Some(block) = blocks.peek().cloned() {
                let mut complete = true;
                for peer in this.peers() {
                    let place = &mut staging[peer * BLOCK..][..block.len()];
                    let got = this.wire.receive_block(peer, place, block.start, whole)?;
                    complete &= got == Some(block.len());
                }
                if !complete {
                    return Ok(false);
                }
                let addend = |rank: usize| match rank {
                    rank if rank == this.rank => &own[block.clone()],
                    peer => &staging[peer * BLOCK..][..block.len()],
                };
                let addends: Vec<&[u8]> = (0..this.world_size()).map(addend).collect();
                sum(dtype, &mut output[block.clone()], &addends);
                for peer in this.peers() {
                    this.wire.next_block(peer);
                }
                blocks.next();
            }
            Ok(done)
        })?;
        self.finish_peer_reads()
    }

    fn reduce_ring(
        &mut self,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        chunks: &[Range<usize>],
        staging: &mut [u8],
    ) -> Result<(), Stop> {
        let last = self.world_size() - 1;
        let (next, previous) = self.ring_neighbours();
        let (is_first, is_last) = (self.rank == 0, self.rank == last);
        let blocks_of = |chunk: usize| blocks(chunks[chunk].len()).map(move |block| (chunk, block));
        let mut blocks = (0..chunks.len()).flat_map(blocks_of).peekable();
        let mut summed = is_first;
        self.repeat(|this| {
            // The last rank's chunk and the previous rank's partial sums arrive at the same time.
            let whole = output.len();
            let delivered = is_last || this.wire.receive(last, output)? == Some(whole);
            while let Some((chunk, block)) = blocks.peek().cloned() {
                let size = block.len();
                let own = &input[chunks[chunk].clone()][block.clone()];
                let partial = &mut staging[..size];
                if !summed {
                    if this.wire.receive(previous, partial)? != Some(size) {
                        break;
                    }
                    this.wire.next_block(previous);
                    add(dtype, partial, own);
                    summed = true;
                }
                let sum = if is_first { own } else { &*partial };
                if is_last && chunk == last {
                    output[block].copy_from_slice(sum);
                } else {
                    let target = if is_last { chunk } else { next };
                    if this.wire.send(target, sum)? != Some(size) {
                        break;
                    }
                    this.wire.restart_send(target);
                }
                summed = is_first;
                blocks.next();
            }
            Ok(delivered && blocks.peek().is_none())
        })
    }

    pub(super) fn all_reduce(&mut self, buffer: &mut Buffer) -> Result<(), Stop> {
        let (dtype, len) = (buffer.dtype(), buffer.len());
        let (bytes, world_size) = (buffer.size_in_bytes(), self.world_size());
        if world_size == 1 {
            return Ok(());
        }
        if bytes * world_size <= SMALL {
            let mut staging = self.wire.take_staging(SMALL);
            let chunks = equal_chunks(bytes, world_size);
            let target = &mut staging.as_bytes_mut()[..bytes * world_size];
            let mut direct = Transfer { wire: &mut *self.wire, rank: self.rank, ring: false };
            let outcome = direct.all_gather(buffer.as_bytes(), target, &chunks);
            let all = staging.as_bytes();
            let addends: Vec<&[u8]> = chunks.into_iter().map(|chunk| &all[chunk]).collect();
            sum(dtype, buffer.as_bytes_mut(), &addends);
            self.wire.return_staging(staging);
            return outcome;
        }
        let size = dtype.size();
        let chunk = |rank| chunk_range(len, world_size, rank);
        let chunks: Vec<_> = (0..world_size).map(chunk).map(|c| c.start * size..c.end * size).collect();
        let mut part = Buffer::zeros(dtype, chunks[self.rank].len() / size);
        self.reduce_scatter(dtype, buffer.as_bytes(), part.as_bytes_mut(), &chunks)?;
        self.wire.exchange(false);
        self.all_gather(part.as_bytes(), buffer.as_bytes_mut(), &chunks)
    }

    pub(super) fn meet(&mut self) -> Result<(), Stop> {
        self.repeat(|this| {
            let mut all = true;
            for peer in this.peers() {
                all &= this.wire.send(peer, &[])?.is_some();
                all &= this.wire.receive(peer, &mut [])?.is_some();
            }
            Ok(all)
        })
    }

    /// Overwrites `buffer` with the root's buffer, down a binomial tree, once all ranks have agreed.
    pub(super) fn broadcast(&mut self, buffer: &mut [u8], root: usize) -> Result<(), Stop> {
        self.meet()?;
        let (parent, children) = self.tree(root);
        let mut received = if parent.is_some() { 0 } else { buffer.len() };
        self.repeat(|this| {
            if let Some(parent) = parent {
                received = this.wire.receive(parent, buffer)?.unwrap_or(0);
            }
            let mut done = received == buffer.len();
            for child in &children {
                done &= this.wire.send(*child, &buffer[..received])? == Some(buffer.len());
            }
            Ok(done)
        })
    }

    /// Returns this rank's parent and children in the binomial tree below `root`. Numbered from the root, a parent's
    /// number is the child's without its lowest set bit.
    fn tree(&self, root: usize) -> (Option<usize>, Vec<usize>) {
        let world_size = self.world_size();
        let place = (self.rank + world_size - root) % world_size;
        let rank_at = |place: usize| (place + root) % world_size;
        let lowest_bit = match place {
            0 => world_size.next_power_of_two(),
            place => place & place.wrapping_neg(),
        };
        let parent = (place != 0).then(|| rank_at(place - lowest_bit));
        let children = (0..usize::BITS)
            .map(|bit| 1 << bit)
            .take_while(|step| *step < lowest_bit)
            .filter(|step| place + step < world_size)
            .map(|step| rank_at(place + step))
            .collect();
        (parent, children)
    }

    fn ring_neighbours(&self) -> (usize, usize) {
        let world_size = self.world_size();
        ((self.rank + 1) % world_size, (self.rank + world_size - 1) % world_size)
    }
}

pub(super) fn equal_chunks(size: usize, world_size: usize) -> Vec<Range<usize>> {
    (0..world_size).map(|rank| rank * size..(rank + 1) * size).collect()
}

/// Divides a chunk into byte ranges of [`BLOCK`]. An empty chunk has one empty range, whose header must be read.
fn blocks(len: usize) -> impl Iterator<Item = Range<usize>> {
    (0..len.max(1)).step_by(BLOCK).map(move |start| start..(start + BLOCK).min(len))
}

fn sum(dtype: DType, output: &mut [u8], addends: &[&[u8]]) {
    let _ = sum_bytes(dtype, output, addends);
}

fn add(dtype: DType, sums: &mut [u8], values: &[u8]) {
    match dtype {
        DType::F64 => reduce::add::<f64>(bytemuck::cast_slice_mut(sums), bytemuck::cast_slice(values)),
        _ => reduce::add::<f32>(bytemuck::cast_slice_mut(sums), bytemuck::cast_slice(values)),
    }
}
