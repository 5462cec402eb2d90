use std::collections::{BTreeMap, BTreeSet, HashMap, VecDeque};
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use bytemuck::{Pod, Zeroable};
use kiln_collectives::Phase;
use kiln_shard::Engine;
use kiln_sys::Meter;

use super::manifest::WIDTH;
use super::origin::Saved;
use super::source::ModelSource;
use super::tensor_file::TensorFile;
use super::weights::{self, AllowMissing, Weights};
use super::{Checkpoint, CheckpointError, CheckpointState, Checksum, Result, SavedOptimizer};

/// Maximum number of bytes requested from the disk but not yet copied.
const AHEAD: usize = 32 << 20;

/// Bytes per prefetch request.
const STEP: usize = 4 << 20;

/// Reads from a checkpoint, and verifies the checksums of chunks, even of those that ranks read in parts.
pub struct CheckpointReader<'a> {
    checkpoint: &'a Checkpoint,
    tensors: HashMap<(&'a str, &'a Saved), usize>,
    files: Mutex<HashMap<&'a str, Arc<TensorFile>>>,
    parts: Mutex<Vec<ReadPart>>,
    ahead: Mutex<ReadAhead>,
    bytes_read: AtomicU64,
    meter: Arc<Meter>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Pod, Zeroable)]
#[repr(C)]
struct ReadPart {
    tensor: u64,
    chunk: u64,
    /// First element, counted from the start of the chunk.
    start: u64,
    length: u64,
    checksum: Checksum,
}

/// Byte ranges that a rank will read, in order. Requests them early, to keep the disk busy.
#[derive(Default)]
struct ReadAhead {
    left: VecDeque<(Arc<TensorFile>, Range<usize>)>,
    under_way: usize,
}

impl ReadAhead {
    fn plan(&mut self, file: &Arc<TensorFile>, bytes: Range<usize>) {
        let starts = bytes.clone().step_by(STEP);
        self.left.extend(starts.map(|at| (file.clone(), at..(at + STEP).min(bytes.end))));
    }

    fn advance(&mut self, copied: usize) {
        self.under_way = self.under_way.saturating_sub(copied);
        while self.under_way < AHEAD
            && let Some((file, bytes)) = self.left.pop_front()
        {
            self.under_way += bytes.len();
            file.prefetch(bytes);
        }
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    // The data is consistent at every moment, so it is valid after a panic.
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Loads weights and optimizer state of the newest checkpoint of the run in `out` into the engine. Returns the position
/// of the run, or `None` without a change if there is no checkpoint. Collective.
///
/// # Errors
///
/// If the checkpoint is damaged, has parameters of other names or shapes or another optimizer, or the ranks lose
/// contact.
pub fn resume(engine: &Engine, out: &Path) -> Result<Option<CheckpointState>> {
    if !Checkpoint::is_in(out) {
        return Ok(None);
    }
    let checkpoint = Checkpoint::open(&Checkpoint::find_latest(out)?)?;
    let nothing = AllowMissing::default();
    ModelSource::from_checkpoint(checkpoint.clone(), None)?.load_weights(engine, &nothing)?;
    checkpoint.reader().load_optimizer(engine, &nothing)?;
    Ok(Some(checkpoint.state().clone()))
}

impl Checkpoint {
    /// Returns a reader of weights and optimizer slots.
    pub fn reader(&self) -> CheckpointReader<'_> {
        let tensors = self.manifest().tensors.iter().enumerate();
        CheckpointReader {
            checkpoint: self,
            tensors: tensors.map(|(i, t)| ((t.name.as_str(), &t.saved), i)).collect(),
            files: Mutex::default(),
            parts: Mutex::default(),
            ahead: Mutex::default(),
            bytes_read: AtomicU64::new(0),
            meter: Arc::default(),
        }
    }
}

impl<'a> CheckpointReader<'a> {
    /// Returns the number of bytes of data read so far.
    pub fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Returns the meter of the bytes loaded: first of the weights, then of the optimizer's state.
    pub fn meter(&self) -> Arc<Meter> {
        self.meter.clone()
    }

    /// Reports whether the checkpoint contains the values `saved` of parameter `name`.
    pub fn has(&self, name: &str, saved: &Saved) -> bool {
        self.tensors.contains_key(&(name, saved))
    }

    /// Reads elements `range` of the flat parameter `name` into `values`, which has the same length.
    pub fn read(&self, name: &str, saved: &Saved, range: Range<usize>, mut values: &mut [f32]) -> Result<()> {
        let index = self.index_of(name, saved)?;
        for (number, within) in self.chunks_of(index, &range) {
            let (now, later) = values.split_at_mut((within.end - within.start) as usize);
            values = later;
            self.read_part(index, number, within, now)?;
        }
        Ok(())
    }

    fn is_owned(&self, saved: &Saved) -> bool {
        let owned = &self.checkpoint.manifest().optimizer.owned;
        saved.slot().is_some_and(|slot| owned.iter().any(|name| name == slot))
    }

    fn index_of(&self, name: &str, saved: &Saved) -> Result<usize> {
        self.tensors.get(&(name, saved)).copied().ok_or_else(|| {
            let problem = format!("it lacks `{}`", saved.key(name));
            CheckpointError::damaged(self.checkpoint.folder(), problem)
        })
    }

    /// Returns the chunks that contain elements `range` of a tensor, each with the range within the chunk.
    fn chunks_of(
        &self,
        index: usize,
        range: &Range<usize>,
    ) -> impl Iterator<Item = (usize, Range<u64>)> + use<'a> {
        let (start, end) = (range.start as u64, range.end as u64);
        let chunks = &self.checkpoint.manifest().tensors[index].chunks;
        let first = chunks.partition_point(|chunk| chunk.offset + chunk.length <= start);
        let chunks = chunks.iter().enumerate().skip(first);
        chunks.take_while(move |(_, chunk)| chunk.offset < end).map(move |(number, chunk)| {
            let from = start.max(chunk.offset) - chunk.offset;
            (number, from..end.min(chunk.offset + chunk.length) - chunk.offset)
        })
    }

    fn read_part(&self, index: usize, number: usize, within: Range<u64>, values: &mut [f32]) -> Result<()> {
        let tensor = &self.checkpoint.manifest().tensors[index];
        let chunk = &tensor.chunks[number];
        let key = tensor.key();
        let file = self.file(&chunk.file)?;
        let copied = |bytes| lock(&self.ahead).advance(bytes);
        let checksum = file.copy(&key, chunk.length, within.clone(), values, copied)?;
        self.bytes_read.fetch_add(size_of_val(values) as u64, Ordering::Relaxed);
        self.meter.add(size_of_val(values) as u64);
        let length = within.end - within.start;
        if length < chunk.length {
            let (tensor, chunk) = (index as u64, number as u64);
            lock(&self.parts).push(ReadPart { tensor, chunk, start: within.start, length, checksum });
        } else if checksum != chunk.checksum {
            return Err(CheckpointError::damaged_tensor(&file.path, &key));
        }
        Ok(())
    }

    fn file(&self, name: &'a str) -> Result<Arc<TensorFile>> {
        if let Some(file) = lock(&self.files).get(name) {
            return Ok(file.clone());
        }
        let path = self.checkpoint.folder().join(name);
        // The manifest was validated: it has an entry for the file of every chunk.
        let file = Arc::new(TensorFile::open(path, &self.checkpoint.manifest().files[name])?);
        lock(&self.files).insert(name, file.clone());
        Ok(file)
    }

    /// Plans the next reads, in order, so that the system can read ahead.
    fn plan(&self, engine: &Engine, tensors: &[(&str, &Saved)]) -> Result<()> {
        let (mut ahead, mut bytes) = (ReadAhead::default(), 0);
        for &(name, saved) in tensors {
            let index = self.index_of(name, saved)?;
            let tensor = &self.checkpoint.manifest().tensors[index];
            let part = match self.is_owned(saved) {
                true if engine.is_owner(name)? => 0..tensor.numel() as usize,
                true => 0..0,
                false => engine.held(name)?,
            };
            for (number, within) in self.chunks_of(index, &part) {
                let chunk = &tensor.chunks[number];
                let file = self.file(&chunk.file)?;
                bytes += (within.end - within.start) * WIDTH;
                ahead.plan(&file, file.part(&tensor.key(), chunk.length, &within)?);
            }
        }
        ahead.advance(0);
        *lock(&self.ahead) = ahead;
        self.meter.begin(bytes);
        Ok(())
    }

    /// Loads this rank's part of all weights. Returns the names of absent weights, which `allow_missing` must allow.
    /// Does not compare architectures. Collective.
    pub fn load_weights(&self, engine: &Engine, allow_missing: &AllowMissing) -> Result<BTreeSet<String>> {
        let absent = weights::compare(engine, self, allow_missing)?;
        let names = engine.layout().parameters().map(|(_, parameter)| parameter.name.as_str());
        let present = names.filter(|name| !absent.contains(*name));
        self.plan(engine, &present.map(|name| (name, &Saved::Weight)).collect::<Vec<_>>())?;
        let not_finite = weights::load(engine, self, &absent, &Meter::default())?;
        self.check_parts(engine)?;
        not_finite.check(self.checkpoint.folder(), false)?;
        Ok(absent)
    }

    /// Loads this rank's part of the optimizer's moments, except for frozen parameters, and sets the engine's number of
    /// updates. Fails if the checkpoint has a different optimizer. Collective.
    pub fn load_optimizer(&self, engine: &Engine, allow_missing: &AllowMissing) -> Result<()> {
        self.checkpoint.require_optimizer(&SavedOptimizer::of(engine.optimizer()))?;
        let state = self.checkpoint.state();
        engine.resume(state.step - state.skipped, state.loss_scale);
        if state.step == state.skipped {
            return Ok(());
        }
        let (mut present, mut missing) = (Vec::new(), Vec::new());
        // In the order of the files. Parameters with different update rules have different slots.
        let slots = self.checkpoint.manifest().optimizer.slots();
        for saved in &slots {
            let Some(slot) = saved.slot() else { continue };
            for (position, group) in engine.layout().groups.iter().enumerate() {
                let has_all = engine.slots_of_group(position).contains(&slot);
                for parameter in &group.parameters {
                    let name = parameter.name.as_str();
                    let owned = parameter.owned_slot(slot);
                    if !has_all && owned.is_none() {
                        continue;
                    }
                    let found = self.tensors.get(&(name, saved));
                    let found = found.map(|index| &self.checkpoint.manifest().tensors[*index]);
                    match (found, owned) {
                        (Some(tensor), Some(owned)) if tensor.shape != owned.shape => {
                            missing.push(format!("{} of shape {:?}", saved.key(name), owned.shape));
                        }
                        (Some(_), _) => present.push((name, saved)),
                        (None, _) if allow_missing.allows(name) => {}
                        (None, _) => missing.push(saved.key(name)),
                    }
                }
            }
        }
        let manifest = self.checkpoint.manifest();
        let was_frozen = |name: &&String| {
            let weight = self.tensors.get(&(name.as_str(), &Saved::Weight));
            weight.is_some_and(|index| !manifest.groups[manifest.tensors[*index].group].trainable)
        };
        let trained = engine.layout().groups.iter().filter(|group| group.trainable);
        let trained = trained.flat_map(|group| &group.parameters).map(|parameter| &parameter.name);
        let names: Vec<_> = trained.filter(was_frozen).filter(|name| !allow_missing.allows(name)).collect();
        if !names.is_empty() {
            let (path, names) = (self.checkpoint.folder().to_owned(), names.into_iter().cloned().collect());
            return Err(CheckpointError::Frozen { path, names });
        }
        if !missing.is_empty() {
            return Err(CheckpointError::Slots { path: self.checkpoint.folder().to_owned(), missing });
        }
        self.plan(engine, &present)?;
        for (name, saved) in present {
            match saved.slot().filter(|_| self.is_owned(saved)) {
                Some(slot) => {
                    engine
                        .fill_owned(name, slot, |values| self.read(name, saved, 0..values.len(), values))?;
                }
                None => engine.fill_parameter(name, saved.kind(), |range, values| {
                    self.read(name, saved, range, values)
                })?,
            }
        }
        engine.complete_slots();
        self.check_parts(engine)
    }

    /// Combines the checksums of chunks that ranks have read in parts. Data must not be used before this call.
    /// Collective.
    fn check_parts(&self, engine: &Engine) -> Result<()> {
        let mine = std::mem::take(&mut *lock(&self.parts));
        let all = engine.all_gather_bytes(Phase::Checkpoint, "checksums", bytemuck::cast_slice(&mine))?;
        let parts = all.iter().flat_map(|message| message.chunks_exact(size_of::<ReadPart>()));
        let mut parts: Vec<ReadPart> = parts.map(bytemuck::pod_read_unaligned).collect();
        parts.sort_by_key(|part| (part.tensor, part.chunk, part.start));
        // Replicas read the same parts.
        parts.dedup();
        for parts in parts.chunk_by(|a, b| (a.tensor, a.chunk) == (b.tensor, b.chunk)) {
            let tensor = &self.checkpoint.manifest().tensors[parts[0].tensor as usize];
            let chunk = &tensor.chunks[parts[0].chunk as usize];
            let (mut is_whole, mut end, mut checksum) = (true, 0, Checksum::empty());
            for part in parts {
                is_whole &= part.start == end;
                end += part.length;
                checksum = checksum.then(part.checksum, part.length * WIDTH);
            }
            if !is_whole || end != chunk.length || checksum != chunk.checksum {
                let path = self.checkpoint.folder().join(&chunk.file);
                return Err(CheckpointError::damaged_tensor(&path, &tensor.key()));
            }
        }
        Ok(())
    }
}

impl Weights for CheckpointReader<'_> {
    fn folder(&self) -> &Path {
        self.checkpoint.folder()
    }

    fn shapes(&self) -> BTreeMap<&str, &[usize]> {
        self.checkpoint.manifest().shapes()
    }

    fn read(&self, name: &str, range: Range<usize>, values: &mut [f32]) -> Result<()> {
        CheckpointReader::read(self, name, &Saved::Weight, range, values)
    }
}
