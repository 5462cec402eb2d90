//! Agreement of all ranks at the start: the same model, the same policy, the same first values.

use std::hash::{DefaultHasher, Hash, Hasher};
use std::sync::Arc;

use kiln_collectives::{Buffer, DType, Label, Phase};

use super::core::Engine;
use crate::error::ShardError;

impl Engine {
    /// Checks that all ranks have built the same model under the same policy. Collective.
    pub(super) fn compare_plans(&self) -> Result<(), ShardError> {
        let context = &self.context;
        let mut hasher = DefaultHasher::new();
        format!("{:?} {:?}", context.policy, self.layout).hash(&mut hasher);
        // They decide about broadcasts.
        self.groups.iter().for_each(|group| group.options().is_initialised.hash(&mut hasher));
        let plan = Buffer::from_slice(&hasher.finish().to_le_bytes());
        let all = Buffer::zeros(DType::U8, plan.len() * context.world.world_size());
        let label = Label::new("plan", Phase::Init);
        let work = context.world.all_gather(label, Arc::new(plan), all);
        let Some(all) = context.wait(work) else { return context.check() };
        let plans: Vec<_> = all.as_bytes().chunks(size_of::<u64>()).collect();
        let ranks: Vec<_> = (0..plans.len()).filter(|rank| plans[*rank] != plans[0]).collect();
        if ranks.is_empty() { Ok(()) } else { Err(ShardError::PlanMismatch { ranks }) }
    }

    /// Copies the first replica's initial weights to the others. Collective.
    pub(super) fn broadcast_replicas(&self) -> Result<(), ShardError> {
        let Some(replicate) = &self.context.replicate else { return Ok(()) };
        for group in self.groups.iter().filter(|group| group.options().is_initialised) {
            // Moved out, so that no second copy is needed.
            let empty = Arc::new(Buffer::zeros(DType::F32, 0));
            let master = std::mem::replace(&mut group.state().master, empty);
            let master = Arc::try_unwrap(master)
                .map_err(|_| ShardError::Pinned { group: group.layout.name.clone() })?;
            let work = replicate.broadcast(group.label(Phase::Init), master, 0);
            if let Some(master) = self.context.wait(work) {
                group.state().master = Arc::new(master);
            }
        }
        self.context.check()
    }
}
