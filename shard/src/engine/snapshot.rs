//! A snapshot of a rank's state, which is written while training continues.
//!
//! Taking a snapshot copies nothing. Forward and backward only read weights; only an optimizer step changes weights
//! or optimizer state. The next step copies the values that the snapshot has not released yet, and changes the
//! copies.

use std::ops::Range;
use std::sync::{Arc, OnceLock};

use kiln_collectives::{Buffer, BufferError};

use super::core::Engine;
use crate::buffers;
use crate::layout::ParamGroupLayout;
use crate::param_group::StateKind;

/// Weights and optimizer state of the chunks that one rank writes. Later steps do not change them.
pub struct Snapshot {
    groups: Vec<Vec<Values>>,
    owned: Vec<OwnedValues>,
    _alive: Arc<()>,
}

/// An owned slot of a parameter that the rank owns.
struct OwnedValues {
    /// Position of the group, and index of the parameter there.
    place: (usize, usize),
    slot: &'static str,
    values: Arc<Buffer>,
}

/// The weights or one optimizer slot of one parameter group.
struct Values {
    /// Name of the optimizer's slot; `None` for the weights.
    slot: Option<Arc<str>>,
    shard: Arc<Buffer>,
    /// The range of the chunk within the shard.
    chunk: Range<usize>,
    /// A copy of the chunk in host memory, once a chunk on a GPU has been requested.
    copy: OnceLock<Buffer>,
}

impl Values {
    fn is(&self, kind: StateKind<'_>) -> bool {
        match (kind, &self.slot) {
            (StateKind::Weight, None) => true,
            (StateKind::Slot(name), Some(slot)) => **slot == *name,
            _ => false,
        }
    }
}

impl Engine {
    /// Returns this rank's part of the current state: for every parameter group the chunk that this rank must write,
    /// [`ParamGroupLayout::own_chunk`]. Each chunk belongs to exactly one rank.
    pub fn snapshot(&self) -> Snapshot {
        let (mesh, rank) = (self.mesh(), self.context.rank);
        let alive = Arc::new(());
        let groups = self.groups.iter().map(|group| {
            let mut state = group.state();
            state.snapshot = Arc::downgrade(&alive);
            let chunk = group.layout.chunk_range(ParamGroupLayout::own_chunk(&mesh, rank));
            let start = self.shard_of(group).start;
            let values = |slot: Option<&Arc<str>>, shard: &Arc<Buffer>| Values {
                slot: slot.cloned(),
                shard: shard.clone(),
                chunk: chunk.start - start..chunk.end - start,
                copy: OnceLock::new(),
            };
            let slots = state.slots.iter().map(|slot| values(Some(&slot.name), &slot.values));
            std::iter::once(values(None, &state.master)).chain(slots).collect()
        });
        Snapshot { groups: groups.collect(), owned: self.snapshot_owned(), _alive: alive }
    }

    fn snapshot_owned(&self) -> Vec<OwnedValues> {
        let mut all = Vec::new();
        for (position, group) in self.groups.iter().enumerate() {
            let mut state = group.state();
            let update = self.group_update(position);
            for (at, slot) in update.rule.owned_slots().iter().enumerate() {
                if !self.has_owned(position, slot) {
                    continue;
                }
                for index in self.owners.owned_by(self.own_chunk(), position) {
                    state.create_owned(index, update.rule.owned_slots(), update.layout);
                    let values = state.owned[&(index, at)].clone();
                    all.push(OwnedValues { place: (position, index), slot, values });
                }
            }
        }
        all
    }
}

impl Snapshot {
    /// Returns the chunk of the parameter group at `position` in the layout, flat and padded; `None` if there are no
    /// values of this kind. A chunk on a GPU is copied, once until it is released.
    pub fn values(&self, position: usize, kind: StateKind<'_>) -> Result<Option<&[f32]>, BufferError> {
        let Some(Values { shard, chunk, copy, .. }) = self.find(position, kind) else {
            return Ok(None);
        };
        if shard.is_on_host() {
            return Ok(Some(&shard.as_slice::<f32>()?[chunk.clone()]));
        }
        let copy = match copy.get() {
            Some(copy) => copy,
            None => {
                let read = buffers::range_to_host(shard, chunk.clone())?;
                copy.get_or_init(|| read)
            }
        };
        Ok(Some(copy.as_slice()?))
    }

    /// Returns the owned slot `slot` of the parameter at `index` of the group at `position`; `None` if this rank does not
    /// own the parameter, or there are no values.
    pub fn owned(&self, position: usize, index: usize, slot: &str) -> Result<Option<&[f32]>, BufferError> {
        let found = self.owned.iter().find(|owned| owned.place == (position, index) && owned.slot == slot);
        found.map(|owned| owned.values.as_slice()).transpose()
    }

    /// Returns whether the parameter group at `position` has values of this kind.
    pub fn has(&self, position: usize, kind: StateKind<'_>) -> bool {
        self.find(position, kind).is_some()
    }

    fn find(&self, position: usize, kind: StateKind<'_>) -> Option<&Values> {
        self.groups.get(position)?.iter().find(|values| values.is(kind))
    }

    /// Releases the values of one kind of one parameter group, so that the next step need not copy them.
    pub fn release(&mut self, position: usize, kind: StateKind<'_>) {
        if let Some(group) = self.groups.get_mut(position) {
            group.retain(|values| !values.is(kind));
        }
        if let StateKind::Slot(slot) = kind {
            self.owned.retain(|owned| owned.place.0 != position || owned.slot != slot);
        }
    }
}
