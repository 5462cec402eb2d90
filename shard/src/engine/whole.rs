//! The end of a step for parameter groups whose rule works on whole matrices, such as Muon's.
//!
//! Such a group goes through three stages. First, directions are computed element by element on the shards, and
//! gathered. Second, each rank of the world transforms the matrices that it owns into a flat buffer that is zero
//! elsewhere. Third, these buffers are summed like a gradient, always in f32, and each rank applies the shard that it
//! receives. Adding zeros changes no bit, so the updates are the same under every strategy.
//!
//! Stages overlap: while a group is transformed, the directions of the next group are gathered and the updates of the
//! previous group are summed.

use std::sync::Arc;

use kiln_collectives::{Buffer, DType, Phase, Work};

use super::core::Engine;
use crate::buffers::FlatWeights;
use crate::error::ShardError;
use crate::optim::{GroupUpdate, StepBackend, Target, transform};

/// A buffer that is available, or still being received.
enum Pending {
    Here(Buffer),
    Coming(Work),
}

/// The position of a group, and its whole directions.
struct Directions(usize, Pending);

/// The position of a group, and this rank's shard of its updates, summed over the ranks of one copy of the model.
struct Updates(usize, Pending);

impl Engine {
    /// Returns the group at `position` with its rule.
    pub(super) fn group_update(&self, position: usize) -> GroupUpdate<'_> {
        let rule = &self.rules[position];
        GroupUpdate {
            position,
            layout: &self.groups[position].layout,
            rule: self.optimizer.rule(rule.rule),
            rule_index: rule.rule,
            settings: &rule.settings,
        }
    }

    /// Updates the groups whose rule works on whole matrices. Collective.
    pub(super) fn update_whole<B: StepBackend>(
        &self,
        backend: &B,
        decision: &B::Decision,
    ) -> Result<(), ShardError> {
        let positions = (0..self.groups.len()).filter(|at| self.group_update(*at).rule.is_whole());
        let (mut gathering, mut reducing) = (None, None);
        // Two more iterations for the groups that are in progress at the end.
        for position in positions.map(Some).chain([None, None]) {
            let directions = position.map(|at| self.start_directions(backend, at, decision)).transpose()?;
            let before = std::mem::replace(&mut gathering, directions.flatten());
            let updates =
                before.map(|directions| self.start_updates::<B>(directions, decision)).transpose()?;
            if let Some(updates) = std::mem::replace(&mut reducing, updates) {
                self.apply(backend, updates, decision)?;
            }
        }
        Ok(())
    }

    /// Computes the directions of this rank's shard of the gradient, and starts to gather them.
    fn start_directions<B: StepBackend>(
        &self,
        backend: &B,
        position: usize,
        decision: &B::Decision,
    ) -> Result<Option<Directions>, ShardError> {
        let (context, group) = (&self.context, &self.groups[position]);
        let update = self.group_update(position);
        let mut state = group.state();
        let Some(mut gradient) = state.take_reduced() else { return Ok(None) };
        let shard = state.shard_mut(update.rule.slots(), &group.layout.name)?;
        backend.direct(update, shard, &mut gradient, decision)?;
        let Some(ranks) = &context.shard else {
            return Ok(Some(Directions(position, Pending::Here(gradient))));
        };
        let numel = group.layout.padded_numel();
        let whole = match ranks.shares_gathers() && gradient.is_on_host() {
            // Ranks that are threads read the same copy.
            true => Buffer::unallocated(DType::F32, numel),
            false => context.state_placement().empty(DType::F32, numel),
        };
        let work = ranks.all_gather(group.label(Phase::Optimizer), Arc::new(gradient), whole);
        Ok(Some(Directions(position, Pending::Coming(work))))
    }

    /// Transforms the matrices that this rank owns, and starts to sum the ranks' results.
    fn start_updates<B: StepBackend>(
        &self,
        Directions(position, whole): Directions,
        decision: &B::Decision,
    ) -> Result<Updates, ShardError> {
        let (context, group) = (&self.context, &self.groups[position]);
        let directions = FlatWeights::shared(Arc::new(self.arrived(whole)?));
        let zeros = context.state_placement().zeros(DType::F32, group.layout.padded_numel());
        let target = Target::new(zeros);
        let (update, device) = (self.group_update(position), context.state_device());
        for index in self.owners.owned_by(self.own_chunk(), position) {
            let parameter = &group.layout.parameters[index];
            let step = B::step_of(decision, &update.settings[index]);
            let mut state = group.state();
            let slots = state.owned_mut(index, update.rule.owned_slots(), &group.layout)?;
            transform(update.rule, parameter, &directions, &target, &device, step, slots)
                .map_err(|reason| ShardError::Update { name: parameter.name.clone(), reason })?;
        }
        drop(directions);
        let updates = target.into_buffer();
        let label = group.label(Phase::Optimizer);
        let pending = match (&context.shard, &context.replicate) {
            (Some(ranks), _) => {
                let len = updates.len() / ranks.world_size();
                let shard = context.state_placement().empty(DType::F32, len);
                Pending::Coming(ranks.reduce_scatter(label, Arc::new(updates), shard))
            }
            (None, Some(replicas)) => Pending::Coming(replicas.all_reduce(label, updates)),
            (None, None) => Pending::Here(updates),
        };
        Ok(Updates(position, pending))
    }

    /// Applies the updates of a group to this rank's shard of its weights.
    fn apply<B: StepBackend>(
        &self,
        backend: &B,
        Updates(position, shard): Updates,
        decision: &B::Decision,
    ) -> Result<(), ShardError> {
        let (context, group) = (&self.context, &self.groups[position]);
        let mut updates = self.arrived(shard)?;
        if let (Some(_), Some(replicas)) = (&context.shard, &context.replicate) {
            let label = group.label(Phase::Optimizer);
            updates = self.arrived(Pending::Coming(replicas.all_reduce(label, updates)))?;
        }
        let update = self.group_update(position);
        let mut state = group.state();
        let shard = state.shard_mut(update.rule.slots(), &group.layout.name)?;
        let is_written = backend.update(update, shard, &updates, decision)?;
        group.refresh_compute_shard(&mut state, is_written)
    }

    fn arrived(&self, pending: Pending) -> Result<Buffer, ShardError> {
        match pending {
            Pending::Here(buffer) => Ok(buffer),
            Pending::Coming(work) => self.context.wait(work).ok_or_else(|| self.context.failure()),
        }
    }
}
