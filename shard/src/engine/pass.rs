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
    /// Begins a step: drops the gradients of the previous step.
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

    /// Runs backward from `loss` `[1]`, and adds it to that of the step. Gradients are reduced over the ranks during
    /// the backward of the last micro-batch of a step, or of each, and add up over them
    /// ([`Accumulate`](crate::Accumulate)). Collective.
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
        // In the order of backward: modules that backward has not left, such as modules that do not affect
        // the loss, have a gradient of zero, reduced in the same order on every rank.
        self.groups.iter().rev().for_each(|group| group.post_backward());
        self.reducer.settle();
        // Starts all copies to the host before waiting for the first one.
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

    /// Frees the frozen groups at the end of backward, which has not left those before the first
    /// trained parameter.
    fn reshard_frozen(&self) {
        let frozen = |group: &&ParamGroup| !group.layout.trainable;
        let groups = self.groups.iter().map(|group| &**group).filter(frozen);
        groups.filter(|group| group.reshards_after_forward()).for_each(ParamGroup::reshard);
    }
}
