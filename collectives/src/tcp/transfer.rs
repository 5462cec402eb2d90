//! How data moves between processes.
//!
//! There are two ways, with the same result bit for bit. *Direct*: every rank sends every other rank what
//! that rank needs. Each byte crosses one connection, and every rank computes its own sums. *Ring*: data
//! passes from rank to rank in order, so that each byte crosses the network between two machines once,
//! however many ranks they have (Patarasuk and Yuan, 2009). A sum starts at rank 0 and is complete at the
//! last rank, which sends each rank its chunk, so that additions are in the order of the ranks.

use super::wire::{Stop, Wire};
use crate::buffer::Buffer;
use crate::dtype::DType;
use crate::reduce::{chunk_range, sum_bytes};
use std::cmp::Ordering;
use std::ops::Range;

/// Bytes received from one rank before they are summed. Those of four ranks fill half of a second-level
/// cache.
const BLOCK: usize = 256 << 10;

/// Up to this many bytes in all, an all-reduce sends every buffer to every rank, which takes one exchange
/// instead of two.
const SMALL: usize = 64 << 10;

/// One operation on the connections of one group.
pub(super) struct Transfer<'a> {
    pub(super) wire: &'a mut Wire,
    pub(super) rank: usize,
    /// Whether large transfers go around the ring.
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

    /// Fills chunk `r` of `output` with the `input` of rank `r`; `slots` are the byte ranges of the chunks.
    pub(super) fn all_gather(
        &mut self,
        input: &[u8],
        output: &mut [u8],
        slots: &[Range<usize>],
    ) -> Result<(), Stop> {
        if self.ring && self.world_size() > 2 {
            output[slots[self.rank].clone()].copy_from_slice(input);
            return self.all_gather_ring(output, slots);
        }
        self.wire.exchange(true);
        let mut copied = false;
        loop {
            let mut done = true;
            for peer in self.peers() {
                let slot = &mut output[slots[peer].clone()];
                let expected = slot.len();
                done &= self.wire.send(peer, input)? == Some(input.len());
                done &= self.wire.receive(peer, slot)? == Some(expected);
            }
            if !copied {
                // After the first sends, so that the other ranks receive meanwhile.
                output[slots[self.rank].clone()].copy_from_slice(input);
                copied = true;
            }
            if done {
                return self.finish_peer_reads();
            }
            self.wire.wait()?;
        }
    }

    /// Ends an exchange in which peers may have read each other's memory.
    fn finish_peer_reads(&mut self) -> Result<(), Stop> {
        loop {
            let mut finished = true;
            for peer in self.peers() {
                finished &= self.wire.finish_peer_reads(peer)?;
            }
            if finished {
                return Ok(());
            }
            self.wire.wait()?;
        }
    }

    /// Passes every chunk on to the next rank while it arrives.
    fn all_gather_ring(&mut self, output: &mut [u8], slots: &[Range<usize>]) -> Result<(), Stop> {
        let world_size = self.world_size();
        let (next, previous) = self.ring_neighbours();
        // In step `s`, a rank sends the chunk that it received in the step before; in step 0 its own.
        let slot = |step: usize| slots[(self.rank + world_size - step) % world_size].clone();
        let (mut sending, mut receiving) = (0, 1);
        let mut received = 0;
        loop {
            while receiving < world_size {
                let target = slot(receiving);
                let expected = target.len();
                let Some(count) = self.wire.receive(previous, &mut output[target])? else { break };
                received = count;
                if count < expected {
                    break;
                }
                receiving += 1;
                received = 0;
                self.wire.next_block(previous);
            }
            while sending < world_size - 1 {
                let whole = slot(sending);
                let size = whole.len();
                let available = match sending.cmp(&receiving) {
                    Ordering::Less => size,
                    Ordering::Equal => received,
                    Ordering::Greater => break,
                };
                let part = whole.start..whole.start + available;
                let sent = self.wire.send(next, &output[part])?;
                if sent != Some(size) {
                    break;
                }
                sending += 1;
                self.wire.restart_send(next);
            }
            if receiving == world_size && sending == world_size - 1 {
                return Ok(());
            }
            self.wire.wait()?;
        }
    }

    /// Fills `output` with this rank's chunk of the sum of all inputs.
    pub(super) fn reduce_scatter(
        &mut self,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        slots: &[Range<usize>],
    ) -> Result<(), Stop> {
        // Partial sums of half types would have to travel as f32, which gains nothing over direct transfers.
        let is_wide = matches!(dtype, DType::F32 | DType::F64);
        let ring = self.ring && self.world_size() > 2 && is_wide;
        let bytes = if ring { BLOCK } else { self.world_size() * BLOCK };
        let mut staging = self.wire.take_staging(bytes);
        let outcome = match ring {
            true => self.reduce_ring(dtype, input, output, slots, staging.as_bytes_mut()),
            false => self.reduce_direct(dtype, input, output, slots, staging.as_bytes_mut()),
        };
        self.wire.return_staging(staging);
        outcome
    }

    fn reduce_direct(
        &mut self,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        slots: &[Range<usize>],
        staging: &mut [u8],
    ) -> Result<(), Stop> {
        self.wire.exchange(true);
        let own = &input[slots[self.rank].clone()];
        let whole = output.len();
        let mut blocks = Blocks::of(whole);
        let mut current = blocks.next();
        loop {
            let mut done = true;
            for peer in self.peers() {
                let part = &input[slots[peer].clone()];
                done &= self.wire.send(peer, part)? == Some(part.len());
            }
            while let Some(block) = current.clone() {
                let mut complete = true;
                for peer in self.peers() {
                    let place = &mut staging[peer * BLOCK..][..block.len()];
                    let got = self.wire.receive_block(peer, place, block.start, whole)?;
                    complete &= got == Some(block.len());
                }
                if !complete {
                    done = false;
                    break;
                }
                let addend = |rank: usize| match rank {
                    rank if rank == self.rank => &own[block.clone()],
                    peer => &staging[peer * BLOCK..][..block.len()],
                };
                let addends: Vec<&[u8]> = (0..self.world_size()).map(addend).collect();
                sum(dtype, &mut output[block], &addends);
                for peer in self.peers() {
                    self.wire.next_block(peer);
                }
                current = blocks.next();
            }
            if done {
                return self.finish_peer_reads();
            }
            self.wire.wait()?;
        }
    }

    /// Rank 0 sends its input to the next rank, every rank adds its own, and the last one sends each rank its
    /// chunk.
    fn reduce_ring(
        &mut self,
        dtype: DType,
        input: &[u8],
        output: &mut [u8],
        slots: &[Range<usize>],
        staging: &mut [u8],
    ) -> Result<(), Stop> {
        let last = self.world_size() - 1;
        let (next, previous) = self.ring_neighbours();
        let (is_first, is_last) = (self.rank == 0, self.rank == last);
        let blocks_of = |slot: usize| Blocks::of(slots[slot].len()).map(move |block| (slot, block));
        let mut blocks = (0..slots.len()).flat_map(blocks_of);
        let mut current = blocks.next();
        let mut summed = is_first;
        loop {
            // The chunk from the last rank arrives at the same time as partial sums from the previous rank.
            let whole = output.len();
            let delivered = is_last || self.wire.receive(last, output)? == Some(whole);
            while let Some((slot, block)) = current.clone() {
                let size = block.len();
                let offset = slots[slot].start;
                let own = &input[offset + block.start..offset + block.end];
                if !summed {
                    let partial = &mut staging[..size];
                    if self.wire.receive(previous, partial)? != Some(size) {
                        break;
                    }
                    self.wire.next_block(previous);
                    let place = &mut staging[..size];
                    add(dtype, place, own);
                    summed = true;
                }
                let sum = if is_first { own } else { &staging[..size] };
                if is_last && slot == last {
                    output[block.clone()].copy_from_slice(sum);
                } else {
                    let target = if is_last { slot } else { next };
                    if self.wire.send(target, sum)? != Some(size) {
                        break;
                    }
                    self.wire.restart_send(target);
                }
                summed = is_first;
                current = blocks.next();
            }
            if delivered && current.is_none() {
                return Ok(());
            }
            self.wire.wait()?;
        }
    }

    /// Overwrites `buffer` with the sum over all ranks.
    pub(super) fn all_reduce(&mut self, buffer: &mut Buffer) -> Result<(), Stop> {
        let (dtype, len) = (buffer.dtype(), buffer.len());
        let (bytes, world_size) = (buffer.size_in_bytes(), self.world_size());
        if world_size == 1 {
            return Ok(());
        }
        if bytes * world_size <= SMALL {
            let mut staging = self.wire.take_staging(SMALL);
            let slots: Vec<_> = (0..world_size).map(|r| r * bytes..(r + 1) * bytes).collect();
            let target = &mut staging.as_bytes_mut()[..bytes * world_size];
            let ring = std::mem::replace(&mut self.ring, false);
            let outcome = self.all_gather(buffer.as_bytes(), target, &slots);
            self.ring = ring;
            let all = staging.as_bytes();
            let addends: Vec<&[u8]> = slots.into_iter().map(|slot| &all[slot]).collect();
            sum(dtype, buffer.as_bytes_mut(), &addends);
            self.wire.return_staging(staging);
            return outcome;
        }
        let size = dtype.size();
        let slot = |rank| chunk_range(len, world_size, rank);
        let slots: Vec<_> = (0..world_size).map(slot).map(|s| s.start * size..s.end * size).collect();
        let mut part = Buffer::zeros(dtype, slots[self.rank].len() / size);
        self.reduce_scatter(dtype, buffer.as_bytes(), part.as_bytes_mut(), &slots)?;
        self.wire.exchange(false);
        self.all_gather(part.as_bytes(), buffer.as_bytes_mut(), &slots)
    }

    /// Returns once every rank has entered the operation.
    pub(super) fn meet(&mut self) -> Result<(), Stop> {
        loop {
            let mut all = true;
            for peer in self.peers() {
                all &= self.wire.send(peer, &[])?.is_some();
                all &= self.wire.receive(peer, &mut [])?.is_some();
            }
            if all {
                return Ok(());
            }
            self.wire.wait()?;
        }
    }

    /// Overwrites `buffer` with the one of `root`, down a binomial tree, after all ranks have
    /// agreed on the operation.
    pub(super) fn broadcast(&mut self, buffer: &mut [u8], root: usize) -> Result<(), Stop> {
        self.meet()?;
        let (parent, children) = self.tree(root);
        let mut received = if parent.is_some() { 0 } else { buffer.len() };
        loop {
            if let Some(parent) = parent {
                received = self.wire.receive(parent, buffer)?.unwrap_or(0);
            }
            let mut done = received == buffer.len();
            for child in &children {
                done &= self.wire.send(*child, &buffer[..received])? == Some(buffer.len());
            }
            if done {
                return Ok(());
            }
            self.wire.wait()?;
        }
    }

    /// This rank's parent and children in the binomial tree below `root`. Ranks are numbered from the root;
    /// the parent of a number is that number without its lowest bit.
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

    /// The ranks that this one sends to and receives from on the ring.
    fn ring_neighbours(&self) -> (usize, usize) {
        let world_size = self.world_size();
        ((self.rank + 1) % world_size, (self.rank + world_size - 1) % world_size)
    }
}

/// Byte ranges that cover a slot; one empty range for an empty slot, so that its header is read.
struct Blocks {
    next: usize,
    len: usize,
    any: bool,
}

impl Blocks {
    fn of(len: usize) -> Blocks {
        Blocks { next: 0, len, any: false }
    }
}

impl Iterator for Blocks {
    type Item = Range<usize>;

    fn next(&mut self) -> Option<Range<usize>> {
        if self.any && self.next >= self.len {
            return None;
        }
        let start = self.next;
        self.next = (start + BLOCK).min(self.len);
        self.any = true;
        Some(start..self.next)
    }
}

fn sum(dtype: DType, output: &mut [u8], addends: &[&[u8]]) {
    // Calls with a type that has no sum are refused before they get here.
    let _ = sum_bytes(dtype, output, addends);
}

/// `sums += values`.
fn add(dtype: DType, sums: &mut [u8], values: &[u8]) {
    match dtype {
        DType::F64 => add_as::<f64>(sums, values),
        _ => add_as::<f32>(sums, values),
    }
}

fn add_as<T: bytemuck::Pod + std::ops::AddAssign>(sums: &mut [u8], values: &[u8]) {
    let values: &[T] = bytemuck::cast_slice(values);
    for (sum, value) in bytemuck::cast_slice_mut::<u8, T>(sums).iter_mut().zip(values) {
        *sum += *value;
    }
}
