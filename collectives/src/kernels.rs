//! Kernels that copy and add in the memory of one GPU, queued on the current
//! [`StreamId`](cubecl_environment::stream::StreamId). Buffers are divided into blocks, because GPUs limit the size of
//! a binding, and so that positions within a block fit in 32 bits.

#![allow(unsafe_code)]

use std::ops::Range;

use cubecl::prelude::*;
use cubecl::server::Handle;

/// Bytes of a word. Copies move words, because not all GPUs can address bytes.
pub(crate) const WORD: usize = size_of::<u32>();

/// Bytes of a block. A kernel binds one block plus a few bytes; WebGPU guarantees bindings of 128 MiB.
const BLOCK: usize = 64 << 20;

const ALIGNMENT: usize = 256;

const UNITS: u32 = 256;

/// Copies `bytes` of `from` to byte `at` of `to`. The other bytes of `to` stay unchanged.
pub(crate) fn copy(client: &Client, from: &Handle, bytes: Range<usize>, to: &Handle, at: usize) {
    for start in bytes.clone().step_by(BLOCK) {
        let length = (bytes.end - start).min(BLOCK);
        let target = at + (start - bytes.start);
        let (from, from_start) = window(from, start..start + length);
        let (to, to_start) = window(to, target..target + length);
        let whole = [from_start, to_start, length].iter().all(|bytes| bytes % WORD == 0);
        let words = (to_start % WORD + length).div_ceil(WORD);
        let (count, units) = grid(client, words);
        // SAFETY: the windows contain the bytes, and no unit reads or writes beyond them.
        unsafe {
            copy_bytes::launch_unchecked(
                client,
                count,
                units,
                argument(from, WORD),
                argument(to, WORD),
                from_start as u32,
                to_start as u32,
                length as u32,
                whole,
            );
        }
    }
}

/// Sums `len` elements of each of `inputs`, from element `start` on, into the elements `F` of `output`, in the order of
/// `inputs`. Adds in type `A`, and rounds once.
pub(crate) fn sum<A: Float + CubeElement, F: Float + CubeElement>(
    client: &Client,
    inputs: &[&Handle],
    start: usize,
    output: &Handle,
    len: usize,
) {
    let (size, wide) = (size_of::<F>(), size_of::<A>());
    let block = BLOCK / wide.max(size);
    for first in (0..len).step_by(block) {
        let count = (len - first).min(block);
        let (target, _) = window(output, first * size..(first + count) * size);
        // If the output type is wide enough, `output` itself holds the running sum.
        let total = if wide == size { target.clone() } else { client.empty(count * wide) };
        let (cubes, units) = grid(client, count);
        for (index, input) in inputs.iter().enumerate() {
            let begin = start + first;
            let (addend, offset) = window(input, begin * size..(begin + count) * size);
            // SAFETY: both windows contain the elements, and no unit reads or writes beyond them.
            unsafe {
                add::launch_unchecked::<A, F>(
                    client,
                    cubes.clone(),
                    units,
                    argument(addend, size),
                    BufferArg::from_raw_parts(total.clone(), count),
                    (offset / size) as u32,
                    count as u32,
                    index == 0,
                );
            }
        }
        if wide != size {
            // SAFETY: both hold `count` elements, and no unit reads or writes beyond them.
            unsafe {
                round::launch_unchecked::<A, F>(
                    client,
                    cubes,
                    units,
                    BufferArg::from_raw_parts(total, count),
                    BufferArg::from_raw_parts(target, count),
                    count as u32,
                );
            }
        }
    }
}

/// Returns an aligned part of a buffer that contains `bytes`, and the offset of `bytes` in it.
fn window(handle: &Handle, bytes: Range<usize>) -> (Handle, usize) {
    let used = handle.size_in_used() as usize;
    let start = bytes.start / ALIGNMENT * ALIGNMENT;
    let end = bytes.end.next_multiple_of(WORD).min(used);
    let part = handle.clone().offset_start(start as u64).offset_end((used - end) as u64);
    (part, bytes.start - start)
}

fn argument(handle: Handle, size: usize) -> BufferArg {
    let count = (handle.size_in_used() as usize).div_ceil(size);
    // SAFETY: the memory is allocated in whole words, so the last element exists.
    unsafe { BufferArg::from_raw_parts(handle, count) }
}

fn grid(client: &Client, elements: usize) -> (CubeCount, CubeDim) {
    let units = CubeDim::new_1d(UNITS);
    (cubecl::calculate_cube_count_elemwise(client, elements, units), units)
}

/// Copies bytes; each unit fills one word of `to`. Positions are in bytes; `whole` means that all positions and the
/// length are multiples of a word.
#[cube(launch_unchecked)]
fn copy_bytes(
    from: &[u32],
    to: &mut [u32],
    from_start: u32,
    to_start: u32,
    length: u32,
    #[comptime] whole: bool,
) {
    let unit = ABSOLUTE_POS as u32;
    if comptime!(whole) {
        if unit < length / 4 {
            to[(to_start / 4 + unit) as usize] = from[(from_start / 4 + unit) as usize];
        }
    } else {
        let word = to_start / 4 + unit;
        let (begin, end) = (word * 4, word * 4 + 4);
        let low = begin.max(to_start);
        let high = end.min(to_start + length);
        if low < high {
            // Source position of the word's first byte, plus one word, because it may lie before the start.
            let source = from_start + end - to_start;
            let (index, shift) = (source / 4, 8 * (source % 4));
            let mut value = 0u32;
            if index >= 1 {
                value = from[(index - 1) as usize] >> shift;
            }
            if shift > 0 && (index as usize) < from.len() {
                value |= from[index as usize] << (32 - shift);
            }
            let mask = (0xffff_ffffu32 << (8 * (low - begin))) & (0xffff_ffffu32 >> (8 * (end - high)));
            to[word as usize] = (to[word as usize] & !mask) | (value & mask);
        }
    }
}

/// Adds `addend`, from `start` on, to `sum`. The first addend overwrites `sum`, so that negative zeros keep their sign.
#[cube(launch_unchecked)]
fn add<A: Float, F: Float>(addend: &[F], sum: &mut [A], start: u32, len: u32, #[comptime] first: bool) {
    let unit = ABSOLUTE_POS as u32;
    if unit < len {
        let value = A::cast_from(addend[(start + unit) as usize]);
        if comptime!(first) {
            sum[unit as usize] = value;
        } else {
            sum[unit as usize] += value;
        }
    }
}

#[cube(launch_unchecked)]
fn round<A: Float, F: Float>(from: &[A], to: &mut [F], len: u32) {
    let unit = ABSOLUTE_POS as u32;
    if unit < len {
        to[unit as usize] = F::cast_from(from[unit as usize]);
    }
}
