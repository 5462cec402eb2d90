//! The set of operations that are computed in plain burn instead of by fused kernels.
//!
//! A fused kernel that gives wrong results on a device must not spoil a run. The public function of each operation in
//! [`FusedOp`] checks [`is_plain`] before it calls the kernels. The set is global to the process, initially empty,
//! and filled by [`verify`](crate::verify) before the first operation of a run.

use std::fmt;
use std::sync::atomic::{AtomicU32, Ordering};

use burn::tensor::{DType, FloatDType, Tensor};
use serde::{Deserialize, Serialize};

/// An operation with a fused kernel.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum FusedOp {
    /// Matrix products with cuBLASLt; replaced by burn's kernel.
    MatrixProduct,
    /// [`linear`](super::linear()) and [`linears`](super::linears()).
    Linear,
    /// [`rms_norm`](super::rms_norm()).
    RmsNorm,
    /// The sum of [`Residual`](super::Residual).
    Residual,
    /// [`swiglu`](super::swiglu()).
    Swiglu,
    /// [`geglu`](super::geglu()).
    Geglu,
    /// [`squared_relu`](super::squared_relu()).
    SquaredRelu,
    /// [`rotary`](super::rotary()).
    Rotary,
    /// Attention with the warpgroup instructions of compute capability 9.0; replaced by the kernels for all tensor
    /// cores.
    WarpgroupAttention,
    /// [`causal_attention`](super::causal_attention) and [`cached_attention`](super::cached_attention).
    Attention,
    /// [`embedding`](super::embedding()).
    Embedding,
    /// [`dropout`](super::dropout()).
    Dropout,
    /// [`linear_cross_entropy`](super::linear_cross_entropy) and its variant with options.
    CrossEntropy,
    /// [`experts`](super::experts()).
    Experts,
}

impl FusedOp {
    /// All operations. An operation that others are built from comes before them.
    pub const ALL: [FusedOp; 14] = [
        FusedOp::MatrixProduct,
        FusedOp::Linear,
        FusedOp::RmsNorm,
        FusedOp::Residual,
        FusedOp::Swiglu,
        FusedOp::Geglu,
        FusedOp::SquaredRelu,
        FusedOp::Rotary,
        FusedOp::WarpgroupAttention,
        FusedOp::Attention,
        FusedOp::Embedding,
        FusedOp::Dropout,
        FusedOp::CrossEntropy,
        FusedOp::Experts,
    ];

    /// Returns the name of the operation, as in messages and files.
    pub fn name(self) -> &'static str {
        match self {
            FusedOp::MatrixProduct => "matrix_product",
            FusedOp::Linear => "linear",
            FusedOp::RmsNorm => "rms_norm",
            FusedOp::Residual => "residual",
            FusedOp::Swiglu => "swiglu",
            FusedOp::Geglu => "geglu",
            FusedOp::SquaredRelu => "squared_relu",
            FusedOp::Rotary => "rotary",
            FusedOp::WarpgroupAttention => "warpgroup_attention",
            FusedOp::Attention => "attention",
            FusedOp::Embedding => "embedding",
            FusedOp::Dropout => "dropout",
            FusedOp::CrossEntropy => "cross_entropy",
            FusedOp::Experts => "experts",
        }
    }

    /// Returns a description of what replaces a wrong kernel.
    pub fn substitute(self) -> &'static str {
        match self {
            FusedOp::MatrixProduct => "burn's kernel",
            FusedOp::WarpgroupAttention => "the kernel for every tensor core",
            _ => "plain operations",
        }
    }

    /// Returns a description of how a run suffers if the operation is plain.
    pub fn cost(self) -> &'static str {
        match self {
            FusedOp::MatrixProduct => "matrix products are slower, and most of a step is matrix products",
            FusedOp::Linear => "linear layers take more passes over memory",
            FusedOp::WarpgroupAttention => "attention reaches less of the tensor cores' rate",
            FusedOp::Attention => {
                "attention is slower and takes memory that grows with the square of the sequence length"
            }
            FusedOp::CrossEntropy => {
                "the loss is slower and takes memory for the logits of all tokens of a micro-batch at once"
            }
            FusedOp::Experts => "every token goes through every expert",
            FusedOp::Dropout => "dropout masks are computed on the CPU, which is much slower",
            _ => "it takes several passes over memory instead of one, and keeps intermediate results",
        }
    }

    fn bit(self) -> u32 {
        1 << self as u32
    }
}

impl fmt::Display for FusedOp {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The plain operations, as a bit set.
static PLAIN: AtomicU32 = AtomicU32::new(0);

/// Computes `ops` in plain burn from now on, in the whole process. Must be called between passes, because backward
/// must use the same kernels as forward.
pub fn use_plain(ops: &[FusedOp]) {
    PLAIN.fetch_or(ops.iter().fold(0, |bits, op| bits | op.bit()), Ordering::Relaxed);
}

/// Returns whether `op` is computed in plain burn.
pub(super) fn is_plain(op: FusedOp) -> bool {
    PLAIN.load(Ordering::Relaxed) & op.bit() != 0
}

/// Computes `op` of `inputs`, in `f32` if the first input is in half precision, as the fused kernels do. The result
/// has the dtype of the first input.
pub(super) fn in_f32<const D: usize, const N: usize>(
    inputs: [Tensor<D>; N],
    op: impl FnOnce([Tensor<D>; N]) -> Tensor<D>,
) -> Tensor<D> {
    let dtype = inputs[0].dtype();
    match dtype {
        DType::F16 | DType::BF16 => {
            let result = op(inputs.map(|input| input.cast(FloatDType::F32)));
            result.cast(FloatDType::from(dtype))
        }
        _ => op(inputs),
    }
}
