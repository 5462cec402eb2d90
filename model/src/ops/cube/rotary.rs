//! Rotary position embedding: one unit per vector of planes of a head.

use std::collections::HashMap;
use std::sync::{LazyLock, Mutex, PoisonError};

use burn::tensor::{DType, TensorData};
use burn_backend::ops::FloatTensorOps;
use burn_cubecl::tensor::CubeTensor;
use burn_cubecl::{CubeBackend, CubeDevice};
use cubecl::ir::ElemType;
use cubecl::prelude::*;

use super::{contiguous, cubes_for, elem, empty, len_of, vector_size};
use crate::ops::rotary::{RotaryFrequencies, RotaryOp, Rotation, sizes_of};

impl RotaryOp for CubeBackend {
    fn fused_rotary(x: CubeTensor, rotation: Rotation) -> CubeTensor {
        let [_, seq, heads, head_dim] = sizes_of(&x);
        let x = contiguous(&x);
        let y = empty(&x, x.meta.shape().clone(), x.dtype);
        let half = head_dim / 2;
        let Rotation { frequencies, position_offset, sign, .. } = rotation;
        let table = table(&x, head_dim, frequencies, position_offset + seq);
        let vector = vector_size(&[&x, &table], half);
        // SAFETY: a unit accesses two halves of one head, up to the last head; the table has a row per position.
        unsafe {
            launch! {
                rotate_kernel, cubes_for(&x.client, len_of(&x) / 2 / vector), [x, table], vector;
                x / vector, table / vector, y / vector;
                half / vector, heads, seq, position_offset, sign as f32, elem(&x)
            }
        }
        y
    }
}

type TableKey = (CubeDevice, usize, [u64; 6]);

/// Tables in use. The host computes angles in double precision: `f32` is too imprecise for late positions.
static TABLES: LazyLock<Mutex<HashMap<TableKey, CubeTensor>>> = LazyLock::new(Mutex::default);

/// Returns cosines, then sines, of at least `positions` positions: `[positions, 2, head_dim / 2]`.
fn table(like: &CubeTensor, head_dim: usize, frequencies: RotaryFrequencies, positions: usize) -> CubeTensor {
    let key = (like.device.clone(), head_dim, frequencies.bits());
    // Entries are inserted whole, so the map is valid after a panic.
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    if let Some(table) = tables.get(&key).filter(|table| table.meta.shape()[0] >= positions) {
        return table.clone();
    }
    // Generation requests one more position at a time: doubling keeps the total cost linear.
    let (positions, half) = (positions.next_power_of_two(), head_dim / 2);
    let mut values = vec![0f32; positions * 2 * half];
    for (position, row) in values.chunks_exact_mut(2 * half).enumerate() {
        let (cosines, sines) = row.split_at_mut(half);
        for (j, (cos, sin)) in cosines.iter_mut().zip(sines).enumerate() {
            let (sine, cosine) = frequencies.angle(position, j, head_dim).sin_cos();
            (*cos, *sin) = (cosine as f32, sine as f32);
        }
    }
    let data = TensorData::new(values, [positions, 2, half]).convert_dtype(DType::F32);
    let table = contiguous(&CubeBackend::float_from_data(data, &like.device));
    tables.insert(key, table.clone());
    table
}

#[cube(launch_unchecked, address_type = "dynamic")]
fn rotate_kernel<F: Float, N: Size>(
    x: &[Vector<F, N>],
    table: &[Vector<f32, N>],
    y: &mut [Vector<F, N>],
    half: usize,
    heads: usize,
    seq: usize,
    position_offset: usize,
    sign: f32,
    #[define(F)] _dtype: ElemType,
) {
    let head = ABSOLUTE_POS / half;
    let j = ABSOLUTE_POS % half;
    let first = head * 2 * half + j;
    if first >= x.len() {
        terminate!();
    }
    let position = position_offset + head / heads % seq;
    let cos = table[position * 2 * half + j];
    let sin = table[position * 2 * half + half + j] * Vector::new(sign);
    let a = Vector::<f32, N>::cast_from(x[first]);
    let b = Vector::<f32, N>::cast_from(x[first + half]);
    y[first] = Vector::cast_from(a * cos - b * sin);
    y[first + half] = Vector::cast_from(b * cos + a * sin);
}
