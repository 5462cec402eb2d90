//! Full checkpoints: whole arrays, one file per group.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use kiln_collectives::{Buffer, Phase};
use kiln_shard::{Engine, ParamGroupLayout, memory};
use kiln_sys::Meter;

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

/// Returns the entries of whole parameters.
fn whole(layout: &ParamGroupLayout, group: usize, saved: &Saved) -> Vec<Entry> {
    let parameters = layout.parameters.iter().enumerate();
    parameters
        .map(|(slot, parameter)| Entry { group, slot, saved: saved.clone(), range: 0..parameter.numel() })
        .collect()
}

/// Gathers every group to rank 0, which writes it to `beside` and completes the checkpoint from all parts
/// with `complete`, which checks in the status whether it is still wanted; holds one group at a time. The
/// other ranks do not learn whether rank 0 succeeded. Collective.
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
    // The values that each group's rule keeps.
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
            // Every rank takes part in every gather, even if rank 0 has failed already.
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

/// Waits until rank 0 has written everything. No rank waits long for a message from another. Collective.
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

/// Rank 0's handle of the thread that writes groups. The thread does one job after the other, and none after
/// a job that has failed. Rank 0 continues to gather even if it cannot write any more.
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
    /// Starts the thread of `rank`, which writes the groups of `layout` to `folder`.
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

    /// Gives the thread a job, unless it has failed.
    fn give(&mut self, job: impl FnOnce(&mut GroupFiles) -> Result<()> + Send + 'static) {
        if let (Some(jobs), Ok(())) = (&self.jobs, &self.outcome) {
            self.status.get_on();
            // A dead thread is noticed by the wait for it.
            let _ = jobs.send(Box::new(job));
            self.busy = true;
        }
    }

    /// Waits for the end of the current job, for at most `most`; returns whether the thread is idle or has
    /// been given up.
    fn wait(&mut self, most: Duration) -> bool {
        if !self.busy {
            return true;
        }
        self.outcome = match self.done.recv_timeout(most) {
            Ok(outcome) => outcome,
            Err(RecvTimeoutError::Timeout) if !self.status.is_stalled(self.timeout) => {
                return false;
            }
            // It hangs in the system. If it ever returns, it finds that its work is no longer wanted.
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
        // The ranks have lost each other. Nothing may be written afterwards.
        self.status.cancel();
        self.jobs = None;
        while !self.wait(self.timeout) {}
    }
}

/// The files of groups, on the thread that writes them.
struct GroupFiles {
    folder: PathBuf,
    layout: Vec<ParamGroupLayout>,
    /// The optimizer's slots of each group.
    slots: Vec<Vec<Saved>>,
    part: WriterOutput,
    /// The optimizer's file, while not all slots are written.
    open: Option<PartFile>,
    status: Arc<Status>,
}

impl GroupFiles {
    /// Records that the disk makes progress; fails if this checkpoint is no longer wanted.
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

/// Writes a full checkpoint to the new folder `place`, with one process and no engine: `get` returns the
/// values of whole parameters, and of slots of the optimizer that `has` reports. The folder appears unless
/// `check` fails, which is called when everything has been written. Holds one parameter at a time.
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

/// Writes external weights as a full checkpoint without optimizer state to the new folder `place`. `layout`
/// defines the groups; every parameter of it must be among the weights. `meter` counts the bytes.
///
/// # Errors
///
/// If the weights cannot be read or are not finite, if `place` exists already, and if the disk fails.
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

    /// Lets two ranks, which wait for each other for at most `LIMIT`, save to a disk that takes several times
    /// as long to finish. Returns rank 0's result.
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
