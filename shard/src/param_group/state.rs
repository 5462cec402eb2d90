//! The values that a parameter group has in memory.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use kiln_collectives::{Buffer, DType, Work};

use crate::buffers::{self, Counted, FlatWeights, Placement};
use crate::comm::Reduction;
use crate::error::ShardError;
use crate::layout::{OwnedSlot, ParamGroupLayout};
use crate::memory::{MemoryOwner, owned_by};

/// A kind of value that is kept for each element of a parameter.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum StateKind<'a> {
    /// The f32 master weight.
    Weight,
    /// The reduced gradient; exists between backward and the optimizer step.
    Gradient,
    /// A slot of the optimizer's state by its name, such as `exp_avg`; exists after the first optimizer step.
    Slot(&'a str),
}

/// The values of one parameter group on one rank.
pub(crate) struct GroupState {
    /// f32 weights of this rank's shard; kept as long as the group exists. Shared only while a gather or a snapshot
    /// reads the shard, or while the shard serves as the whole weights.
    pub(crate) master: Arc<Buffer>,
    /// This rank's shard in the compute dtype, if it is kept on the GPU
    /// ([`Policy::keeps_compute_shard`](crate::Policy::keeps_compute_shard)). Created by the first gather after an
    /// update of the master weights, and dropped by the next update unless that writes it as well.
    pub(crate) compute_shard: Option<Arc<Buffer>>,
    pub(super) weights: Weights,
    pub(super) gradient: Gradient,
    /// Number of uses in forward whose backward has not finished.
    pub(super) open_uses: usize,
    /// The optimizer's state of this rank's shard; created by the first optimizer step or by loading.
    pub(crate) slots: Vec<Slot>,
    /// The owned slots of the parameters that this rank owns, by index of the parameter and of the slot in
    /// [`Rule::owned_slots`](crate::Rule::owned_slots); on the host, created like `slots`. Shared only while a snapshot
    /// reads them.
    pub(crate) owned: BTreeMap<(usize, usize), Arc<Buffer>>,
    /// Alive as long as a snapshot reads weights and slots.
    pub(crate) snapshot: Weak<()>,
}

/// The whole weights, if they are in memory.
// One per parameter group: the difference in size does not matter.
#[allow(clippy::large_enum_variant)]
pub(super) enum Weights {
    Sharded,
    /// The gather is in progress.
    Unsharding {
        work: Work,
        counted: Counted,
    },
    /// In memory, until this reference and the last view are dropped.
    Unsharded(FlatWeights),
}

/// The gradient of a step, by its progress.
#[allow(clippy::large_enum_variant, reason = "each parameter group has one")]
pub(crate) enum Gradient {
    /// No use has had a gradient yet.
    None,
    /// The f32 gradient of the whole group so far, summed over its uses and over micro-batches that are not reduced
    /// separately. `written` says which parameters have a gradient in `flat`; the elements of the others are arbitrary.
    /// `earlier` is the reduced sum of earlier micro-batches, if there is one.
    Accumulating { flat: Buffer, written: Vec<bool>, earlier: Option<Buffer> },
    /// Being reduced.
    Reducing(Reduction),
    /// This rank's f32 shard of the sum of the micro-batches so far, until the next one has a gradient. Under the
    /// hybrid strategies, it is not summed over the replicas yet.
    Partial(Buffer),
    /// This rank's f32 shard of the gradient of the whole step.
    Reduced(Buffer),
    /// Taken by the optimizer step, or lost in a failure. There is no gradient until the next step begins.
    Taken,
}

/// A named f32 value that an optimizer keeps for each element of one shard, such as a moment. Shared only while a
/// snapshot reads it.
pub(crate) struct Slot {
    pub(crate) name: Arc<str>,
    pub(crate) values: Arc<Buffer>,
}

/// A shard for the optimizer to update in place.
pub(crate) struct ShardMut<'a> {
    pub(crate) weights: &'a mut Buffer,
    /// The shard in the compute dtype, if it is kept and neither a gather nor whole weights refer to it.
    #[cfg_attr(not(feature = "cube"), expect(dead_code))]
    pub(crate) compute: Option<&'a mut Buffer>,
    pub(crate) slots: Vec<&'a mut Buffer>,
}

impl GroupState {
    pub(super) fn new(master: Buffer) -> Self {
        GroupState {
            master: Arc::new(master),
            compute_shard: None,
            weights: Weights::Sharded,
            gradient: Gradient::None,
            open_uses: 0,
            slots: Vec::new(),
            owned: BTreeMap::new(),
            snapshot: Weak::new(),
        }
    }

    /// Returns the reduced gradient, which exists between backward and the optimizer step.
    pub(crate) fn reduced(&self) -> Option<&Buffer> {
        match &self.gradient {
            Gradient::Reduced(shard) => Some(shard),
            _ => None,
        }
    }

    /// Takes the reduced gradient, for the optimizer step.
    pub(crate) fn take_reduced(&mut self) -> Option<Buffer> {
        match std::mem::replace(&mut self.gradient, Gradient::Taken) {
            Gradient::Reduced(shard) => Some(shard),
            other => {
                self.gradient = other;
                None
            }
        }
    }

    /// Returns the current values. They are not changed in place while the returned reference exists.
    pub(crate) fn values(&self, kind: StateKind<'_>) -> Option<Arc<Buffer>> {
        match kind {
            StateKind::Weight => Some(self.master.clone()),
            StateKind::Gradient => self.reduced().cloned().map(Arc::new),
            StateKind::Slot(name) => {
                self.slots.iter().find(|slot| *slot.name == *name).map(|slot| slot.values.clone())
            }
        }
    }

    /// Returns the values for writing. Creates a missing slot with zeros; a missing gradient is an error. `group` and
    /// `parameter` are the names that errors mention.
    pub(crate) fn values_mut(
        &mut self,
        kind: StateKind<'_>,
        group: &str,
        parameter: &str,
    ) -> Result<&mut Buffer, ShardError> {
        let values = match kind {
            StateKind::Weight => {
                self.compute_shard = None;
                &mut self.master
            }
            StateKind::Gradient => {
                let Gradient::Reduced(shard) = &mut self.gradient else {
                    return Err(ShardError::NoGradient { name: parameter.to_owned() });
                };
                return Ok(shard);
            }
            StateKind::Slot(name) => {
                let index = self.slot(name);
                &mut self.slots[index].values
            }
        };
        make_mut(values, &self.snapshot, group)
    }

    /// Returns the weights and the slots `names`, in this order, for updating in place. Creates missing slots with
    /// zeros. Errors mention the name `group`.
    pub(crate) fn shard_mut(&mut self, names: &[&str], group: &str) -> Result<ShardMut<'_>, ShardError> {
        for (index, name) in names.iter().enumerate() {
            let found = self.slot(name);
            // From now on, slots are in the optimizer's order, even if a checkpoint has created them.
            self.slots.swap(index, found);
        }
        let snapshot = &self.snapshot;
        let weights = make_mut(&mut self.master, snapshot, group)?;
        let slots = self.slots.iter_mut().take(names.len());
        let slots = slots.map(|slot| make_mut(&mut slot.values, snapshot, group));
        let compute = self.compute_shard.as_mut().and_then(Arc::get_mut);
        Ok(ShardMut { weights, compute, slots: slots.collect::<Result<_, _>>()? })
    }

    /// Creates the missing owned slots of the parameter at `index`, with zeros. `names` are those of the rule; a slot that
    /// the parameter does not have is empty.
    pub(crate) fn create_owned(&mut self, index: usize, names: &[&str], layout: &ParamGroupLayout) {
        for (slot, name) in names.iter().enumerate() {
            let numel = layout.parameters[index].owned_slot(name).map_or(0, OwnedSlot::numel);
            let zeros = || owned_by(MemoryOwner::OptimizerState, || Buffer::zeros(DType::F32, numel));
            self.owned.entry((index, slot)).or_insert_with(|| Arc::new(zeros()));
        }
    }

    /// Returns the owned slots `names` of the parameter at `index`, in this order, for updating in place. Creates missing
    /// slots.
    pub(crate) fn owned_mut(
        &mut self,
        index: usize,
        names: &[&str],
        layout: &ParamGroupLayout,
    ) -> Result<Vec<&mut [f32]>, ShardError> {
        self.create_owned(index, names, layout);
        let snapshot = &self.snapshot;
        let slots = self.owned.range_mut((index, 0)..(index + 1, 0));
        slots
            .map(|(_, values)| Ok(make_mut(values, snapshot, &layout.name)?.as_mut_slice::<f32>()?))
            .collect()
    }

    /// Returns the index of the slot `name`; creates it with zeros if it is missing.
    pub(crate) fn slot(&mut self, name: &str) -> usize {
        if let Some(index) = self.slots.iter().position(|slot| *slot.name == *name) {
            return index;
        }
        let placement = Placement::from_buffer(&self.master);
        let values = owned_by(MemoryOwner::OptimizerState, || placement.zeros(DType::F32, self.master.len()));
        let values = Arc::new(values);
        self.slots.push(Slot { name: name.into(), values });
        self.slots.len() - 1
    }
}

/// Returns `buffer` for updating in place. If a snapshot reads the buffer, it is copied first. Any other reference is
/// a view that keeps the buffer alive, which is an error.
pub(crate) fn make_mut<'a>(
    buffer: &'a mut Arc<Buffer>,
    snapshot: &Weak<()>,
    group: &str,
) -> Result<&'a mut Buffer, ShardError> {
    if snapshot.strong_count() > 0 && Arc::get_mut(buffer).is_none() {
        *buffer = Arc::new(buffers::copy(buffer)?);
    }
    Arc::get_mut(buffer).ok_or_else(|| ShardError::Pinned { group: group.to_owned() })
}
