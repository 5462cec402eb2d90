//! Reading and writing whole values through the shards, for checkpoints and inspection.

use std::ops::Range;
use std::sync::atomic::Ordering;

use kiln_collectives::{Buffer, BufferError, DType, Label, Phase};

use super::core::Engine;
use crate::buffers::{self, Placement};
use crate::error::ShardError;
use crate::layout::ParamGroupLayout;
use crate::param_group::{ParamGroup, StateKind};

impl Engine {
    /// Returns the whole values of the parameter group at `position` in the layout, flat and padded, on every
    /// rank; `None` if there are none of this kind. Holds one group in memory. Collective.
    pub fn gather_group(&self, position: usize, kind: StateKind<'_>) -> Result<Option<Buffer>, ShardError> {
        let context = &self.context;
        context.check()?;
        let Some(group) = self.groups.get(position) else { return Ok(None) };
        let Some(shard) = group.state().values(kind) else { return Ok(None) };
        let Some(ranks) = &context.shard else {
            return Ok(Some(buffers::on_host(&shard)?.into_owned()));
        };
        let whole = Placement::from_buffer(&shard).empty(DType::F32, group.layout.padded_numel());
        let label = Label::new(group.layout.name.as_str(), Phase::Checkpoint);
        let whole = context.wait(ranks.all_gather(label, shard, whole));
        context.check()?;
        Ok(whole.map(buffers::into_host).transpose()?)
    }

    /// Returns the whole values of one parameter, or one of its owned slots, on every rank. Gathers its group; see
    /// [`Engine::gather_group`]. Collective.
    pub fn gather_parameter(&self, name: &str, kind: StateKind<'_>) -> Result<Option<Vec<f32>>, ShardError> {
        let (group, index) = self.find(name)?;
        let position = group.options.position;
        if let StateKind::Slot(slot) = kind
            && self.has_owned(position, slot)
        {
            return self.gather_owned_of(position, index, slot);
        }
        let range = group.layout.parameters[index].range();
        let Some(whole) = self.gather_group(position, kind)? else {
            return Ok(None);
        };
        Ok(Some(whole.as_slice::<f32>()?[range].to_vec()))
    }

    /// Replaces this rank's part of one parameter's values; `values` are the whole parameter.
    pub fn load_parameter(&self, name: &str, kind: StateKind<'_>, values: &[f32]) -> Result<(), ShardError> {
        let (group, index) = self.find(name)?;
        let parameter = &group.layout.parameters[index];
        if values.len() != parameter.numel() {
            return Err(ShardError::WrongLength {
                name: name.to_owned(),
                shape: parameter.shape.clone(),
                expected: parameter.numel(),
                found: values.len(),
            });
        }
        self.fill_parameter(name, kind, |range, held| {
            held.copy_from_slice(&values[range]);
            Ok(())
        })
    }

    /// Calls `fill(range, values)` to write this rank's part of one parameter's values in place: elements `range` of
    /// the flat parameter. Not called if this rank holds no part of the parameter. Missing optimizer slots are
    /// created even then, so that all ranks have them. A gradient exists from the backward of the last micro-batch to
    /// the optimizer step.
    pub fn fill_parameter<E: From<ShardError> + From<BufferError>>(
        &self,
        name: &str,
        kind: StateKind<'_>,
        fill: impl FnOnce(Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (group, held, range) = self.locate(name)?;
        let mut state = group.state();
        let buffer = state.values_mut(kind, &group.layout.name, name)?;
        if held.is_empty() {
            return Ok(());
        }
        buffers::write(buffer, held, |values| fill(range, values))
    }

    /// Exchanges the weights with the values of `slot`, such as averaged weights, on this rank's shard; calling it again
    /// restores them. Parameters without values in the slot keep their weights. Not collective.
    ///
    /// # Errors
    ///
    /// If no rule has the slot.
    pub fn swap_weights(&self, slot: &str) -> Result<(), ShardError> {
        let known = self.optimizer.slots();
        if !known.contains(&slot) {
            return Err(ShardError::UnknownSlot { slot: slot.to_owned(), known });
        }
        for (_, parameter) in self.layout.parameters() {
            let (name, slot) = (&parameter.name, StateKind::Slot(slot));
            let others = self.read_parameter(name, slot, |_, values| values.to_vec())?;
            let Some(mut others) = others else { continue };
            self.fill_parameter(name, StateKind::Weight, |_, weights| {
                weights.swap_with_slice(&mut others);
                Ok::<_, ShardError>(())
            })?;
            self.fill_parameter(name, slot, |_, values| {
                values.copy_from_slice(&others);
                Ok::<_, ShardError>(())
            })?;
        }
        Ok(())
    }

    /// Returns whether `slot` is an owned slot of the group at `position` that has values: those of a group exist from the
    /// first update on. The same on all ranks.
    pub fn has_owned(&self, position: usize, slot: &str) -> bool {
        let group = self.layout.groups.get(position);
        self.updates.load(Ordering::Relaxed) > 0 && group.is_some_and(|group| group.owns(slot))
    }

    /// Returns the owned slot `slot` of all parameters of the group at `position` that have it, one after the other, on
    /// every rank; `None` if there are no values. Collective.
    pub fn gather_owned(&self, position: usize, slot: &str) -> Result<Option<Buffer>, ShardError> {
        self.context.check()?;
        if !self.has_owned(position, slot) {
            return Ok(None);
        }
        let parameters = 0..self.groups[position].layout.parameters.len();
        let values = parameters.map(|index| self.gather_owned_of(position, index, slot));
        let values =
            values.map(|values| Ok(values?.unwrap_or_default())).collect::<Result<Vec<_>, ShardError>>();
        Ok(Some(Buffer::from_slice(&values?.concat())))
    }

    /// Returns the owned slot `slot` of one parameter on every rank; `None` if the parameter does not have it. Collective.
    fn gather_owned_of(
        &self,
        position: usize,
        index: usize,
        slot: &str,
    ) -> Result<Option<Vec<f32>>, ShardError> {
        let (context, layout) = (&self.context, &self.groups[position].layout);
        let parameter = &layout.parameters[index];
        let (Some(owned), Some(owner)) = (parameter.owned_slot(slot), self.owners.owner(position, index))
        else {
            return Ok(None);
        };
        let mut values = Buffer::zeros(DType::F32, owned.numel());
        let copy = |mine: &[f32]| -> Result<(), BufferError> {
            values.as_mut_slice()?.copy_from_slice(mine);
            Ok(())
        };
        self.read_owned(&parameter.name, slot, copy)?.transpose()?;
        let mut ranks = 0..context.world.world_size();
        let root = ranks.find(|rank| ParamGroupLayout::own_chunk(&context.mesh, *rank) == owner);
        let label = Label::new(layout.name.as_str(), Phase::Checkpoint);
        let values = context.wait(context.world.broadcast(label, values, root.unwrap_or(0)));
        context.check()?;
        Ok(values.map(|values| values.as_slice::<f32>().map(<[f32]>::to_vec)).transpose()?)
    }

    /// Returns whether this rank owns the parameter `name`, whose rule works on whole matrices.
    pub fn is_owner(&self, name: &str) -> Result<bool, ShardError> {
        let (group, index) = self.find(name)?;
        Ok(self.owners.owner(group.options.position, index) == Some(self.own_chunk()))
    }

    /// Returns the result of `read` for the owned slot `slot` of the parameter `name`; `None` if this rank does not own the
    /// parameter, or there are no values.
    pub fn read_owned<T>(
        &self,
        name: &str,
        slot: &str,
        read: impl FnOnce(&[f32]) -> T,
    ) -> Result<Option<T>, ShardError> {
        let (group, index) = self.find(name)?;
        let names = self.group_update(group.options.position).rule.owned_slots();
        let at = names.iter().position(|name| *name == slot);
        let values = at.and_then(|at| group.state().owned.get(&(index, at)).cloned());
        Ok(values.map(|values| values.as_slice::<f32>().map(read)).transpose()?)
    }

    /// Calls `fill` to write the owned slot `slot` of the parameter `name` in place, if this rank owns the parameter.
    /// Creates a missing slot.
    pub fn fill_owned<E: From<ShardError>>(
        &self,
        name: &str,
        slot: &str,
        fill: impl FnOnce(&mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (group, index) = self.find(name)?;
        let names = self.group_update(group.options.position).rule.owned_slots();
        let Some(at) = names.iter().position(|name| *name == slot) else { return Ok(()) };
        if !self.is_owner(name)? {
            return Ok(());
        }
        fill(&mut *group.state().owned_mut(index, names, &group.layout)?[at])
    }

    /// Creates the missing optimizer slots, filled with zeros, in every parameter group that already has some slots,
    /// so that each group has either all of its slots or none.
    pub fn complete_slots(&self) {
        for (group, rule) in self.groups.iter().zip(&self.rules) {
            let mut state = group.state();
            if !state.slots.is_empty() {
                let slots = self.optimizer.rule(rule.rule).slots();
                slots.iter().for_each(|name| _ = state.slot(name));
            }
        }
    }

    /// Returns the names of the optimizer slots of the group at `position` in the layout; none if the group is
    /// frozen.
    pub fn slots_of_group(&self, position: usize) -> &[&'static str] {
        match self.groups.get(position) {
            Some(group) if group.layout.trainable => self.group_update(position).rule.slots(),
            _ => &[],
        }
    }

    /// Returns the result of `read(range, values)` for this rank's part of one parameter's values, which are elements
    /// `range` of the flat parameter. `None` if this rank holds no part, or there are no values of this kind.
    /// Replicas hold the same values: use [`Engine::sum_over_shards`] to sum such results over the whole parameter.
    pub fn read_parameter<T>(
        &self,
        name: &str,
        kind: StateKind<'_>,
        read: impl FnOnce(Range<usize>, &[f32]) -> T,
    ) -> Result<Option<T>, ShardError> {
        let (group, held, range) = self.locate(name)?;
        let Some(buffer) = group.state().values(kind) else { return Ok(None) };
        if held.is_empty() {
            return Ok(None);
        }
        Ok(Some(read(range, &buffers::on_host(&buffer)?.as_slice::<f32>()?[held])))
    }

    /// Returns the result of `read` for the chunk of the parameter group at `position` in the layout that this rank
    /// must write, [`ParamGroupLayout::own_chunk`]: flat and padded. Each chunk belongs to exactly one rank, under
    /// every strategy. `None` if there are no values of this kind.
    pub fn read_chunk<T>(
        &self,
        position: usize,
        kind: StateKind<'_>,
        read: impl FnOnce(&[f32]) -> T,
    ) -> Result<Option<T>, ShardError> {
        let Some(group) = self.groups.get(position) else { return Ok(None) };
        let Some(buffer) = group.state().values(kind) else { return Ok(None) };
        let own = ParamGroupLayout::own_chunk(&self.mesh(), self.context.rank);
        let (chunk, start) = (group.layout.chunk_range(own), self.shard_of(group).start);
        let within = chunk.start - start..chunk.end - start;
        Ok(Some(read(&buffers::on_host(&buffer)?.as_slice::<f32>()?[within])))
    }

    /// Returns the range of elements of the flat parameter `name` that this rank holds; empty if it holds none.
    pub fn held(&self, name: &str) -> Result<Range<usize>, ShardError> {
        Ok(self.locate(name)?.2)
    }

    /// Returns the group of parameter `name` and the range of this rank's part, first within the rank's shard and
    /// then within the parameter.
    fn locate(&self, name: &str) -> Result<(&ParamGroup, Range<usize>, Range<usize>), ShardError> {
        let (group, index) = self.find(name)?;
        let (held, range) = group.layout.parameters[index].held_by(&self.shard_of(group));
        Ok((group, held, range))
    }

    fn find(&self, name: &str) -> Result<(&ParamGroup, usize), ShardError> {
        self.groups
            .iter()
            .find_map(|group| {
                let index = group.layout.parameters.iter().position(|p| p.name == name)?;
                Some((&**group, index))
            })
            .ok_or_else(|| ShardError::UnknownParameter { name: name.to_owned() })
    }
}
