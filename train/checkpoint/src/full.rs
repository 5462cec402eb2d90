//! Full checkpoints: whole arrays, one file per group.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use kiln_collectives::{Buffer, Phase};
use kiln_process::Meter;
use kiln_shard::{Engine, ParamGroupLayout, memory};

use super::manifest::Format;
use super::part::{self, Completion, Entry, PartFile, WriterOutput};
use super::saved::Saved;
use super::status::{Patience, Status};
use super::{CheckpointError, Result, SaveContext};
use crate::weights::{Watched, Weights};

fn model_file(group: usize, groups: usize) -> String {
    format!("model-{:05}-of-{groups:05}.safetensors", group + 1)
}

fn optimizer_file(group: usize, groups: usize) -> String {
    format!("optimizer-{:05}-of-{groups:05}.safetensors", group + 1)
}

/// Entries of whole parameters.
fn whole(layout: &ParamGroupLayout, group: usize, saved: &Saved) -> Vec<Entry> {
    let parameters = layout.parameters.iter().enumerate();
    parameters
        .map(|(slot, parameter)| Entry { group, slot, saved: saved.clone(), range: 0..parameter.numel() })
        .collect()
}

/// Gathers every group to rank 0, which writes it to `beside` and makes a checkpoint of all parts with
/// `complete`, which asks the status whether it is still wanted; holds one group at a time. The others do not
/// learn whether rank 0 could. Collective.
pub(super) fn save(
    engine: &Engine,
    slots: Vec<Saved>,
    beside: &Path,
    patience: Patience,
    meter: Arc<Meter>,
    complete: impl FnOnce(&[ParamGroupLayout], Vec<WriterOutput>, &Status) -> Result<()> + Send + 'static,
) -> Result<()> {
    let layout = &engine.layout().groups;
    let rank = engine.world().rank();
    // Of each group, what its rule keeps.
    let kept = |group: usize, saved: &&Saved| {
        saved.slot().is_some_and(|slot| engine.slots_of_group(group).contains(&slot))
    };
    let slots: Vec<Vec<_>> = (0..layout.len())
        .map(|group| slots.iter().filter(|saved| kept(group, saved)).cloned().collect())
        .collect();
    let mut writer =
        (rank == 0).then(|| GroupWriter::start(rank, beside, layout, slots.clone(), patience.timeout, meter));
    for (group, slots) in slots.iter().enumerate() {
        for saved in [Saved::Weight].iter().chain(slots) {
            // Every rank takes part in every gather, whatever rank 0 has met so far.
            let values = engine.gather_group(group, saved.kind())?;
            if let (Some(writer), Some(values)) = (&mut writer, values) {
                let saved = saved.clone();
                writer.give(move |files| files.put(group, &saved, &values));
            }
            wait_for(writer.as_mut(), engine, patience.beat)?;
        }
    }
    if let Some(writer) = &mut writer {
        writer.give(move |files| {
            files.go_on()?;
            complete(&files.layout, vec![std::mem::take(&mut files.part)], &files.status)
        });
    }
    wait_for(writer.as_mut(), engine, patience.beat)?;
    writer.map_or(Ok(()), GroupWriter::outcome)
}

/// Waits until rank 0 has written what it was given. No rank waits long for another's word. Collective.
fn wait_for(mut writer: Option<&mut GroupWriter>, engine: &Engine, beat: Duration) -> Result<()> {
    loop {
        let is_busy = writer.as_mut().is_some_and(|writer| !writer.wait(beat));
        let busy = [f64::from(u8::from(is_busy))];
        if engine.all_reduce_f64(Phase::Checkpoint, "save", &busy)? == [0.0] {
            return Ok(());
        }
    }
}

type Job = Box<dyn FnOnce(&mut GroupFiles) -> Result<()> + Send>;

/// The thread of rank 0 that writes groups, as rank 0 sees it: it does one job after the other, and none
/// after one that has failed. Rank 0 goes on gathering also when it cannot write any more.
struct GroupWriter {
    jobs: Option<Sender<Job>>,
    done: Receiver<Result<()>>,
    status: Arc<Status>,
    timeout: Duration,
    folder: PathBuf,
    busy: bool,
    outcome: Result<()>,
}

impl GroupWriter {
    /// Of `rank`, whose groups of `layout` are to be written to `folder`.
    fn start(
        rank: usize,
        folder: &Path,
        layout: &[ParamGroupLayout],
        slots: Vec<Vec<Saved>>,
        timeout: Duration,
        meter: Arc<Meter>,
    ) -> Self {
        let of_group = |(group, slots): (&ParamGroupLayout, &Vec<Saved>)| group.numel() * (1 + slots.len());
        let numel: usize = layout.iter().zip(&slots).map(of_group).sum();
        meter.begin((numel * size_of::<f32>()) as u64);
        let status = Arc::new(Status::new(meter));
        let (jobs, work) = mpsc::channel::<Job>();
        let (told, done) = mpsc::channel();
        let mut files = GroupFiles {
            folder: folder.to_owned(),
            layout: layout.to_owned(),
            slots,
            part: WriterOutput::default(),
            open: None,
            status: status.clone(),
        };
        let run = move || {
            memory::bind_to_rank(rank);
            for job in work {
                if told.send(job(&mut files)).is_err() {
                    return;
                }
            }
        };
        let thread = thread::Builder::new().name(format!("rank{rank}-checkpoint")).spawn(run);
        let outcome = thread.map(drop).map_err(CheckpointError::io("start a thread to write", folder));
        let (jobs, folder) = (Some(jobs), folder.to_owned());
        GroupWriter { jobs, done, status, timeout, folder, busy: false, outcome }
    }

    /// Gives it something to do, unless it has failed.
    fn give(&mut self, job: impl FnOnce(&mut GroupFiles) -> Result<()> + Send + 'static) {
        if let (Some(jobs), Ok(())) = (&self.jobs, &self.outcome) {
            self.status.get_on();
            // A thread that is gone is noticed by whoever waits for it.
            let _ = jobs.send(Box::new(job));
            self.busy = true;
        }
    }

    /// Waits for the end of what it was given, for `most` at most; returns whether it has nothing to do,
    /// or is not waited for any more.
    fn wait(&mut self, most: Duration) -> bool {
        if !self.busy {
            return true;
        }
        self.outcome = match self.done.recv_timeout(most) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) if !self.status.is_stalled(self.timeout) => {
                return false;
            }
            // It hangs in the system. Should it ever return, it finds that its work is not wanted any more.
            Err(RecvTimeoutError::Timeout) => {
                let (path, seconds) = (self.folder.clone(), self.timeout.as_secs_f64());
                Err(CheckpointError::Stalled { path, seconds })
            }
            Err(RecvTimeoutError::Disconnected) => {
                let source = io::Error::other("the thread that writes it panicked");
                Err(CheckpointError::io("write", &self.folder)(source))
            }
        };
        if self.outcome.is_err() {
            self.status.cancel();
        }
        self.busy = false;
        true
    }

    fn outcome(mut self) -> Result<()> {
        std::mem::replace(&mut self.outcome, Ok(()))
    }
}

impl Drop for GroupWriter {
    fn drop(&mut self) {
        // The ranks have lost each other. Nothing is to be written afterwards.
        self.status.cancel();
        self.jobs = None;
        while !self.wait(self.timeout) {}
    }
}

/// The files of groups, in the thread that writes them.
struct GroupFiles {
    folder: PathBuf,
    layout: Vec<ParamGroupLayout>,
    /// The optimizer's, of each group.
    slots: Vec<Vec<Saved>>,
    part: WriterOutput,
    /// The optimizer's file, between its slots.
    open: Option<PartFile>,
    status: Arc<Status>,
}

impl GroupFiles {
    /// Notes that the disk takes something; fails if nobody wants this checkpoint any more.
    fn go_on(&self) -> Result<()> {
        if self.status.get_on() { Ok(()) } else { Err(CheckpointError::OtherRank) }
    }

    fn put(&mut self, group: usize, saved: &Saved, values: &Buffer) -> Result<()> {
        let groups = self.layout.len();
        let mut file = match self.open.take() {
            Some(file) => file,
            None => {
                let (name, kinds) = match saved {
                    Saved::Weight => (model_file(group, groups), &[Saved::Weight][..]),
                    Saved::Slot(_) => (optimizer_file(group, groups), &self.slots[group][..]),
                };
                let entries = kinds.iter().flat_map(|saved| whole(&self.layout[group], group, saved));
                PartFile::create(&self.folder, name, &self.layout, entries.collect())?
            }
        };
        let values = values.as_slice::<f32>()?;
        for parameter in &self.layout[group].parameters {
            self.go_on()?;
            file.put(&values[parameter.range()])?;
            self.status.meter().add((parameter.numel() * size_of::<f32>()) as u64);
        }
        if *saved == Saved::Weight || self.slots[group].last() == Some(saved) {
            file.finish(&mut self.part)
        } else {
            self.open = Some(file);
            Ok(())
        }
    }
}

/// Writes a full checkpoint to the new folder `place`, with one process and no engine: `get` gives the values
/// of whole parameters, slots of the optimizer where `has` says so. The folder appears unless `check` fails,
/// which is called when all have been written. Holds one parameter at a time.
pub(super) fn write(
    place: &Path,
    layout: &[ParamGroupLayout],
    context: &SaveContext,
    ranks: usize,
    has: impl Fn(usize, &Saved) -> bool,
    get: impl Fn(&Entry) -> Result<Vec<f32>>,
    check: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let folder = part::NewFolder::create(place)?;
    let mut part = WriterOutput::default();
    let slots = context.optimizer.slots();
    for (group, group_layout) in layout.iter().enumerate() {
        let names = [model_file(group, layout.len()), optimizer_file(group, layout.len())];
        for (name, kinds) in names.into_iter().zip([&[Saved::Weight][..], &slots]) {
            let kinds = kinds.iter().filter(|saved| has(group, saved));
            let entries: Vec<_> = kinds.flat_map(|saved| whole(group_layout, group, saved)).collect();
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
    check()?;
    let completion = Completion { format: Format::Full, ranks, layout, parts: vec![part], context };
    folder.complete(completion)
}

/// Writes weights from elsewhere as a full checkpoint without optimizer state to the new folder `place`.
/// `layout` says in which groups; every parameter of it must be among the weights. `meter` counts the bytes.
///
/// # Errors
///
/// When the weights cannot be read or are no finite numbers, when something is at `place` already, and when
/// the disk fails.
pub fn write_full(
    place: &Path,
    weights: &dyn Weights,
    layout: &[ParamGroupLayout],
    context: &SaveContext,
    meter: &Meter,
) -> Result<()> {
    let weights = Watched::new(weights, meter);
    write(
        place,
        layout,
        context,
        1,
        |_, saved| *saved == Saved::Weight,
        |entry| {
            let parameter = &layout[entry.group].parameters[entry.slot];
            let mut values = vec![0.0; entry.range.len()];
            weights.read(&parameter.name, entry.range.clone(), &mut values)?;
            Ok(values)
        },
        || weights.check(),
    )
}

#[cfg(test)]
mod tests {
    use burn::tensor::Device;
    use kiln_model::decoder::Decoder;
    use kiln_model::{Key, Layers, ModelConfig};
    use kiln_shard::ranks::run_ranks;
    use kiln_shard::{EngineBuilder, Policy, ShardError};

    use super::*;
    use crate::sharded::ShardedDecoder;

    /// Lets two ranks, which wait for each other no longer than `LIMIT`, save to a disk that takes several
    /// times as long for the end of it. Returns what rank 0 is told.
    fn save_slowly(timeout: Duration) -> Result<(), String> {
        const LIMIT: Duration = Duration::from_secs(1);
        let folder = tempfile::tempdir().unwrap();
        let outcomes = run_ranks(2, 1, |world| {
            let model = ModelConfig {
                d_model: 8,
                heads: 2,
                kv_heads: 2,
                layers: 1,
                ..ModelConfig::preset("10m").unwrap()
            };
            let decoder = Decoder::new(&Layers::default(), &model, Key::new(0), &Device::flex()).unwrap();
            let policy = Policy { timeout: LIMIT, ..Policy::default() };
            let builder = EngineBuilder::new(world, policy, None)?;
            let decoder = ShardedDecoder::new(decoder, builder)?;
            let complete = |_: &[ParamGroupLayout], _, _: &Status| {
                thread::sleep(4 * LIMIT);
                Ok(())
            };
            let patience = Patience::new(LIMIT, timeout);
            let saved = save(decoder.engine(), Vec::new(), folder.path(), patience, Arc::default(), complete);
            // They have not lost each other.
            decoder.engine().all_reduce_f64(Phase::Checkpoint, "save", &[1.0])?;
            Ok::<_, ShardError>(saved.map_err(|error| error.to_string()))
        });
        outcomes.unwrap().swap_remove(0)
    }

    #[test]
    fn a_disk_may_take_longer_than_ranks_wait_for_each_other() {
        assert_eq!(save_slowly(Duration::MAX), Ok(()));
    }

    #[test]
    fn a_disk_that_takes_nothing_is_given_up() {
        let error = save_slowly(Duration::from_millis(100)).unwrap_err();
        assert!(error.contains("nothing has been written to"), "{error}");
    }
}
