//! The passes of a step.

use std::sync::atomic::Ordering;

use burn::tensor::{Device, Tensor};

use super::core::Engine;
use crate::error::ShardError;
use crate::param_group::ParamGroup;
use crate::sharded_module::OrderToken;
use crate::sync::lock;
use crate::tape::{LossSink, add_loss};

impl Engine {
    /// Begins a step: clears the loss and the gradients of the previous step.
    pub fn begin_step(&self) {
        *lock(&self.loss) = Default::default();
        self.groups.iter().for_each(|group| group.begin_step());
    }

    /// Starts a forward pass on `device` and returns the token for its first module.
    pub fn begin_forward(&self, device: &Device) -> OrderToken {
        self.context.forward_position.store(0, Ordering::Relaxed);
        self.context.pool.open();
        OrderToken::root(device)
    }

    /// Runs backward from `loss` `[1]`, and adds `loss` to the loss of the step. Depending on
    /// [`Accumulate`](crate::Accumulate), gradients are reduced over the ranks in the backward of every micro-batch,
    /// or only of the last one of a step; either way, they are summed over micro-batches. Collective.
    pub fn backward(&self, loss: Tensor<1>, last_micro_batch: bool) -> Result<(), ShardError> {
        self.context.check()?;
        self.context.begin_backward(last_micro_batch);
        let sink = LossSink {
            sum: self.loss.clone(),
            scale: self.loss_scale(),
            last: self.groups[self.last.clone()].to_vec(),
            context: self.context.clone(),
        };
        drop(add_loss(loss, sink).backward());
        if self.context.reduces() {
            self.finish_reductions();
        }
        if last_micro_batch {
            self.reshard_all();
        }
        self.reshard_frozen();
        self.context.pool.close();
        self.context.check()
    }

    fn finish_reductions(&self) {
        // In the order of backward. Modules that backward has not left, such as those that the loss does not depend
        // on, have a gradient of zero, which is reduced in the same order on every rank.
        self.groups.iter().rev().for_each(|group| group.post_backward());
        self.reducer.settle();
        // All copies to the host start before the first is waited for.
        self.groups.iter().rev().for_each(|group| group.start_arrival());
        self.groups.iter().rev().for_each(|group| group.wait_for_reduced());
        self.reducer.finish();
    }

    /// Ends a pass that has no backward, such as an evaluation: frees every gathered weight.
    pub fn finish_evaluation(&self) -> Result<(), ShardError> {
        self.reshard_all();
        self.context.check()
    }

    fn reshard_all(&self) {
        self.groups.iter().for_each(|group| group.reshard());
        self.context.pool.close();
    }

    /// Frees the weights of frozen groups at the end of backward. Backward never reaches the modules before the first
    /// trained parameter, so their weights have not been freed yet.
    fn reshard_frozen(&self) {
        let frozen = |group: &&ParamGroup| !group.layout.trainable;
        let groups = self.groups.iter().map(|group| &**group).filter(frozen);
        groups.filter(|group| group.reshards_after_forward()).for_each(ParamGroup::reshard);
    }
}
