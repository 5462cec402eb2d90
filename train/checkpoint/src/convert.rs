//! Verifies checkpoints, and converts between sharded and full ones, for `kiln inspect --verify` and `kiln convert`.

use std::borrow::Cow;
use std::collections::HashSet;
use std::path::Path;

use kiln_shard::{Owners, ParamGroupLayout};
use kiln_sys::Meter;
use kiln_sys::files::{self, MAX_WHOLE};
use rayon::prelude::*;

use super::manifest::{Chunk, FileEntry, Format, TensorEntry, WIDTH, check_plain_file};
use super::origin::Saved;
use super::tensor_file::TensorFile;
use super::weights::NotFinite;
use super::write::{self, Completion, Entry, INDEX_FILE, NewFolder, Part, Values, kinds_of};
use super::{CONFIG_FILE, Checkpoint, CheckpointError, CheckpointReader, Result, SaveContext};

/// The result of verifying every byte of a checkpoint.
#[derive(Debug)]
pub struct Verified {
    /// Number of verified files, without the manifest.
    pub files: usize,
    /// Total size of these files, according to the manifest.
    pub bytes: u64,
    /// Problems found, in the order of the files.
    pub problems: Vec<CheckpointError>,
}

/// Reads all files of a checkpoint and compares them with the manifest.
pub fn verify(checkpoint: &Checkpoint) -> Verified {
    verify_counted(checkpoint, &Meter::default())
}

fn verify_counted(checkpoint: &Checkpoint, meter: &Meter) -> Verified {
    let manifest = checkpoint.manifest();
    meter.begin(manifest.bytes());
    let files: Vec<_> = manifest.files.iter().collect();
    let problems =
        files.par_iter().flat_map_iter(|(name, entry)| verify_file(checkpoint, name, entry, meter));
    Verified { files: files.len(), bytes: manifest.bytes(), problems: problems.collect() }
}

fn verify_file(
    checkpoint: &Checkpoint,
    name: &str,
    entry: &FileEntry,
    meter: &Meter,
) -> Vec<CheckpointError> {
    let tensors = checkpoint.manifest().tensors.iter();
    let chunks = tensors.flat_map(|tensor| tensor.chunks.iter().map(move |chunk| (tensor, chunk)));
    let chunks: Vec<_> = chunks.filter(|(_, chunk)| chunk.file == name).collect();
    if chunks.is_empty() {
        return check_plain_file(checkpoint.folder(), name, entry).err().into_iter().collect();
    }
    let file = match TensorFile::open(checkpoint.folder().join(name), entry) {
        Ok(file) => file,
        Err(error) => return vec![error],
    };
    let wrong = |(tensor, chunk): (&TensorEntry, &Chunk)| {
        let key = tensor.key();
        let checksum = file.checksum(&key, chunk.length);
        meter.add(chunk.length * WIDTH);
        match checksum {
            Ok(checksum) if checksum == chunk.checksum => None,
            Ok(_) => Some(CheckpointError::damaged_tensor(&file.path, &key)),
            Err(error) => Some(error),
        }
    };
    chunks.into_iter().filter_map(wrong).collect()
}

/// Writes a checkpoint in another format or for another number of ranks into the new folder `out`, with the files that
/// such a run would write. Holds one parameter in memory at a time. Fails if `out` exists, the checkpoint is damaged,
/// or a weight is not finite.
pub fn convert(
    checkpoint: &Checkpoint,
    out: &Path,
    format: Format,
    ranks: usize,
    meter: &Meter,
) -> Result<()> {
    write::check_free(out)?;
    // Verify first: the code below reads parts of chunks, whose checksums it cannot check.
    if let Some(problem) = verify_counted(checkpoint, meter).problems.into_iter().next() {
        return Err(problem);
    }
    let manifest = checkpoint.manifest();
    let read = |name: &str| {
        let path = checkpoint.folder().join(name);
        files::read(&path, MAX_WHOLE).map_err(CheckpointError::io("read", &path))
    };
    let config = match checkpoint.config() {
        Some(path) => Some(
            String::from_utf8(read(CONFIG_FILE)?).map_err(|error| CheckpointError::damaged(&path, error))?,
        ),
        None => None,
    };
    let chunks = manifest.tensors.iter().flat_map(|tensor| &tensor.chunks);
    let rewritten = chunks.map(|chunk| chunk.file.as_str()).chain([CONFIG_FILE, INDEX_FILE]);
    let rewritten: HashSet<_> = rewritten.collect();
    let others = manifest.files.keys().filter(|name| !rewritten.contains(name.as_str()));
    let context = SaveContext {
        optimizer: manifest.optimizer.clone(),
        state: manifest.state.clone(),
        config,
        files: others.map(|name| Ok((name.clone(), read(name)?.into()))).collect::<Result<_>>()?,
        base: manifest.base.clone(),
    };
    meter.begin(manifest.bytes());
    let layout = &manifest.layout(ranks)[..];
    let mut source = Source { reader: checkpoint.reader(), found: NotFinite::default(), meter };
    let has = |group: usize, saved: &Saved| {
        layout[group].parameters.iter().any(|parameter| source.reader.has(&parameter.name, saved))
    };
    let kinds = &kinds_of(format, layout.len(), context.optimizer.slots(), has);
    let folder = NewFolder::create(out)?;
    let chunks = match format {
        Format::Full => vec![None],
        Format::Sharded => (0..ranks).map(Some).collect(),
    };
    // A run spreads the matrices of all its rules; here, only those with owned slots are known.
    let owners = &Owners::new(layout, |at| layout[at].parameters.iter().any(|p| !p.owned_slots.is_empty()));
    let part = |chunk| Part { layout, kinds, chunk, owners };
    let outputs = chunks.into_iter().map(|chunk| part(chunk).write(folder.path(), &mut source));
    let outputs = outputs.collect::<Result<_>>()?;
    source.found.check(checkpoint.folder(), true)?;
    let ranks = if format == Format::Full { manifest.ranks } else { ranks };
    Completion { format, ranks, layout, outputs, context: &context }.complete(folder.path())?;
    folder.commit()
}

struct Source<'a> {
    reader: CheckpointReader<'a>,
    found: NotFinite,
    meter: &'a Meter,
}

impl Values for Source<'_> {
    fn get(&mut self, layout: &[ParamGroupLayout], entry: &Entry) -> Result<Cow<'_, [f32]>> {
        let name = &layout[entry.group].parameters[entry.slot].name;
        let mut values = vec![0.0; entry.range.len()];
        self.reader.read(name, &entry.saved, entry.range.clone(), &mut values)?;
        self.meter.add(values.len() as u64 * WIDTH);
        if entry.saved == Saved::Weight {
            self.found.check_values(name, &values);
        }
        Ok(values.into())
    }
}
