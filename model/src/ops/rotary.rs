//! Rotary position embedding (Su et al., 2021, "RoFormer"), with frequencies that may be stretched
//! for longer contexts.

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
use crate::config::RopeScaling;

/// How fast each plane of a head turns.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryFrequencies {
    /// Base: plane `j` turns by `theta^(−2j / head_dim)` per position.
    pub theta: f64,
    /// Stretching of these frequencies.
    pub scaling: Option<RopeScaling>,
}

impl RotaryFrequencies {
    /// Frequencies with base `theta`, not stretched.
    pub fn new(theta: f64) -> Self {
        RotaryFrequencies { theta, scaling: None }
    }

    /// The angle by which plane `j` of heads of width `head_dim` turns per position.
    ///
    /// [`RopeScaling::Linear`] divides it by the factor, which is to interpolate positions (Chen et
    /// al., 2023). [`RopeScaling::Llama3`] is the rule of Llama 3.1 (Grattafiori et al., 2024; as in
    /// its reference code): planes that turn many times within the original context keep their
    /// frequency, those that turn seldom have it divided, and those between are blended linearly.
    pub fn frequency(&self, j: usize, head_dim: usize) -> f64 {
        let frequency = self.theta.powf(-2.0 * j as f64 / head_dim as f64);
        match self.scaling {
            None => frequency,
            Some(RopeScaling::Linear { factor }) => frequency / factor,
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_context,
            }) => {
                let wavelength = std::f64::consts::TAU / frequency;
                let turns = original_context as f64 / wavelength;
                if turns < low_freq_factor {
                    frequency / factor
                } else if turns > high_freq_factor {
                    frequency
                } else {
                    let smooth = (turns - low_freq_factor) / (high_freq_factor - low_freq_factor);
                    frequency * ((1.0 - smooth) / factor + smooth)
                }
            }
        }
    }

    /// The angle of plane `j` at a position.
    fn angle(&self, position: usize, j: usize, head_dim: usize) -> f64 {
        position as f64 * self.frequency(j, head_dim)
    }

    /// Equal for equal frequencies, and usable as a key.
    fn bits(&self) -> [u64; 6] {
        let [kind, factor, low, high, original] = match self.scaling {
            None => [0; 5],
            Some(RopeScaling::Linear { factor }) => [1, factor.to_bits(), 0, 0, 0],
            Some(RopeScaling::Llama3 {
                factor,
                low_freq_factor: low,
                high_freq_factor: high,
                original_context,
            }) => [2, factor.to_bits(), low.to_bits(), high.to_bits(), original_context as u64],
        };
        [self.theta.to_bits(), kind, factor, low, high, original]
    }
}

/// Rotates each head of `x` by angles that grow with the position of its row.
///
/// `x` is `[batch, seq, heads, head_dim]`; row `t` has position `p = position_offset + t`. Element
/// `j < head_dim / 2` and element `j + head_dim / 2` are one plane (the rotate-half convention of
/// Hugging Face's Llama), turned by `p` times the frequency of plane `j`. Backward turns `dy` by the
/// opposite angles and needs no saved tensor. Angles are computed in double precision.
///
/// # Panics
///
/// If `head_dim` is odd.
pub fn rotary(x: Tensor<4>, frequencies: RotaryFrequencies, position_offset: usize) -> Tensor<4> {
    let x = x.into_dispatch();
    Tensor::from_dispatch(<Dispatch as RotaryOp>::fused_rotary(x, frequencies, position_offset))
}

/// [`rotary`] in plain burn.
pub fn rotary_reference(
    x: Tensor<4>,
    frequencies: RotaryFrequencies,
    position_offset: usize,
) -> Tensor<4> {
    let [batch, seq, heads, head_dim] = x.dims();
    let half = head_dim / 2;
    let table = |f: fn(f64) -> f64| {
        let values: Vec<f64> = (0..seq * half)
            .map(|i| f(frequencies.angle(position_offset + i / half, i % half, head_dim)))
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
    fn fused_rotary(
        x: FloatTensor<Self>,
        frequencies: RotaryFrequencies,
        position_offset: usize,
    ) -> FloatTensor<Self>;
}

impl RotaryOp for Flex {
    fn fused_rotary(
        x: FlexTensor,
        frequencies: RotaryFrequencies,
        position_offset: usize,
    ) -> FlexTensor {
        rotate(&x, Rotation { frequencies, position_offset, sign: 1.0 })
    }
}

impl<C: CheckpointStrategy> RotaryOp for Autodiff<Flex, C> {
    fn fused_rotary(
        x: Tracked<C>,
        frequencies: RotaryFrequencies,
        position_offset: usize,
    ) -> Tracked<C> {
        let rotation = Rotation { frequencies, position_offset, sign: 1.0 };
        let y = rotate(x.primitive(), rotation);
        match RotaryBackward.prepare::<C>([x.node()]).compute_bound().stateful() {
            OpsKind::Tracked(prep) => prep.finish(rotation, y),
            OpsKind::UnTracked(prep) => prep.finish(y),
        }
    }
}

#[derive(Clone, Copy, Debug)]
struct Rotation {
    frequencies: RotaryFrequencies,
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

/// Cosines and sines, `[positions, head_dim / 2]` each.
struct Table<T> {
    cos: Vec<T>,
    sin: Vec<T>,
    positions: usize,
}

/// Type of the values, head dimension and bits of the frequencies.
type TableKey = (TypeId, usize, [u64; 6]);

/// A model uses one table, which every layer of every step reads.
static TABLES: LazyLock<Mutex<HashMap<TableKey, Arc<dyn Any + Send + Sync>>>> =
    LazyLock::new(Mutex::default);

/// The table for at least `positions` positions.
fn table<T: Real>(
    head_dim: usize,
    frequencies: RotaryFrequencies,
    positions: usize,
) -> Arc<Table<T>> {
    let key = (TypeId::of::<T>(), head_dim, frequencies.bits());
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
        (0..positions * half).map(|i| frequencies.angle(i / half, i % half, head_dim).sin_cos());
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
        let table = table::<T>(head_dim, rotation.frequencies, rotation.position_offset + seq);
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
