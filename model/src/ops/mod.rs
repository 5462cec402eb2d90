//! Fused operations of the decoder, with hand-written derivatives.
//!
//! Each file contains one operation, or a few related ones. It has the public function on burn tensors; the same
//! mathematics in plain burn (`*_reference`), which tests compare with; the backend extension that puts the operation
//! on the tape, written once for all backends; and the trait of the kernels that a backend implements. Routers are an
//! exception: their operations are so small that GPUs compute them with burn's operations (`router.rs`). An operation
//! whose backward pass is its forward pass needs no kernel trait: backends implement the extension itself. The
//! implementations are in `cpu/`, and in `cube/` for GPUs. Kernels compute in `f32` (`f64` for `f64` tensors, on the
//! CPU); half-precision operands are converted, the result has the dtype of the first operand and every gradient the
//! dtype of its tensor.
//!
//! If the kernels of an operation were found to be wrong on a device (`crate::verify`), its function computes the
//! plain form instead (`plain.rs`).
//!
//! Weights may come from a sharded gather that is recomputed in the backward pass. An operation that needs a parent
//! in backward therefore gets it from the checkpointer instead of keeping a handle to it. Gradients of untracked
//! parents are not computed.
//!
//! Operations that read the same input may share state (`shared.rs`): each operation then adds its gradient to the
//! gradient that the previous one has registered, whereas burn would make another pass over both.

mod cpu;
#[cfg(feature = "cube")]
pub mod cube;

mod attention;
mod cross_entropy;
mod dropout;
mod embedding;
mod experts;
mod fork;
mod glu;
mod linear;
mod plain;
mod probe;
mod reshape;
mod residual;
mod rms_norm;
mod rotary;
mod router;
mod shared;
mod squared_relu;
mod tape;
mod top_k;

pub use attention::{
    AttentionOp, cached_attention, cached_attention_reference, causal_attention, causal_attention_reference,
};
pub use cpu::{BF16_CHOICE, bf16_instructions};
pub(crate) use cross_entropy::logit_rows;
pub use cross_entropy::{
    HeadLayout, LinearCrossEntropyOp, LogitLoss, LogitOptions, linear_cross_entropy,
    linear_cross_entropy_reference, linear_cross_entropy_with, linear_cross_entropy_with_reference, soft_cap,
};
pub use dropout::{DropoutMask, DropoutOp, dropout, dropout_reference};
pub use embedding::{EmbeddingOp, embedding, embedding_reference};
pub use experts::{ExpertProjections, ExpertsOp, Routing, experts, experts_reference};
pub use fork::{ForkOp, fork};
pub use glu::{Activation, GluOp, geglu, geglu_reference, swiglu, swiglu_reference};
pub use linear::{LinearOp, linear, linear_reference, linears};
pub use plain::{FusedOp, use_plain};
pub(crate) use probe::probe;
pub use probe::{Probe, ProbeOp, Seen};
pub use reshape::{ReshapeOp, reshape};
pub use residual::{Residual, ResidualOp};
pub(crate) use rms_norm::rows_of_block;
pub use rms_norm::{RmsNormOp, rms_norm, rms_norm_reference};
pub use rotary::{RotaryFrequencies, RotaryOp, rotary, rotary_of_normed, rotary_reference};
pub use router::{
    RouterOp, RouterSums, router_balance, router_load, router_means, router_softmax, router_weights,
};
pub use squared_relu::{SquaredReluOp, squared_relu, squared_relu_reference};
pub use tape::without_gradient;
pub use top_k::{TopKOp, top_k, top_k_reference};
