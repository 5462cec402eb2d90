//! Rotary position embedding (Su et al., 2021, "RoFormer").

use std::any::{Any, TypeId};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock, Mutex, PoisonError};

use burn::backend::autodiff::{
    Autodiff,
    checkpoint::{base::Checkpointer, strategy::CheckpointStrategy},
    grads::Gradients,
    ops::{Backward, Ops, OpsKind},
};
use burn::backend::{Backend, Dispatch, Flex, backend_extension, tensor::FloatTensor};
use burn::tensor::{Tensor, TensorData};
use burn_flex::FlexTensor;

use super::Tracked;
use super::cpu::real::Real;
use super::cpu::{self, Values, with_real};

/// Rotates each head of `x` by angles that grow with the position of its row.
///
/// `x` is `[batch, seq, heads, head_dim]`; row `t` has position `p = position_offset + t`. Element
/// `j < head_dim / 2` and element `j + head_dim / 2` are one plane (the rotate-half convention of
/// Hugging Face's Llama), turned by `p · theta^(−2j / head_dim)`. Backward turns `dy` by the
/// opposite angles and needs no saved tensor. Angles are computed in double precision.
///
/// # Panics
///
/// If `head_dim` is odd.
pub fn rotary(x: Tensor<4>, theta: f64, position_offset: usize) -> Tensor<4> {
    let x = x.into_dispatch();
    Tensor::from_dispatch(<Dispatch as RotaryOp>::fused_rotary(x, theta, position_offset))
}

/// [`rotary`] in plain burn.
pub fn rotary_reference(x: Tensor<4>, theta: f64, position_offset: usize) -> Tensor<4> {
    let [batch, seq, heads, head_dim] = x.dims();
    let half = head_dim / 2;
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f64> = (0..seq * half)
            .map(|i| f(angle(position_offset + i / half, i % half, head_dim, theta)))
            .collect();
        let data = TensorData::new(values, [1, seq, 1, half]).convert_dtype(x.dtype());
        Tensor::<4>::from_data(data, (&x.device(), x.dtype())).expand([batch, seq, heads, half])
    };
    let (cos, sin) = (table(f64::cos), table(f64::sin));
    let first = x.clone().narrow(3, 0, half);
    let second = x.narrow(3, half, half);
    let rotated =
        [first.clone() * cos.clone() - second.clone() * sin.clone(), second * cos + first * sin];
    Tensor::cat(rotated.into(), 3)
}

/// The backends of [`rotary`].
#[backend_extension(Flex, Autodiff)]
pub trait RotaryOp: Backend {
    /// `x` with its heads rotated.
    fn fused_rotary(x: FloatTensor<Self>, theta: f64, position_offset: usize) -> FloatTensor<Self>;
}

impl RotaryOp for Flex {
    fn fused_rotary(x: FlexTensor, theta: f64, position_offset: usize) -> FlexTensor {
        rotate(&x, Rotation { theta, position_offset, sign: 1.0 })
    }
}

impl<C: CheckpointStrategy> RotaryOp for Autodiff<Flex, C> {
    fn fused_rotary(x: Tracked<C>, theta: f64, position_offset: usize) -> Tracked<C> {
        let rotation = Rotation { theta, position_offset, sign: 1.0 };
        let y = rotate(x.primitive(), rotation);
        match RotaryBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(rotation, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Rotation {
    theta: f64,
    position_offset: usize,
    /// 1 forward, −1 backward.
    sign: f64,
}

#[derive(Debug)]
struct RotaryBackward;

impl Backward<Flex, 1> for RotaryBackward {
    type State = Rotation;

    fn backward(
        self,
        ops: Ops<Rotation, 1>,
        grads: &mut Gradients,
        _checkpointer: &mut Checkpointer,
    ) {
        let dy = grads.consume::<Flex>(&ops.node);
        let [Some(node)] = ops.parents else { return };
        let inverse = Rotation { sign: -1.0, ..ops.state };
        grads.register::<Flex>(node.id, rotate(&dy, inverse));
    }
}

/// The angle of plane `j` at a position.
fn angle(position: usize, j: usize, head_dim: usize, theta: f64) -> f64 {
    position as f64 * theta.powf(-2.0 * j as f64 / head_dim as f64)
}

/// Cosines and sines, `[positions, head_dim / 2]` each.
struct Table<T> {
    cos: Vec<T>,
    sin: Vec<T>,
    positions: usize,
}

/// Type of the values, head dimension and bits of theta.
type TableKey = (TypeId, usize, u64);

/// A model uses one table, which every layer of every step reads.
static TABLES: LazyLock<Mutex<HashMap<TableKey, Arc<dyn Any + Send + Sync>>>> =
    LazyLock::new(Mutex::default);

/// The table for at least `positions` positions.
fn table<T: Real>(head_dim: usize, theta: f64, positions: usize) -> Arc<Table<T>> {
    let key = (TypeId::of::<T>(), head_dim, theta.to_bits());
    // An entry is inserted whole or not at all, so a panic elsewhere has not left one half-made.
    let mut tables = TABLES.lock().unwrap_or_else(PoisonError::into_inner);
    let cached = tables.get(&key).and_then(|table| Arc::clone(table).downcast::<Table<T>>().ok());
    if let Some(table) = cached.filter(|table| table.positions >= positions) {
        return table;
    }
    // Generation asks for one more position at a time: growing by doubling keeps that linear.
    let positions = positions.next_power_of_two();
    let half = head_dim / 2;
    let angles =
        (0..positions * half).map(|i| angle(i / half, i % half, head_dim, theta).sin_cos());
    let (sin, cos) = angles.map(|(sin, cos)| (T::from_f64(sin), T::from_f64(cos))).unzip();
    let table = Arc::new(Table { cos, sin, positions });
    tables.insert(key, Arc::clone(&table) as Arc<dyn Any + Send + Sync>);
    table
}

fn rotate(x: &FlexTensor, rotation: Rotation) -> FlexTensor {
    let shape = x.layout().shape().clone();
    let [_, seq, heads, head_dim] = shape.dims();
    assert!(head_dim % 2 == 0, "rotary: heads of {head_dim} values cannot be split into planes");
    with_real!(x.dtype(), T => {
        let values = Values::<T>::of(x);
        let table = table::<T>(head_dim, rotation.theta, rotation.position_offset + seq);
        let mut y = vec![T::ZERO; values.len()];
        rotate_values(&values, &mut y, [seq, heads, head_dim], &table, rotation);
        cpu::tensor_of(y, shape, x.dtype())
    })
}

fn rotate_values<T: Real>(
    x: &[T],
    y: &mut [T],
    [seq, heads, head_dim]: [usize; 3],
    table: &Table<T>,
    rotation: Rotation,
) {
    let (width, half) = (heads * head_dim, head_dim / 2);
    if width == 0 {
        return;
    }
    let sign = T::from_f64(rotation.sign);
    cpu::for_each_block(
        y,
        cpu::rows_per_block(width) * width,
        #[inline(always)]
        |start, block| {
            let rows = block.chunks_exact_mut(width).zip(x[start..].chunks_exact(width));
            for (i, (y, x)) in rows.enumerate() {
                let position = rotation.position_offset + (start / width + i) % seq;
                let cos = &table.cos[position * half..][..half];
                let sin = &table.sin[position * half..][..half];
                for (y, x) in y.chunks_exact_mut(head_dim).zip(x.chunks_exact(head_dim)) {
                    let (y_first, y_second) = y.split_at_mut(half);
                    let (x_first, x_second) = x.split_at(half);
                    for j in 0..half {
                        let sin = sin[j] * sign;
                        y_first[j] = x_first[j] * cos[j] - x_second[j] * sin;
                        y_second[j] = x_second[j] * cos[j] + x_first[j] * sin;
                    }
                }
            }
        },
    );
}
