//! The kernel of rotary position embedding.

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn::backend::Flex;
use burn_flex::FlexTensor;

use super::dispatch::with_scalar;
use super::parallel::for_each_row;
use super::scalar::{Real, Scalar};
use super::values::owned;
use crate::ops::rotary::{RotaryFrequencies, RotaryOp, Rotation, sizes_of};

impl RotaryOp for Flex {
    fn fused_rotary(x: FlexTensor, rotation: Rotation) -> FlexTensor {
        let (dtype, [_, seq, heads, head_dim]) = (x.dtype(), sizes_of(&x));
        with_scalar!(dtype, S => {
            let mut x = owned::<S>(x);
            let positions = rotation.position_offset + seq;
            let table = table::<<S as Scalar>::Real>(head_dim, rotation.frequencies, positions);
            let values = x.storage_mut::<S>();
            rotate_values::<S>(values, [seq, heads, head_dim], &table, rotation);
            x
        })
    }
}

/// Cosines and sines, `[positions, head_dim / 2]` each.
struct Table<T> {
    cos: Vec<T>,
    sin: Vec<T>,
    positions: usize,
}

type TableKey = (TypeId, usize, [u64; 6]);

/// Tables in use: one per model, shared by all layers.
static TABLES: LazyLock<Mutex<HashMap<TableKey, Arc<dyn Any + Send + Sync>>>> = LazyLock::new(Mutex::default);

fn table<T: Real>(head_dim: usize, frequencies: RotaryFrequencies, positions: usize) -> Arc<Table<T>> {
    let key = (TypeId::of::<T>(), head_dim, frequencies.bits());
    // Entries are inserted whole, so the map is valid after a panic.
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let cached = tables.get(&key).and_then(|table| Arc::clone(table).downcast::<Table<T>>().ok());
    if let Some(table) = cached.filter(|table| table.positions >= positions) {
        return table;
    }
    // Generation requests one more position at a time: doubling keeps the total cost linear.
    let positions = positions.next_power_of_two();
    let half = head_dim / 2;
    let angles = (0..positions * half).map(|i| frequencies.angle(i / half, i % half, head_dim).sin_cos());
    let (sin, cos) = angles.map(|(sin, cos)| (T::from_f64(sin), T::from_f64(cos))).unzip();
    let table = Arc::new(Table { cos, sin, positions });
    tables.insert(key, Arc::clone(&table) as Arc<dyn Any + Send + Sync>);
    table
}

fn rotate_values<S: Scalar>(
    values: &mut [S],
    [seq, heads, head_dim]: [usize; 3],
    table: &Table<S::Real>,
    rotation: Rotation,
) {
    let half = head_dim / 2;
    let sign = S::Real::from_f64(rotation.sign);
    for_each_row(
        values,
        heads * head_dim,
        #[inline(always)]
        |row, values| {
            let position = rotation.position_offset + row % seq;
            let cos = &table.cos[position * half..][..half];
            let sin = &table.sin[position * half..][..half];
            for head in values.chunks_exact_mut(head_dim) {
                let (first, second) = head.split_at_mut(half);
                let pairs = first.iter_mut().zip(second);
                for ((first, second), (&cos, &sin)) in pairs.zip(cos.iter().zip(sin)) {
                    let (x, y, sin) = (first.real(), second.real(), sin * sign);
                    *first = S::nearest(x * cos - y * sin);
                    *second = S::nearest(y * cos + x * sin);
                }
            }
        },
    );
}
