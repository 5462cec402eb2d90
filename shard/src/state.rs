//! Whole values in and out of the shards: for checkpoints, and for whoever wants to look.

use std::ops::Range;
use std::sync::Arc;

use kiln_collectives::{Buffer, BufferError, DType, Label, Phase};

use crate::engine::Engine;
use crate::error::ShardError;
use crate::flat::{self, Placement};
use crate::layout::UnitLayout;
use crate::snapshot::own;
use crate::unit::{Moments, Unit, UnitState};

/// Which of the values kept per parameter element.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The f32 master weight.
    Weight,
    /// The reduced gradient; there between backward and the optimizer step.
    Gradient,
    /// First moment of AdamW; there after the first optimizer step.
    FirstMoment,
    /// Second moment of AdamW; there after the first optimizer step.
    SecondMoment,
}

impl UnitState {
    /// The buffer, as it is now: whoever holds it keeps it from being changed in place.
    pub(crate) fn buffer(&self, kind: Kind) -> Option<Arc<Buffer>> {
        match kind {
            Kind::Weight => Some(self.master.clone()),
            Kind::Gradient => self.reduced.clone().map(Arc::new),
            Kind::FirstMoment => self.moments.as_ref().map(|moments| moments.first.clone()),
            Kind::SecondMoment => self.moments.as_ref().map(|moments| moments.second.clone()),
        }
    }

    /// The buffer for writing. Moments are made if there are none; a gradient cannot be. A snapshot
    /// keeps what it has.
    fn buffer_mut(
        &mut self,
        kind: Kind,
        layout: &UnitLayout,
        name: &str,
    ) -> Result<&mut Buffer, ShardError> {
        let UnitState { master, working, moments, snapshot, reduced, .. } = self;
        let buffer = match kind {
            Kind::Weight => {
                *working = None;
                master
            }
            Kind::Gradient => {
                let none = || ShardError::NoGradient { name: name.to_owned() };
                return reduced.as_mut().ok_or_else(none);
            }
            Kind::FirstMoment => &mut moments.get_or_insert_with(|| Moments::like(master)).first,
            Kind::SecondMoment => &mut moments.get_or_insert_with(|| Moments::like(master)).second,
        };
        own(buffer, snapshot, layout)
    }
}

impl Engine {
    /// The whole values of the unit at `position` in the layout, flat and padded, on every rank;
    /// `None` if there are none of this kind. Holds one unit in memory. Collective.
    pub fn gather_unit(&self, position: usize, kind: Kind) -> Result<Option<Buffer>, ShardError> {
        let runtime = self.runtime();
        runtime.check()?;
        let Some(unit) = self.units().get(position) else { return Ok(None) };
        let Some(shard) = unit.state().buffer(kind) else { return Ok(None) };
        let Some(group) = &runtime.shard else {
            return Ok(Some(flat::on_host(&shard)?.into_owned()));
        };
        let whole = Placement::of_buffer(&shard).empty(DType::F32, unit.layout.padded_numel());
        let label = Label::new(unit.layout.name.as_str(), Phase::Checkpoint);
        let whole = runtime.wait(group.all_gather(label, shard, whole));
        runtime.check()?;
        Ok(whole.map(flat::into_host).transpose()?)
    }

    /// The whole values of one parameter on every rank. Gathers its unit; see
    /// [`Engine::gather_unit`]. Collective.
    pub fn gather_parameter(&self, name: &str, kind: Kind) -> Result<Option<Vec<f32>>, ShardError> {
        let (unit, slot) = self.find(name)?;
        let range = unit.layout.parameters[slot].range();
        let Some(whole) = self.gather_unit(unit.position, kind)? else { return Ok(None) };
        Ok(Some(whole.as_slice::<f32>()?[range].to_vec()))
    }

    /// Replaces this rank's part of one parameter's values; `values` are all of them.
    pub fn load_parameter(&self, name: &str, kind: Kind, values: &[f32]) -> Result<(), ShardError> {
        let (unit, slot) = self.find(name)?;
        let parameter = &unit.layout.parameters[slot];
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

    /// Lets `fill(range, values)` write this rank's part of one parameter's values, in place:
    /// elements `range` of the flat parameter. It is not called where this rank holds none. Moments
    /// are made if there are none, also then: all ranks have moments, or none. A gradient is there
    /// from the backward of the last micro-batch to the optimizer step.
    pub fn fill_parameter<E: From<ShardError> + From<BufferError>>(
        &self,
        name: &str,
        kind: Kind,
        fill: impl FnOnce(Range<usize>, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let (unit, slot) = self.find(name)?;
        let mut state = unit.state();
        let buffer = state.buffer_mut(kind, &unit.layout, name)?;
        let shard = unit.layout.shard_range(&self.mesh(), self.runtime().rank);
        let (held, range) = unit.layout.parameters[slot].held_by(&shard);
        if held.is_empty() {
            return Ok(());
        }
        flat::write(buffer, held, |values| fill(range, values))
    }

    /// What `read(range, values)` makes of this rank's part of one parameter's values, which are elements
    /// `range` of the flat parameter; `None` if this rank holds none, or there are none of this kind.
    /// Replicas hold the same: [`Engine::sum_over_shards`] makes a sum over the whole of such parts.
    pub fn read_parameter<T>(
        &self,
        name: &str,
        kind: Kind,
        read: impl FnOnce(Range<usize>, &[f32]) -> T,
    ) -> Result<Option<T>, ShardError> {
        let (unit, slot) = self.find(name)?;
        let Some(buffer) = unit.state().buffer(kind) else { return Ok(None) };
        let shard = unit.layout.shard_range(&self.mesh(), self.runtime().rank);
        let (held, range) = unit.layout.parameters[slot].held_by(&shard);
        if held.is_empty() {
            return Ok(None);
        }
        Ok(Some(read(range, &flat::on_host(&buffer)?.as_slice::<f32>()?[held])))
    }

    /// Elements of the flat parameter `name` that this rank holds; empty if there are none.
    pub fn held(&self, name: &str) -> Result<Range<usize>, ShardError> {
        let (unit, slot) = self.find(name)?;
        let shard = unit.layout.shard_range(&self.mesh(), self.runtime().rank);
        Ok(unit.layout.parameters[slot].held_by(&shard).1)
    }

    fn find(&self, name: &str) -> Result<(&Arc<Unit>, usize), ShardError> {
        self.units()
            .iter()
            .find_map(|unit| {
                let slot = unit.layout.parameters.iter().position(|p| p.name == name)?;
                Some((unit, slot))
            })
            .ok_or_else(|| ShardError::UnknownParameter { name: name.to_owned() })
    }
}
