//! The interface of the host or GPU that computes the end of a step.

use kiln_collectives::{Buffer, BufferError};

use super::optimizer::Optimizer;
use super::rule::{LearningRates, Rule, Settings, UpdateStep};
use crate::buffers::LossSum;
use crate::layout::ParamGroupLayout;
use crate::param_group::ShardMut;

/// Settings of the optimizer for one step.
#[derive(Clone, Debug)]
pub(crate) struct StepSettings {
    pub(crate) rates: LearningRates,
    /// Maximum norm; 0 for no clipping.
    pub(crate) max_norm: f64,
}

/// A parameter group and its rule.
#[derive(Clone, Copy)]
pub(crate) struct GroupUpdate<'a> {
    /// Position in the layout.
    #[cfg_attr(not(feature = "cube"), expect(dead_code))]
    pub(crate) position: usize,
    pub(crate) layout: &'a ParamGroupLayout,
    pub(crate) rule: &'a dyn Rule,
    /// Index of the rule in the optimizer.
    #[cfg_attr(not(feature = "cube"), expect(dead_code))]
    pub(crate) rule_index: usize,
    /// Settings of each of its parameters.
    pub(crate) settings: &'a [Settings],
}

/// The parts of a step's end, computed by the host (`HostStep`) or by a GPU (`DeviceStep`). The engine calls
/// them in this order and communicates in between.
pub(crate) trait StepBackend {
    /// The decision whether and how to update: known immediately on the host, queued on a GPU.
    type Decision;

    /// The values that `squares` stores for finding gradients that are not finite.
    type Sums;

    /// Returns the loss of this rank, `[1]`.
    fn loss(&self, sum: &mut LossSum) -> Result<Buffer, BufferError>;

    /// Returns the sums of squares of this rank's gradients by chunk, `[world_size]`, with zeros for chunks of other
    /// ranks. Each gradient is paired with the position of its group.
    fn squares(&self, gradients: &[(usize, &Buffer)]) -> Result<(Buffer, Self::Sums), BufferError>;

    /// Decides whether to update the weights, and computes the factor for the gradients. `loss` and `squares` are
    /// totals over all ranks.
    fn decide(
        &self,
        optimizer: &Optimizer,
        loss: &Buffer,
        squares: &Buffer,
        settings: StepSettings,
    ) -> Result<Self::Decision, BufferError>;

    /// Returns whether the update is already known to be skipped.
    fn leaves_out(decision: &Self::Decision) -> bool;

    /// Returns the step of parameters with these settings; `None` if it is not known on the host.
    fn step_of(decision: &Self::Decision, settings: &Settings) -> Option<UpdateStep>;

    /// Replaces the gradient of a group's shard by the direction that a rule on whole matrices computes, unless the
    /// update is skipped.
    fn direct(
        &self,
        group: GroupUpdate<'_>,
        shard: ShardMut<'_>,
        gradient: &mut Buffer,
        decision: &Self::Decision,
    ) -> Result<(), BufferError>;

    /// Updates the shard of a group, unless the update is skipped. `gradient` is the gradient, or the update computed
    /// by a rule on whole matrices. Returns whether the weights in the compute dtype have been updated too.
    fn update(
        &self,
        group: GroupUpdate<'_>,
        shard: ShardMut<'_>,
        gradient: &Buffer,
        decision: &Self::Decision,
    ) -> Result<bool, BufferError>;
}
