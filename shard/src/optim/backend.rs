//! Where the end of a step is computed.

use kiln_collectives::{Buffer, BufferError};

use super::optimizer::Optimizer;
use super::rule::{LearningRates, Rule, Settings};
use crate::buffers::LossSum;
use crate::layout::ParamGroupLayout;
use crate::param_group::ShardMut;

/// What a step asks of the optimizer.
#[derive(Clone, Debug)]
pub(crate) struct StepSettings {
    pub(crate) rates: LearningRates,
    /// 0 for no clipping.
    pub(crate) max_norm: f64,
}

/// A parameter group, and how it is updated.
#[derive(Clone, Copy)]
pub(crate) struct GroupUpdate<'a> {
    /// Its place in the layout.
    #[cfg_attr(not(feature = "cube"), expect(dead_code))]
    pub(crate) position: usize,
    pub(crate) layout: &'a ParamGroupLayout,
    pub(crate) rule: &'a dyn Rule,
    /// The place of the rule in the optimizer.
    #[cfg_attr(not(feature = "cube"), expect(dead_code))]
    pub(crate) rule_index: usize,
    /// Of each of its parameters.
    pub(crate) settings: &'a [Settings],
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
        optimizer: &Optimizer,
        loss: &Buffer,
        squares: &Buffer,
        settings: StepSettings,
    ) -> Result<Self::Decision, BufferError>;

    /// Whether it is known that the update is left out.
    fn leaves_out(decision: &Self::Decision) -> bool;

    /// Replaces the gradient of a group's shard by the direction of a rule on whole matrices, if the decision
    /// says that there is an update.
    fn direct(
        &self,
        group: GroupUpdate<'_>,
        shard: ShardMut<'_>,
        gradient: &mut Buffer,
        decision: &Self::Decision,
    ) -> Result<(), BufferError>;

    /// Updates the shard of a group, if the decision says so. `gradient` is the gradient, or the update that
    /// a rule on whole matrices has made. Returns whether the weights in the compute dtype are up to date as well.
    fn update(
        &self,
        group: GroupUpdate<'_>,
        shard: ShardMut<'_>,
        gradient: &Buffer,
        decision: &Self::Decision,
    ) -> Result<bool, BufferError>;
}
