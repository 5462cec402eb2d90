//! The gradients of keys and values, with the query heads of a group divided among several cubes.
//!
//! The kernel of keys has one cube per tile of keys and key head. There are few of these if many query heads share a
//! key head: 128 for a sequence of 2048 rows and 4 key heads in tiles of 64 rows. If this leaves multiprocessors
//! idle, a group of query heads is divided into *shares*, each with its own cubes. They write the gradients of their
//! query heads in `f32`, and [`sum_shares_kernel`] adds the shares of a group in the order of the heads. The number
//! of shares depends only on the shape and the device, so that the same input gives the same bits.
//!
//! # Memory
//!
//! The shares of both gradients take `8 · batch · keys · kv_heads · shares · head_dim` bytes until they are summed.
//! There are only as many shares as keep the device busy, and no shares are written if one cube per tile of keys and
//! key head is enough. So the memory does not grow with the batch: if every number of shares is a divisor of the
//! group, it is about `32 · multiprocessors · tile rows · head_dim` bytes. It is larger if the number of shares is
//! rounded up to the next divisor, and smaller for groups too small for that many shares. On 132 multiprocessors,
//! sequences of 2048 rows with 4 key heads and 32 query heads of 64 values in tiles of 64 rows take 16.8 MB for 1 or
//! 2 sequences (4 and 2 shares), and nothing for 4.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::{allocate, cubes_for};
use crate::ops::attention::AttentionShape;

/// Number of cubes of the kernel of keys that a multiprocessor runs concurrently: with 128 units of 255 registers
/// each, two fit into its 65536 registers.
const CUBES_PER_MULTIPROCESSOR: usize = 2;
/// Number of multiprocessors that is assumed for devices that do not report it.
const MULTIPROCESSORS: usize = 64;
/// Number of values that a unit of [`sum_shares_kernel`] reads at once.
pub(super) const VECTOR: usize = 4;

/// Returns the number of shares into which the query heads of a key head are divided: the fewest that keep the device
/// busy, or one per query head. `keys` is the number of keys per sequence, `rows` that of rows per cube of the kernel
/// of keys.
///
/// Without a window, the tiles of a head have on average about half the work of the heaviest one. The device can be
/// busy until the end if all tiles together have at least the work of one heaviest tile for each concurrent cube. A
/// window is ignored here, since its tiles have similar work and need no more cubes.
pub fn shares_of(
    batch: usize,
    keys: usize,
    [heads, kv_heads]: [usize; 2],
    rows: usize,
    multiprocessors: Option<u32>,
) -> usize {
    let multiprocessors = multiprocessors.map_or(MULTIPROCESSORS, |count| count as usize);
    let places = CUBES_PER_MULTIPROCESSOR * multiprocessors;
    let tiles = keys.div_ceil(rows);
    // Work in units of half the heaviest tile.
    let work = batch * kv_heads * (tiles + 1);
    let group = heads / kv_heads;
    (1..group).find(|shares| group.is_multiple_of(*shares) && work * shares >= 2 * places).unwrap_or(group)
}

/// Allocates the shares of the gradients of keys and values.
pub(super) fn allocate_shares(like: &CubeTensor, shape: AttentionShape, shares: usize) -> [CubeTensor; 2] {
    let sizes = [shape.batch, shape.keys, shape.kv_heads * shares, shape.head_dim];
    [(); 2].map(|()| allocate(like, sizes, DType::F32))
}

/// Adds the shares of the gradients of keys and values.
pub(super) fn sum_shares(
    [key_shares, val_shares]: [CubeTensor; 2],
    [dk, dv]: [&CubeTensor; 2],
    shape: AttentionShape,
    shares: usize,
    elem: ElemType,
) {
    let width = shape.head_dim / VECTOR;
    let items = shape.batch * shape.keys * shape.kv_heads * width;
    // SAFETY: units past the end of `dk` do nothing; `dv` is as long, and the shares are `shares` times as
    // long.
    unsafe {
        launch! {
            sum_shares_kernel, cubes_for(&dk.client, items);
            key_shares / VECTOR, val_shares / VECTOR, dk / VECTOR, dv / VECTOR;
            shares as u32, width, elem, VECTOR
        }
    }
}

/// Sums each `shares` adjacent rows of `width` vectors, in the order of the rows, of two tensors.
#[cube(launch_unchecked)]
pub(super) fn sum_shares_kernel<E: Float, N: Size>(
    key_shares: &[Vector<f32, N>],
    val_shares: &[Vector<f32, N>],
    dk: &mut [Vector<E, N>],
    dv: &mut [Vector<E, N>],
    shares: u32,
    #[comptime] width: usize,
    #[define(E)] _elem: ElemType,
    #[define(N)] _vector: usize,
) {
    let at = ABSOLUTE_POS;
    if at < dk.len() {
        let first = at / width * shares as usize * width + at % width;
        let mut key = key_shares[first];
        let mut val = val_shares[first];
        for share in 1..shares {
            let from = first + share as usize * width;
            key += key_shares[from];
            val += val_shares[from];
        }
        dk[at] = Vector::cast_from(key);
        dv[at] = Vector::cast_from(val);
    }
}
