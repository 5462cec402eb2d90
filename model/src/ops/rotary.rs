//! Rotary position embedding (Su et al., 2021, "RoFormer"), with frequencies that may be stretched for longer
//! contexts.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{Tensor, TensorData};
use burn_backend::TensorMetadata;

use super::plain::{FusedOp, in_f32, is_plain};
use super::tape::{Step, Tracked, recomputes, record, record_again};
use crate::config::RopeScaling;

/// The angle by which each plane of a head is rotated per position.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RotaryFrequencies {
    /// Base: plane `j` is rotated by `theta^(−2j / head_dim)` per position.
    pub theta: f64,
    /// Stretching of the frequencies for longer contexts.
    pub scaling: Option<RopeScaling>,
}

impl RotaryFrequencies {
    /// Creates frequencies with base `theta`, without stretching.
    pub fn new(theta: f64) -> Self {
        RotaryFrequencies { theta, scaling: None }
    }

    /// Returns the angle by which plane `j` of heads of width `head_dim` is rotated per position.
    ///
    /// [`RopeScaling::Linear`] divides the angle by the factor, which interpolates positions (Chen et al., 2023).
    /// [`RopeScaling::Llama3`] is the rule of Llama 3.1 (Grattafiori et al., 2024; as in its reference code): planes
    /// that complete many turns within the original context keep their frequency, planes that complete few have it
    /// divided, and frequencies in between are blended linearly.
    pub fn frequency(&self, j: usize, head_dim: usize) -> f64 {
        let frequency = self.theta.powf(-2.0 * j as f64 / head_dim as f64);
        match self.scaling {
            None => frequency,
            Some(RopeScaling::Linear { factor }) => frequency / factor,
            Some(RopeScaling::Llama3 { factor, low_freq_factor, high_freq_factor, original_context }) => {
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

    /// Returns the angle of plane `j` at a position.
    pub(super) fn angle(&self, position: usize, j: usize, head_dim: usize) -> f64 {
        position as f64 * self.frequency(j, head_dim)
    }

    /// Returns bits that identify the frequencies: equal frequencies have equal bits.
    pub(super) fn bits(&self) -> [u64; 6] {
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

/// Rotates each head of `x` by angles proportional to the position of its row.
///
/// `x` is `[batch, seq, heads, head_dim]`; row `t` has position `p = position_offset + t`. Element `j < head_dim / 2`
/// and element `j + head_dim / 2` form one plane (the rotate-half convention of Hugging Face's Llama), rotated by `p`
/// times the frequency of plane `j`. Backward rotates `dy` by the opposite angles and needs no saved tensor. Angles
/// are computed in double precision.
///
/// # Panics
///
/// If `head_dim` is odd.
pub fn rotary(x: Tensor<4>, frequencies: RotaryFrequencies, position_offset: usize) -> Tensor<4> {
    rotated(x, frequencies, position_offset, false)
}

/// Computes [`rotary`] of the result of a norm. Under selective recomputation, backward repeats both, whereas it would
/// save the result of [`rotary`], which takes no more memory than its operand.
pub fn rotary_of_normed(x: Tensor<4>, frequencies: RotaryFrequencies, position_offset: usize) -> Tensor<4> {
    rotated(x, frequencies, position_offset, true)
}

fn rotated(
    x: Tensor<4>,
    frequencies: RotaryFrequencies,
    position_offset: usize,
    is_repeated: bool,
) -> Tensor<4> {
    if is_plain(FusedOp::Rotary) {
        return in_f32([x], |[x]| rotary_reference(x, frequencies, position_offset));
    }
    let rotation = Rotation { frequencies, position_offset, sign: 1.0, is_repeated };
    Tensor::from_dispatch(Dispatch::fused_rotary(x.into_dispatch(), rotation))
}

/// Computes [`rotary`] in plain burn.
pub fn rotary_reference(x: Tensor<4>, frequencies: RotaryFrequencies, position_offset: usize) -> Tensor<4> {
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
    let rotated = [first.clone() * cos.clone() - second.clone() * sin.clone(), second * cos + first * sin];
    Tensor::cat(rotated.into(), 3)
}

/// A backend that can compute [`rotary`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait RotaryOp: Backend {
    /// Rotates the heads of `x`, in place if nothing else holds `x`.
    fn fused_rotary(x: FloatTensor<Self>, rotation: Rotation) -> FloatTensor<Self>;
}

/// The direction and the angles of a rotation of heads.
#[derive(Clone, Copy, Debug)]
pub struct Rotation {
    /// The angle by which each plane is rotated per position.
    pub frequencies: RotaryFrequencies,
    /// Position of the first row.
    pub position_offset: usize,
    /// 1 in forward, −1 in backward.
    pub sign: f64,
    /// True if backward may repeat the rotation instead of saving its result.
    pub is_repeated: bool,
}

impl<B: RotaryOp, C: CheckpointStrategy> RotaryOp for Autodiff<B, C> {
    fn fused_rotary(x: Tracked<B, C>, rotation: Rotation) -> Tracked<B, C> {
        let backward = |mut step: Step<'_, 1>, dy, rotation| {
            step.register::<B>(0, B::fused_rotary(dy, Rotation { sign: -1.0, ..rotation }));
        };
        if rotation.is_repeated && recomputes::<C>() {
            let y = B::fused_rotary(x.primitive().clone(), rotation);
            let again = move |[x]: [FloatTensor<B>; 1]| B::fused_rotary(x, rotation);
            return record_again::<B, C, _, _>([&x], y, again, |_| rotation, backward);
        }
        let (x, node) = x.into_parts();
        record::<B, C, _, _>([node], B::fused_rotary(x, rotation), |_| rotation, backward)
    }
}

/// Returns the batch, rows, heads and head width of a rotated tensor.
pub(super) fn sizes_of(x: &impl TensorMetadata) -> [usize; 4] {
    let sizes @ [_, _, _, head_dim] = x.shape().dims();
    assert!(head_dim % 2 == 0, "rotary: heads of {head_dim} values cannot be split into planes");
    sizes
}
