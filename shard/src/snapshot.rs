//! A rank's state at one moment, to be written while training goes on.
//!
//! Nothing is copied when it is taken. Forward and backward only read weights and moments; the next
//! optimizer step copies what the snapshot has not been done with by then, and changes the copy.

use std::ops::Range;
use std::sync::{Arc, OnceLock, Weak};

use kiln_collectives::{Buffer, BufferError};

use crate::engine::Engine;
use crate::error::ShardError;
use crate::flat;
use crate::layout::UnitLayout;
use crate::state::Kind;

/// Weights and moments of the pieces that one rank writes. Later steps do not change it.
pub struct Snapshot {
    units: Vec<UnitSnapshot>,
    _alive: Arc<()>,
}

struct UnitSnapshot {
    buffers: [Option<Arc<Buffer>>; KINDS.len()],
    /// Pieces of those that are on a GPU and have been asked for.
    copies: [OnceLock<Buffer>; KINDS.len()],
    /// The piece inside the buffers.
    piece: Range<usize>,
}

const KINDS: [Kind; 3] = [Kind::Weight, Kind::FirstMoment, Kind::SecondMoment];

impl Engine {
    /// This rank's part of the state as it is now: of every unit the piece that this rank is to
    /// write, [`UnitLayout::own_piece`]. All ranks together have every piece once.
    pub fn snapshot(&self) -> Snapshot {
        let (mesh, rank) = (self.mesh(), self.runtime().rank);
        let alive = Arc::new(());
        let units = self.units().iter().map(|unit| {
            let mut state = unit.state();
            state.snapshot = Arc::downgrade(&alive);
            let piece = unit.layout.piece_range(UnitLayout::own_piece(&mesh, rank));
            let start = unit.layout.shard_range(&mesh, rank).start;
            UnitSnapshot {
                buffers: KINDS.map(|kind| state.buffer(kind)),
                copies: Default::default(),
                piece: piece.start - start..piece.end - start,
            }
        });
        Snapshot { units: units.collect(), _alive: alive }
    }
}

impl Snapshot {
    /// The piece of the unit at `position` in the layout, flat, with its padding; `None` if there
    /// are no values of this kind. Copied only if it is on a GPU, and once until it is released.
    pub fn values(&self, position: usize, kind: Kind) -> Result<Option<&[f32]>, BufferError> {
        let Some((unit, index, buffer)) = self.find(position, kind) else { return Ok(None) };
        if buffer.is_on_host() {
            return Ok(Some(&buffer.as_slice::<f32>()?[unit.piece.clone()]));
        }
        let copy = match unit.copies[index].get() {
            Some(copy) => copy,
            None => {
                let copy = flat::range_to_host(buffer, unit.piece.clone())?;
                unit.copies[index].get_or_init(|| copy)
            }
        };
        Ok(Some(copy.as_slice()?))
    }

    /// Whether there are values of this kind of the unit at `position`.
    pub fn has(&self, position: usize, kind: Kind) -> bool {
        self.find(position, kind).is_some()
    }

    /// The unit, the number of the kind, and the values.
    fn find(&self, position: usize, kind: Kind) -> Option<(&UnitSnapshot, usize, &Buffer)> {
        let unit = self.units.get(position)?;
        let index = KINDS.iter().position(|known| *known == kind)?;
        Some((unit, index, unit.buffers[index].as_deref()?))
    }

    /// Lets go of the values of one kind of one unit: the next step need not copy them.
    pub fn release(&mut self, position: usize, kind: Kind) {
        if let Some(unit) = self.units.get_mut(position)
            && let Some(index) = KINDS.iter().position(|k| *k == kind)
        {
            unit.buffers[index] = None;
            unit.copies[index] = OnceLock::new();
        }
    }
}

/// `buffer` for changing in place. While a snapshot reads it, that is a copy from now on; anything
/// else that holds it is a view that pins it.
pub(crate) fn own<'a>(
    buffer: &'a mut Arc<Buffer>,
    snapshot: &Weak<()>,
    layout: &UnitLayout,
) -> Result<&'a mut Buffer, ShardError> {
    if snapshot.strong_count() > 0 && Arc::get_mut(buffer).is_none() {
        *buffer = Arc::new(flat::copy(buffer)?);
    }
    Arc::get_mut(buffer).ok_or_else(|| ShardError::Pinned { unit: layout.name.clone() })
}
