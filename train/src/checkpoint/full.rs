//! Full checkpoints: whole arrays, one file per unit.

use std::borrow::Cow;
use std::collections::BTreeMap;
use std::path::Path;

use kiln_collectives::Buffer;
use kiln_shard::{Engine, UnitLayout};
use serde::Serialize;

use super::manifest::{Format, Saved, TensorEntry};
use super::part::{self, Completion, Entry, Part, PartFile};
use super::{CheckpointError, SaveContext, disk};

pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// `model.safetensors.index.json`, in the layout of Hugging Face.
#[derive(Serialize)]
struct Index<'a> {
    metadata: IndexMetadata,
    weight_map: BTreeMap<&'a str, &'a str>,
}

#[derive(Serialize)]
struct IndexMetadata {
    total_size: u64,
}

fn model_file(unit: usize, units: usize) -> String {
    format!("model-{:05}-of-{units:05}.safetensors", unit + 1)
}

fn optimizer_file(unit: usize, units: usize) -> String {
    format!("optimizer-{:05}-of-{units:05}.safetensors", unit + 1)
}

/// Writes the index of the weights; returns its name.
pub(super) fn write_index(
    folder: &Path,
    tensors: &[TensorEntry],
) -> Result<String, CheckpointError> {
    let weights = tensors.iter().filter(|tensor| tensor.saved == Saved::Weight);
    let (mut total_size, mut weight_map) = (0, BTreeMap::new());
    for tensor in weights {
        total_size += tensor.numel() * size_of::<f32>() as u64;
        if let Some(piece) = tensor.pieces.first() {
            weight_map.insert(tensor.name.as_str(), piece.file.as_str());
        }
    }
    let path = folder.join(INDEX_FILE);
    let index = Index { metadata: IndexMetadata { total_size }, weight_map };
    let mut json = serde_json::to_string_pretty(&index)
        .map_err(|error| CheckpointError::damaged(&path, error))?;
    json.push('\n');
    disk::write(&path, json.as_bytes())?;
    Ok(INDEX_FILE.to_owned())
}

/// Entries of whole parameters.
fn whole(layout: &UnitLayout, unit: usize, saved: Saved) -> Vec<Entry> {
    let parameters = layout.parameters.iter().enumerate();
    parameters
        .map(|(slot, parameter)| Entry { unit, slot, saved, range: 0..parameter.numel() })
        .collect()
}

/// Gathers every unit to rank 0, which writes it; holds one unit at a time. The others do not learn
/// whether rank 0 could. Collective.
pub(super) fn save(
    engine: &Engine,
    context: &SaveContext,
    beside: &Path,
    place: &Path,
) -> Result<(), CheckpointError> {
    let layout = &engine.layout().units;
    let mut writer = (engine.world().rank() == 0).then(|| UnitWriter::new(beside, layout));
    for unit in 0..layout.len() {
        for saved in Saved::ALL {
            // Every rank takes part in every gather, whatever rank 0 has met so far.
            let values = engine.gather_unit(unit, saved.kind())?;
            if let (Some(writer), Some(values)) = (&mut writer, &values) {
                writer.put(unit, saved, values);
            }
        }
        if let Some(writer) = &mut writer {
            writer.end_unit();
        }
    }
    match writer {
        None => Ok(()),
        Some(writer) => writer.outcome.and_then(|()| {
            let (format, ranks) = (Format::Full, engine.world().world_size());
            let parts = vec![writer.part];
            Completion { format, ranks, layout, parts, context }.complete(beside, place)
        }),
    }
}

/// Rank 0, which goes on gathering also when it cannot write any more.
struct UnitWriter<'a> {
    beside: &'a Path,
    layout: &'a [UnitLayout],
    part: Part,
    /// The optimizer's file, between its two moments.
    open: Option<PartFile>,
    outcome: Result<(), CheckpointError>,
}

impl<'a> UnitWriter<'a> {
    fn new(beside: &'a Path, layout: &'a [UnitLayout]) -> Self {
        UnitWriter { beside, layout, part: Part::default(), open: None, outcome: Ok(()) }
    }

    fn put(&mut self, unit: usize, saved: Saved, values: &Buffer) {
        if self.outcome.is_ok() {
            self.outcome = self.try_put(unit, saved, values);
        }
    }

    fn try_put(
        &mut self,
        unit: usize,
        saved: Saved,
        values: &Buffer,
    ) -> Result<(), CheckpointError> {
        let (layout, units) = (&self.layout[unit], self.layout.len());
        let mut file = match self.open.take() {
            Some(file) => file,
            None => {
                let (name, kinds) = match saved {
                    Saved::Weight => (model_file(unit, units), &Saved::ALL[..1]),
                    _ => (optimizer_file(unit, units), &Saved::ALL[1..]),
                };
                let entries = kinds.iter().flat_map(|saved| whole(layout, unit, *saved));
                PartFile::create(self.beside, name, self.layout, entries.collect())?
            }
        };
        let values = values.as_slice::<f32>()?;
        for parameter in &layout.parameters {
            file.put(&values[parameter.range()])?;
        }
        match saved {
            Saved::FirstMoment => self.open = Some(file),
            _ => file.finish(&mut self.part)?,
        }
        Ok(())
    }

    fn end_unit(&mut self) {
        self.open = None;
    }
}

/// Writes a full checkpoint to the new folder `place`, with one process and no engine: `get` gives
/// the values of whole parameters, moments where `has` says so. Holds one parameter at a time.
pub(super) fn write(
    place: &Path,
    layout: &[UnitLayout],
    context: &SaveContext,
    ranks: usize,
    has: impl Fn(usize, Saved) -> bool,
    get: impl Fn(&Entry) -> Result<Vec<f32>, CheckpointError>,
) -> Result<(), CheckpointError> {
    let folder = part::NewFolder::create(place)?;
    let mut part = Part::default();
    for (unit, unit_layout) in layout.iter().enumerate() {
        let names = [model_file(unit, layout.len()), optimizer_file(unit, layout.len())];
        for (name, kinds) in names.into_iter().zip([&Saved::ALL[..1], &Saved::ALL[1..]]) {
            let kinds = kinds.iter().filter(|saved| has(unit, **saved));
            let entries: Vec<_> =
                kinds.flat_map(|saved| whole(unit_layout, unit, *saved)).collect();
            if entries.is_empty() {
                continue;
            }
            let mut file = PartFile::create(folder.path(), name, layout, entries.clone())?;
            for entry in &entries {
                file.put(&get(entry)?)?;
            }
            file.finish(&mut part)?;
        }
    }
    let completion = Completion { format: Format::Full, ranks, layout, parts: vec![part], context };
    folder.complete(completion)
}

/// Writes weights from elsewhere as a full checkpoint without moments to the new folder `place`.
/// `layout` says in which units; every parameter of it must be among the weights.
pub fn write_full(
    place: &Path,
    weights: &dyn crate::weights::Weights,
    layout: &[UnitLayout],
    context: &SaveContext,
) -> Result<(), CheckpointError> {
    write(
        place,
        layout,
        context,
        1,
        |_, saved| saved == Saved::Weight,
        |entry| {
            let parameter = &layout[entry.unit].parameters[entry.slot];
            let mut values = vec![0.0; entry.range.len()];
            weights.read(&parameter.name, entry.range.clone(), &mut values)?;
            Ok(values)
        },
    )
}

impl part::Values for kiln_shard::Snapshot {
    fn has(&self, unit: usize, saved: Saved) -> bool {
        Self::has(self, unit, saved.kind())
    }

    fn get(&self, layout: &[UnitLayout], entry: &Entry) -> Result<Cow<'_, [f32]>, CheckpointError> {
        let values = self.values(entry.unit, entry.saved.kind())?.unwrap_or_default();
        let unit = &layout[entry.unit];
        let start = unit.parameters[entry.slot].offset + entry.range.start;
        let within = start % unit.piece;
        Ok(Cow::Borrowed(&values[within..within + entry.range.len()]))
    }

    fn done(&mut self, unit: usize, saved: Saved) {
        self.release(unit, saved.kind());
    }
}
