//! Where the end of a step is computed.

use kiln_collectives::{Buffer, BufferError};

use super::optimizer::Optimizer;
use crate::buffers::LossSum;
use crate::layout::ParamGroupLayout;
use crate::param_group::ShardMut;

/// What a step asks of the optimizer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct StepSettings {
    pub(crate) learning_rate: f64,
    /// 0 for no clipping.
    pub(crate) max_norm: f64,
}

/// The parts of a step's end, done by the host (`HostStep`) or by a GPU (`DeviceStep`). The engine calls
/// them in this order and communicates in between.
pub(crate) trait StepBackend {
    /// What is decided about the update: known on the host, only queued on a GPU.
    type Decision;

    /// What `squares` keeps for finding values that are not finite.
    type Sums;

    /// The loss of this rank, `[1]`.
    fn loss(&self, sum: &mut LossSum) -> Result<Buffer, BufferError>;

    /// The sums of squares of this rank's gradients by chunk, `[world_size]`; chunks that it does not
    /// hold are zero. Gradients come with the position of their group.
    fn squares(&self, gradients: &[(usize, &Buffer)]) -> Result<(Buffer, Self::Sums), BufferError>;

    /// Decides whether and how far weights move: `loss` and `squares` are those of all ranks.
    fn decide(
        &self,
        optimizer: &dyn Optimizer,
        loss: &Buffer,
        squares: &Buffer,
        settings: StepSettings,
    ) -> Result<Self::Decision, BufferError>;

    /// Whether it is known that the update is left out.
    fn leaves_out(decision: &Self::Decision) -> bool;

    /// Updates the shard of a group, given its position and layout, if the decision says so.
    fn update(
        &self,
        optimizer: &dyn Optimizer,
        group: (usize, &ParamGroupLayout),
        shard: ShardMut<'_>,
        gradient: &Buffer,
        decision: &Self::Decision,
    ) -> Result<(), BufferError>;
}
