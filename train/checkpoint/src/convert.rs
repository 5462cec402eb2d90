//! Conversion between sharded and full checkpoints without a run: the implementation of `kiln convert`.

use std::borrow::Cow;
use std::cell::RefCell;
use std::path::Path;

use kiln_shard::ParamGroupLayout;
use kiln_sys::Meter;
use kiln_sys::files::{self, MAX_WHOLE};

use super::index::INDEX_FILE;
use super::manifest::Format;
use super::part::{self, Completion, Entry, Values};
use super::saved::Saved;
use super::{
    CONFIG_FILE, Checkpoint, CheckpointError, CheckpointReader, Result, SaveContext, full, verify_counted,
};
use crate::weights::{NotFinite, Weights as _};

/// Writes a checkpoint in another format, or for another number of ranks, into the new folder `out`. Its
/// files are the same as if a run of that many ranks had written them. Holds one parameter at a time.
///
/// # Errors
///
/// If `out` exists, the checkpoint is damaged, a weight is not finite, or a file cannot be read or written.
pub fn convert(checkpoint: &Checkpoint, out: &Path, format: Format, ranks: usize) -> Result<()> {
    convert_counted(checkpoint, out, format, ranks, &Meter::default())
}

/// Like [`convert`]. `meter` counts the bytes that are compared with their checksums, then the bytes written.
///
/// # Errors
///
/// As for [`convert`].
pub fn convert_counted(
    checkpoint: &Checkpoint,
    out: &Path,
    format: Format,
    ranks: usize,
    meter: &Meter,
) -> Result<()> {
    part::check_free(out)?;
    // Below, only parts of chunks are read, which cannot be checked.
    if let Some(problem) = verify_counted(checkpoint, meter).problems.into_iter().next() {
        return Err(problem);
    }
    let manifest = checkpoint.manifest();
    let config = match checkpoint.config() {
        Some(path) => {
            let text = files::read(&path, MAX_WHOLE).map_err(CheckpointError::io("read", &path))?;
            Some(String::from_utf8(text).map_err(|error| CheckpointError::damaged(&path, error))?)
        }
        None => None,
    };
    let data: Vec<&str> =
        manifest.tensors.iter().flat_map(|t| &t.chunks).map(|chunk| chunk.file.as_str()).collect();
    let others = manifest.files.keys().filter(|name| {
        !data.contains(&name.as_str()) && name.as_str() != CONFIG_FILE && name.as_str() != INDEX_FILE
    });
    let file = |name: &String| {
        let path = checkpoint.folder().join(name);
        let content = files::read(&path, MAX_WHOLE).map_err(CheckpointError::io("read", &path))?;
        Ok((name.clone(), content.into()))
    };
    let context = SaveContext {
        optimizer: manifest.optimizer.clone(),
        state: manifest.state.clone(),
        config,
        files: others.map(file).collect::<Result<_>>()?,
    };
    meter.begin(manifest.bytes());
    let mut source = Source {
        reader: checkpoint.reader(),
        layout: manifest.layout(ranks),
        found: RefCell::default(),
        meter,
    };
    let layout = source.layout.clone();
    match format {
        Format::Full => full::write(
            out,
            &layout,
            &context,
            manifest.ranks,
            |group, saved| source.has(group, saved),
            |entry| Ok(source.get(&layout, entry)?.into_owned()),
            || source.check(),
        ),
        Format::Sharded => {
            let folder = part::NewFolder::create(out)?;
            let slots = context.optimizer.slots();
            let parts = (0..ranks)
                .map(|index| part::write_chunk(folder.path(), &layout, index, &slots, &mut source))
                .collect::<Result<_, _>>()?;
            source.check()?;
            let layout = &layout[..];
            let completion = Completion { format, ranks, layout, parts, context: &context };
            folder.complete(completion)
        }
    }
}

struct Source<'a> {
    reader: CheckpointReader<'a>,
    layout: Vec<ParamGroupLayout>,
    /// Weights that are not finite.
    found: RefCell<NotFinite>,
    /// Counts the bytes that are read.
    meter: &'a Meter,
}

impl Source<'_> {
    /// Fails if a weight that was read is not finite.
    fn check(&self) -> Result<()> {
        self.found.take().check(self.reader.folder(), true)
    }
}

impl Values for Source<'_> {
    fn has(&self, group: usize, saved: &Saved) -> bool {
        let first = self.layout[group].parameters.first();
        first.is_some_and(|parameter| self.reader.has(&parameter.name, saved))
    }

    fn get(&self, layout: &[ParamGroupLayout], entry: &Entry) -> Result<Cow<'_, [f32]>> {
        let name = &layout[entry.group].parameters[entry.slot].name;
        let mut values = vec![0.0; entry.range.len()];
        self.reader.read(name, &entry.saved, entry.range.clone(), &mut values)?;
        self.meter.add((values.len() * size_of::<f32>()) as u64);
        if entry.saved == Saved::Weight {
            self.found.borrow_mut().look(name, &values);
        }
        Ok(values.into())
    }
}
