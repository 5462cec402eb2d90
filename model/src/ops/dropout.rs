//! Counter-based dropout (Srivastava et al., 2014), without a random state.

use burn::backend::autodiff::{Autodiff, checkpoint::strategy::CheckpointStrategy};
use burn::backend::{Backend, Dispatch, backend_extension, tensor::FloatTensor};
use burn::tensor::{Tensor, TensorData};

use super::plain::{FusedOp, is_plain};
use super::tape::{Tracked, record};
use crate::random::{GOLDEN, mix};

/// Drops every element of `x` with probability `p` and multiplies the others by `1 / (1 − p)`.
///
/// A hash of `(key, counter_offset + i)` decides whether element `i` (in row-major order) is dropped. A slice
/// of a batch that passes the index of its first element therefore drops the same elements as the whole
/// batch, on any machine. Backward applies the same mask to `dy`; the mask is recomputed, never stored.
///
/// # Panics
///
/// If `p` is not in `[0, 1)`.
pub fn dropout<const D: usize>(x: Tensor<D>, p: f64, key: u64, counter_offset: u64) -> Tensor<D> {
    assert!((0.0..1.0).contains(&p), "dropout: the probability {p} is not in [0, 1)");
    if p == 0.0 {
        return x;
    }
    if is_plain(FusedOp::Dropout) {
        return dropout_reference(x, p, key, counter_offset);
    }
    let mask = DropoutMask::new(p, key, counter_offset);
    Tensor::from_dispatch(Dispatch::fused_dropout(&x.into_dispatch(), mask))
}

/// Computes [`dropout`] in plain burn: the mask is a tensor, computed value by value.
pub fn dropout_reference<const D: usize>(x: Tensor<D>, p: f64, key: u64, counter_offset: u64) -> Tensor<D> {
    let mask = DropoutMask::new(p, key, counter_offset);
    let factor = |i| if mask.keeps(i) { mask.scale } else { 0.0 };
    let factors: Vec<f64> = (0..x.shape().num_elements() as u64).map(factor).collect();
    let factors = TensorData::new(factors, x.shape()).convert_dtype(x.dtype());
    let factors = Tensor::<D>::from_data(factors, (&x.device(), x.dtype()));
    x * factors
}

/// A backend that can compute [`dropout`].
#[backend_extension(Flex, Cube: cfg(feature = "cube"), Autodiff)]
pub trait DropoutOp: Backend {
    /// Multiplies `x` by the factors of `mask`.
    fn fused_dropout(x: &FloatTensor<Self>, mask: DropoutMask) -> FloatTensor<Self>;
}

/// A dropout mask: a rule that computes each factor, not a buffer.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct DropoutMask {
    /// Counter of the first element in the key's stream of random values.
    pub(super) first: u64,
    /// An element is dropped if the upper half of its hash is below this threshold.
    pub(super) threshold: u64,
    /// The factor of elements that are not dropped.
    pub(super) scale: f64,
}

impl DropoutMask {
    fn new(p: f64, key: u64, counter_offset: u64) -> Self {
        DropoutMask {
            // Mixed, so that keys that differ by a multiple of GOLDEN do not give shifted copies of one mask.
            first: mix(key).wrapping_add(counter_offset.wrapping_mul(GOLDEN)),
            threshold: (p * (1u64 << 32) as f64).round() as u64,
            scale: 1.0 / (1.0 - p),
        }
    }

    /// Returns whether element `i` is kept.
    #[inline(always)]
    pub(super) fn keeps(&self, i: u64) -> bool {
        mix(self.first.wrapping_add(i.wrapping_mul(GOLDEN))) >> 32 >= self.threshold
    }
}

impl<B: DropoutOp, C: CheckpointStrategy> DropoutOp for Autodiff<B, C> {
    fn fused_dropout(x: &Tracked<B, C>, mask: DropoutMask) -> Tracked<B, C> {
        record::<B, C, _, _>(
            [x.node()],
            B::fused_dropout(x.primitive(), mask),
            |_| mask,
            |mut step, dy, mask| step.register::<B>(0, B::fused_dropout(&dy, mask)),
        )
    }
}
