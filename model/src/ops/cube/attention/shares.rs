//! Gradients of keys and values, with the query heads of a group divided among several cubes.
//!
//! The kernel of keys has one cube per tile of keys and key head: too few to keep all multiprocessors busy if many
//! query heads share a key head. Then a group of query heads is divided into *shares*, each with its own cubes, which
//! write gradients in `f32`. [`sum_shares_kernel`] adds a group's shares in the order of the heads. The number of
//! shares depends only on the shape and the device, so the same input gives the same bits.
//!
//! Shares take `8 · batch · keys · kv_heads · shares · head_dim` bytes until they are summed.

use burn::tensor::DType;
use burn_cubecl::tensor::CubeTensor;
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::super::{allocate, cubes_for};
use crate::ops::attention::AttentionShape;

/// Concurrent cubes of the kernel of keys per multiprocessor: two of 128 units fit, with 255 registers per unit.
const CUBES_PER_MULTIPROCESSOR: usize = 2;
const MULTIPROCESSORS: usize = 64;
pub(super) const VECTOR: usize = 4;

/// Returns the number of shares of a key head's query heads: the fewest that keep the device busy, or one per query
/// head. A sequence has `keys` keys, and a cube of the kernel of keys has `rows` rows.
///
/// The tiles of a head have on average half the work of the heaviest tile. The device stays busy if all tiles
/// together have at least the work of one heaviest tile per concurrent cube. Windows need no more cubes.
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
    // In units of half the heaviest tile.
    let work = batch * kv_heads * (tiles + 1);
    let group = heads / kv_heads;
    (1..group).find(|shares| group.is_multiple_of(*shares) && work * shares >= 2 * places).unwrap_or(group)
}

pub(super) fn allocate_shares(like: &CubeTensor, shape: AttentionShape, shares: usize) -> [CubeTensor; 2] {
    let sizes = [shape.batch, shape.keys, shape.kv_heads * shares, shape.head_dim];
    [(); 2].map(|()| allocate(like, sizes, DType::F32))
}

pub(super) fn sum_shares(
    [key_shares, val_shares]: [CubeTensor; 2],
    [dk, dv]: [&CubeTensor; 2],
    shape: AttentionShape,
    shares: usize,
    elem: ElemType,
) {
    let width = shape.head_dim / VECTOR;
    let items = shape.batch * shape.keys * shape.kv_heads * width;
    // SAFETY: units past the end of `dk` do nothing; `dv` has its length, and the shares `shares` times that.
    unsafe {
        launch! {
            sum_shares_kernel, cubes_for(&dk.client, items);
            key_shares / VECTOR, val_shares / VECTOR, dk / VECTOR, dv / VECTOR;
            shares as u32, width, elem, VECTOR
        }
    }
}

/// Sums each `shares` adjacent rows of `width` vectors, in order, of two tensors.
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
