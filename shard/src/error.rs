//! The errors of sharding.

use std::sync::Arc;

use kiln_collectives::{BufferError, CommError, DType};

use crate::mesh::MeshError;

/// A failure of the sharding engine. Cheap to clone: the first failure is kept and returned to all later
/// callers, because operations inside autodiff cannot return errors themselves.
#[derive(Clone, Debug, thiserror::Error)]
pub enum ShardError {
    /// A collective failed.
    #[error(transparent)]
    Comm(Arc<CommError>),
    /// A buffer had a different dtype than expected.
    #[error(transparent)]
    Buffer(Arc<BufferError>),
    /// The ranks cannot be arranged.
    #[error(transparent)]
    Mesh(#[from] MeshError),
    /// Ranks were built from different models, layouts or policies.
    #[error(
        "ranks {ranks:?} differ from rank 0 in model, layout or sharding policy: start every rank with \
         the same configuration"
    )]
    PlanMismatch {
        /// The ranks that differ.
        ranks: Vec<usize>,
    },
    /// Two parameters have the same name.
    #[error("two parameters are called `{name}`: give the modules distinct prefixes")]
    DuplicateParameter {
        /// The name.
        name: String,
    },
    /// A dtype that the policy does not support.
    #[error("{what} = {dtype} is not supported here: use f32 or bf16")]
    UnsupportedDType {
        /// Name of the setting.
        what: &'static str,
        /// Value of the setting.
        dtype: DType,
    },
    /// A host-only rule of the optimizer is selected for weights on a GPU.
    #[error(
        "the optimizer's rule `{rule}` only runs on the CPU, but the weights are on a GPU: train on the CPU, \
         or set shard.offload = true"
    )]
    HostRule {
        /// The rule.
        rule: String,
    },
    /// The optimizer's rules use a name both for a slot with a value per element and for an owned slot.
    #[error(
        "the optimizer has two kinds of slots called `{slot}`, with a value per element and of whole matrices: rename one"
    )]
    SlotName {
        /// The name.
        slot: &'static str,
    },
    /// A rule of the optimizer returned an invalid update for a matrix.
    #[error("the update of `{name}`: {reason}")]
    Update {
        /// Name of the parameter.
        name: String,
        /// The fault in the update.
        reason: String,
    },
    /// The optimizer cannot change weights that something else still reads.
    #[error(
        "parameter group `{group}` cannot be updated: a tensor made in this step still holds a view of its \
         weights; drop it before the optimizer step"
    )]
    Pinned {
        /// Name of the parameter group.
        group: String,
    },
    /// A block that is recomputed in backward uses a captured tensor that needs a gradient.
    #[error(
        "block `{group}` captures a tensor that needs a gradient, but blocks that run again in backward cannot \
         pass a gradient to captured tensors; make the tensor part of the input, detach it, \
         or set shard.recompute = \"none\""
    )]
    Captured {
        /// Name of the block's parameter group.
        group: String,
    },
    /// There is no gradient to replace.
    #[error(
        "`{name}` has no gradient now: gradients exist from the backward of the last micro-batch to the \
         optimizer step, and only for trained parameters"
    )]
    NoGradient {
        /// Name of the parameter.
        name: String,
    },
    /// A requested parameter is not in the layout.
    #[error("no parameter is called `{name}`")]
    UnknownParameter {
        /// The name.
        name: String,
    },
    /// No rule of the optimizer has this slot.
    #[error("no rule of the optimizer has a slot `{slot}`; the slots are {}", known.join(", "))]
    UnknownSlot {
        /// The name.
        slot: String,
        /// Names of the slots.
        known: Vec<&'static str>,
    },
    /// A rule has owned slots, but does not work on whole matrices.
    #[error("the rule `{rule}` has owned slots, so `Rule::is_whole` must return true")]
    NotWhole {
        /// Name of the rule.
        rule: String,
    },
    /// Values for a parameter have the wrong length.
    #[error("`{name}` has {expected} elements (shape {shape:?}), but {found} were given")]
    WrongLength {
        /// Name of the parameter.
        name: String,
        /// Shape of the parameter.
        shape: Vec<usize>,
        /// Number of elements of the parameter.
        expected: usize,
        /// Number of elements passed.
        found: usize,
    },
    /// A module's own initialisation produced values that cannot be sharded.
    #[error("initial values of `{name}` cannot be read as f32: {reason}")]
    InitialValues {
        /// Name of the parameter.
        name: String,
        /// The fault in the values.
        reason: String,
    },
    /// A tensor cannot be read.
    #[error("cannot read a tensor: {reason}")]
    Unreadable {
        /// The reason.
        reason: String,
    },
    /// A gradient is invalid.
    #[error("gradient of `{name}`: {reason}")]
    Gradient {
        /// Name of the parameter.
        name: String,
        /// The fault in the gradient.
        reason: String,
    },
}

impl From<CommError> for ShardError {
    fn from(error: CommError) -> Self {
        ShardError::Comm(Arc::new(error))
    }
}

impl From<BufferError> for ShardError {
    fn from(error: BufferError) -> Self {
        ShardError::Buffer(Arc::new(error))
    }
}
