//! Saves checkpoints while a run continues.
//!
//! The ranks agree to begin a save and take a snapshot. Each rank then writes its part in a background thread, and
//! leaves a description of the part in the folder. Once all descriptions are visible, rank 0's thread completes the
//! checkpoint without a collective. The ranks exchange their progress after each step, so they all end a save in the
//! same step.

use std::borrow::Cow;
use std::fs;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::{self, Receiver, RecvTimeoutError, Sender};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use kiln_collectives::{Buffer, Phase};
use kiln_shard::{Engine, Mesh, Owners, ParamGroupLayout, Snapshot, memory};
use kiln_sys::Meter;
use kiln_sys::durable::parent_of;
use nix::time::{ClockId, clock_gettime};

use super::manifest::Format;
use super::origin::Saved;
use super::status::{Next, Stage, Status};
use super::write::{self, Completion, Entry, Part, Values, WriterOutput};
use super::{
    CheckpointError, CheckpointState, HeldFolder, Keep, Result, SaveContext, SavedOptimizer, folder,
};

const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(320)];

/// Maximum time between two messages of ranks that wait for a save to finish.
const MESSAGE_INTERVAL: Duration = Duration::from_secs(5);

/// Settings for saving a run's checkpoints.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Folder with all checkpoints of the run.
    pub folder: PathBuf,
    /// Layout of the values in files.
    pub format: Format,
    /// True to write sharded checkpoints in the background. Full checkpoints are always written in the foreground, one
    /// group at a time, so that rank 0 need not hold the whole model.
    pub background: bool,
    /// Rule for the checkpoints to keep.
    pub keep: Keep,
    /// Maximum time that a rank may write nothing, and that all ranks' parts may take to become visible once written.
    pub timeout: Duration,
    /// The locked run folder that contains the checkpoints. Saves fail once this folder belongs to another run.
    pub held: Option<HeldFolder>,
}

impl SaveOptions {
    /// Returns options that save sharded checkpoints in `folder`, never remove any, and write in the foreground.
    pub fn new(folder: PathBuf) -> Self {
        SaveOptions {
            folder,
            format: Format::Sharded,
            background: false,
            keep: Keep::default(),
            timeout: Duration::from_secs(600),
            held: None,
        }
    }

    fn check_held(&self) -> Result<()> {
        self.held.as_ref().map_or(Ok(()), HeldFolder::check)
    }
}

/// A rank's progress of a background save, as numbers that can be summed over the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// 1 once the rank's part is on disk.
    pub written: f64,
    /// 1 once the rank has no work left.
    pub done: f64,
    /// 1 if the rank could not write its part.
    pub failed: f64,
}

impl Progress {
    /// Returns the numbers to sum over the ranks.
    pub fn to_values(self) -> [f64; 3] {
        [self.written, self.done, self.failed]
    }

    /// Converts sums of [`Progress::to_values`] back to a progress.
    pub fn from_values([written, done, failed]: [f64; 3]) -> Self {
        Progress { written, done, failed }
    }
}

fn count(is_true: bool) -> f64 {
    f64::from(u8::from(is_true))
}

/// Writes the checkpoints of a run and removes old ones. All ranks must call the same methods in the same order.
pub struct Saver {
    options: SaveOptions,
    rank: usize,
    pending: Option<Pending>,
    cpu_time: Duration,
    meter: Arc<Meter>,
}

struct Pending {
    place: PathBuf,
    status: Arc<Status>,
    thread: JoinHandle<Result<Duration>>,
}

impl Saver {
    /// Creates the saver of `rank`.
    pub fn new(options: SaveOptions, rank: usize) -> Self {
        Saver { options, rank, pending: None, cpu_time: Duration::ZERO, meter: Arc::default() }
    }

    /// Returns the meter that counts the bytes that this rank has written in the latest save.
    pub fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// Reports whether a save is in progress in the background.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Begins to save the current state, after waiting for an earlier save. Returns the folder of the checkpoint once
    /// it is on disk, or `None` for a background save. Collective. Fails if this save or the earlier one fails.
    pub fn begin(&mut self, engine: &Engine, context: SaveContext) -> Result<Option<PathBuf>> {
        self.settle(engine)?;
        let context = SaveContext { optimizer: SavedOptimizer::of(engine.optimizer()), ..context };
        let place = folder::checkpoint_path(&self.options.folder, context.state.step);
        let created = match self.rank {
            0 => self.options.check_held().and_then(|()| create_empty(&folder::beside(&place))),
            _ => Ok(()),
        };
        self.agree(engine, created)?;
        let (format, groups) = (self.options.format, engine.layout().groups.clone());
        let snapshot = engine.snapshot();
        let saves_frozen = context.base.is_none();
        let has = |group: usize, saved: &Saved| {
            if !saves_frozen && !groups[group].trainable {
                return false;
            }
            snapshot.has(group, saved.kind())
                || saved.slot().is_some_and(|slot| engine.has_owned(group, slot))
        };
        let kinds = write::kinds_of(format, groups.len(), context.optimizer.slots(), has);
        let (mut gathering, mut source) = (None, Source::Snapshot(snapshot));
        if format == Format::Full {
            let ((sender, groups), (written, receiver)) = (mpsc::channel(), mpsc::channel());
            gathering = Some((kinds.clone(), sender, receiver));
            source = Source::Gathered { groups, written, current: None };
        }
        let status = Arc::new(Status::new(self.meter.clone()));
        let mut writer = Writer {
            source,
            layout: groups,
            owners: engine.owners().clone(),
            kinds,
            mesh: engine.mesh(),
            rank: self.rank,
            place: place.clone(),
            context,
            options: self.options.clone(),
            status: status.clone(),
        };
        let run = move || {
            let ended = writer.run();
            writer.status.set(if ended.is_ok() { Stage::Complete } else { Stage::Failed });
            ended
        };
        let thread = thread::Builder::new()
            .name(format!("rank{}-checkpoint", self.rank))
            .spawn(run)
            .map_err(CheckpointError::io("start a thread to write", &place));
        let agreed = self.agree(engine, thread);
        if agreed.is_err() {
            // This rank's thread must not wait for a rank that could not start its own thread.
            status.cancel();
        }
        self.pending = Some(Pending { place, status, thread: agreed? });
        if let Some((kinds, groups, written)) = gathering {
            self.gather(engine, &kinds, groups, written)?;
        } else if self.options.background {
            return Ok(None);
        }
        self.settle(engine)
    }

    /// Gathers every group to rank 0, whose thread writes it. Ranks keep exchanging messages to prevent timeouts.
    /// Collective.
    fn gather(
        &self,
        engine: &Engine,
        kinds: &[(usize, Saved)],
        groups: Sender<Buffer>,
        written: Receiver<()>,
    ) -> Result<()> {
        let Some(Pending { status, .. }) = &self.pending else { return Ok(()) };
        let mut is_writing = self.rank == 0;
        for (group, saved) in kinds {
            // Every rank takes part in every gather, even after rank 0 has failed.
            let values = match saved.slot().filter(|slot| engine.has_owned(*group, slot)) {
                Some(slot) => engine.gather_owned(*group, slot)?,
                None => engine.gather_group(*group, saved.kind())?,
            };
            if let Some(values) = values.filter(|_| is_writing) {
                is_writing = status.record_progress().is_ok() && groups.send(values).is_ok();
            }
            loop {
                let mut is_busy = false;
                if is_writing {
                    match written.recv_timeout(message_interval(engine)) {
                        Ok(()) => {}
                        Err(RecvTimeoutError::Timeout) if !status.is_stalled(self.options.timeout) => {
                            is_busy = true;
                        }
                        Err(_) => is_writing = false,
                    }
                }
                if engine.all_reduce_f64(Phase::Checkpoint, "save", &[count(is_busy)])? == [0.0] {
                    break;
                }
            }
        }
        let _ = status.record_progress();
        Ok(())
    }

    /// Returns this rank's progress, which must be summed over the ranks and passed to [`Saver::advance`].
    pub fn progress(&self) -> Progress {
        let Some(Pending { status, thread, .. }) = &self.pending else { return Progress::default() };
        // Read `is_finished` first: the stage of a finished thread no longer changes. A panic leaves the stage
        // unchanged.
        let has_ended = thread.is_finished();
        let stage = status.stage();
        let failed = status.is_stalled(self.options.timeout)
            || stage == Stage::Failed
            || (has_ended && stage != Stage::Complete);
        Progress {
            written: count(matches!(stage, Stage::Written | Stage::Complete)),
            done: count(stage == Stage::Complete && !failed),
            failed: count(failed),
        }
    }

    /// Ends a save that is complete or has failed, given the sum of all ranks' progress. Returns the folder of a
    /// complete checkpoint. Collective if there is a save to end.
    pub fn advance(&mut self, engine: &Engine, all: Progress) -> Result<Option<PathBuf>> {
        let ranks = engine.world().world_size() as f64;
        self.inform_thread(all, ranks);
        if all.failed > 0.0 || all.done == ranks { self.settle(engine) } else { Ok(None) }
    }

    fn inform_thread(&self, all: Progress, ranks: f64) {
        let Some(Pending { status, .. }) = &self.pending else { return };
        if all.failed > 0.0 {
            status.cancel();
        } else if all.written == ranks {
            status.all_written(self.options.timeout);
        }
    }

    /// Waits for the save in progress, if any, and returns its folder. Collective.
    pub fn settle(&mut self, engine: &Engine) -> Result<Option<PathBuf>> {
        let ranks = engine.world().world_size() as f64;
        while let Some(Pending { status, .. }) = &self.pending {
            status.wait(message_interval(engine));
            let mine = self.progress().to_values();
            let sums = engine.all_reduce_f64(Phase::Checkpoint, "save", &mine)?;
            let all = Progress::from_values([sums[0], sums[1], sums[2]]);
            self.inform_thread(all, ranks);
            if all.done + all.failed == ranks {
                break;
            }
        }
        let Some(pending) = self.pending.take() else { return Ok(None) };
        let place = pending.place.clone();
        self.meter.begin(0);
        let written = self.end(pending).map(|cpu_time| self.cpu_time = cpu_time);
        let outcome = self.agree(engine, written);
        if outcome.is_err() {
            self.clean_up(&place);
        }
        outcome.map(|()| Some(place))
    }

    fn end(&self, pending: Pending) -> Result<Duration> {
        let Pending { place, status, thread } = pending;
        let timeout = self.options.timeout;
        while !thread.is_finished() && !status.is_stalled(timeout) {
            status.wait(MESSAGE_INTERVAL);
        }
        if status.is_stalled(timeout) {
            // The thread hangs in a system call. If the call ever returns, the cancellation stops the thread.
            status.cancel();
            let (path, seconds) = (folder::beside(&place), timeout.as_secs_f64());
            return Err(CheckpointError::Stalled { path, seconds });
        }
        thread.join().unwrap_or_else(|_| {
            let source = io::Error::other("the thread that writes it panicked");
            Err(CheckpointError::io("write", &place)(source))
        })
    }

    /// Returns the CPU time of this rank's thread for the last complete checkpoint.
    pub fn cpu_time(&self) -> Duration {
        self.cpu_time
    }

    fn clean_up(&self, place: &Path) {
        if self.rank == 0
            && !self.options.held.as_ref().is_some_and(HeldFolder::is_lost)
            && let Err(error) = folder::remove(&folder::beside(place))
        {
            tracing::warn!("{error}");
        }
    }

    /// Returns `mine` if no rank has an error, or else this rank's error or [`CheckpointError::OtherRank`].
    fn agree<T>(&self, engine: &Engine, mine: Result<T>) -> Result<T> {
        let failed = engine.all_reduce_f64(Phase::Checkpoint, "save", &[count(mine.is_err())])?;
        if failed[0] == 0.0 {
            return mine;
        }
        // A lost folder can cause other errors first, on any rank, so report the loss instead.
        match self.options.check_held() {
            Err(lost @ CheckpointError::NotHeld { .. }) => Err(lost),
            _ => mine.and(Err(CheckpointError::OtherRank)),
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // The run has failed. The parts may still become a checkpoint, but only before this function returns.
        let Some(pending) = self.pending.take() else { return };
        let place = pending.place.clone();
        // A panicking rank must not wait here: other ranks may time out before they learn of the panic.
        if thread::panicking() {
            pending.status.cancel();
        } else {
            pending.status.hurry();
        }
        if let Err(error) = self.end(pending)
            && !error.is_consequence()
        {
            tracing::warn!("{error}");
        }
        self.clean_up(&place);
    }
}

/// Saves the engine at `state` as a sharded checkpoint of the run in `out`, and returns the checkpoint's folder.
/// `files` has the names and contents of other files, such as `tokenizer.json`. Collective.
///
/// # Errors
///
/// If a rank cannot write its part, or the ranks lose contact.
pub fn save(
    engine: &Engine,
    out: &Path,
    state: CheckpointState,
    files: Vec<(String, Arc<[u8]>)>,
) -> Result<PathBuf> {
    let options = SaveOptions::new(folder::checkpoints_folder(out));
    let place = folder::checkpoint_path(&options.folder, state.step);
    let context = SaveContext { files, ..SaveContext::new(state) };
    Saver::new(options, engine.world().rank()).begin(engine, context)?;
    Ok(place)
}

fn message_interval(engine: &Engine) -> Duration {
    MESSAGE_INTERVAL.min(engine.policy().timeout / 4)
}

fn create_empty(path: &Path) -> Result<()> {
    folder::remove(path)?;
    fs::create_dir_all(path).map_err(CheckpointError::io("create", path))
}

struct Writer {
    source: Source,
    layout: Vec<ParamGroupLayout>,
    owners: Owners,
    kinds: Vec<(usize, Saved)>,
    mesh: Mesh,
    rank: usize,
    place: PathBuf,
    context: SaveContext,
    options: SaveOptions,
    status: Arc<Status>,
}

impl Writer {
    fn run(&mut self) -> Result<Duration> {
        memory::bind_to_rank(self.rank);
        let beside = folder::beside(&self.place);
        let chunk = match self.options.format {
            Format::Sharded => Some(ParamGroupLayout::own_chunk(&self.mesh, self.rank)),
            Format::Full if self.rank == 0 => None,
            Format::Full => return Ok(Duration::ZERO),
        };
        let part = Part { layout: &self.layout, kinds: &self.kinds, chunk, owners: &self.owners };
        self.status.meter.begin(part.bytes());
        let mut values = Watched { source: &mut self.source, status: &self.status };
        let output = part.write(&beside, &mut values)?;
        if let Some(chunk) = chunk {
            output.write_description(&beside, chunk)?;
            self.status.set(Stage::Written);
        }
        if self.rank == 0 {
            let ranks = self.mesh.world_size();
            let outputs = match self.options.format {
                Format::Full => vec![output],
                Format::Sharded => {
                    let outputs = self.wait_for_parts(&beside, ranks)?;
                    write::remove_descriptions(&beside, ranks)?;
                    outputs
                }
            };
            self.complete(&beside, outputs)?;
        }
        Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from))
    }

    fn wait_for_parts(&self, beside: &Path, ranks: usize) -> Result<Vec<WriterOutput>> {
        let [mut pause, longest] = PAUSES;
        loop {
            let missing = match write::find_outputs(beside, ranks)? {
                Ok(outputs) => return Ok(outputs),
                Err(missing) => missing,
            };
            match self.status.pause(pause) {
                Next::Look => pause = longest.min(2 * pause),
                Next::GiveUp => return Err(CheckpointError::OtherRank),
                Next::Overdue => {
                    let is_missing =
                        |rank: &usize| missing.contains(&ParamGroupLayout::own_chunk(&self.mesh, *rank));
                    return Err(CheckpointError::MissingParts {
                        folder: beside.to_owned(),
                        ranks: (0..ranks).filter(is_missing).collect(),
                        seconds: self.options.timeout.as_secs_f64(),
                    });
                }
            }
        }
    }

    /// Moves the checkpoint to its final place. Fails if the save was cancelled, for example while a disk hung.
    fn complete(&self, beside: &Path, outputs: Vec<WriterOutput>) -> Result<()> {
        let Writer { place, layout, context, options, status, .. } = self;
        status.record_progress()?;
        options.check_held()?;
        let ranks = self.mesh.world_size();
        Completion { format: options.format, ranks, layout, outputs, context }.complete(beside)?;
        folder::replace_folder(beside, place)?;
        folder::sync_folder(parent_of(place))?;
        status.record_progress()?;
        options.check_held()?;
        folder::point_to(&options.folder, context.state.step)?;
        options.check_held()?;
        folder::remove_old(&options.folder, options.keep, context.state.step);
        Ok(())
    }
}

enum Source {
    Snapshot(Snapshot),
    Gathered {
        groups: Receiver<Buffer>,
        /// Signals that the values of a group have been written.
        written: Sender<()>,
        current: Option<Buffer>,
    },
}

struct Watched<'a> {
    source: &'a mut Source,
    status: &'a Status,
}

impl Values for Watched<'_> {
    fn get(&mut self, layout: &[ParamGroupLayout], entry: &Entry) -> Result<Cow<'_, [f32]>> {
        self.status.record_progress()?;
        self.status.meter.add((entry.range.len() * size_of::<f32>()) as u64);
        let group = &layout[entry.group];
        let owned = entry.saved.slot().filter(|slot| group.owns(slot));
        let (values, start) = match self.source {
            Source::Snapshot(snapshot) => match owned {
                Some(slot) => (snapshot.owned(entry.group, entry.slot, slot)?.unwrap_or_default(), 0),
                None => {
                    let values = snapshot.values(entry.group, entry.saved.kind())?;
                    (values.unwrap_or_default(), entry.start % group.chunk)
                }
            },
            Source::Gathered { groups, current, .. } => {
                if current.is_none() {
                    // The sender is gone if the ranks have lost their connections.
                    *current = Some(groups.recv().map_err(|_| CheckpointError::OtherRank)?);
                }
                (current.as_ref().map_or(Ok(&[][..]), Buffer::as_slice)?, entry.start)
            }
        };
        Ok(Cow::Borrowed(&values[start..start + entry.range.len()]))
    }

    fn done(&mut self, group: usize, saved: &Saved) {
        match self.source {
            Source::Snapshot(snapshot) => snapshot.release(group, saved.kind()),
            Source::Gathered { written, current, .. } => {
                *current = None;
                // The receiver is gone once the rank stops waiting.
                let _ = written.send(());
            }
        }
    }
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
    use crate::{Checkpoint, verify};

    fn model() -> ModelConfig {
        let model = ModelConfig::preset("10m").unwrap();
        ModelConfig { d_model: 8, heads: 2, kv_heads: 2, layers: 1, ..model }
    }

    /// Runs `work` on two ranks, whose collectives time out after one second. Returns rank 0's result.
    fn on_two_ranks<T: Send>(work: impl Fn(&Engine, usize) -> Result<T> + Sync) -> Result<T, String> {
        let outcomes = run_ranks(2, 1, |world| {
            let rank = world.rank();
            let decoder = Decoder::new(&Layers::default(), &model(), Key::new(0), &Device::flex()).unwrap();
            let policy = Policy { timeout: LIMIT, ..Policy::default() };
            let decoder = ShardedDecoder::new(decoder, EngineBuilder::new(world, policy, None)?)?;
            let outcome = work(decoder.engine(), rank).map_err(|error| error.to_string());
            decoder.engine().all_reduce_f64(Phase::Checkpoint, "save", &[1.0])?;
            Ok::<_, ShardError>(outcome)
        });
        outcomes.unwrap().swap_remove(0)
    }

    const LIMIT: Duration = Duration::from_secs(1);

    /// Saves to a disk that is several times slower than the timeout of the ranks' collectives.
    fn save_slowly(timeout: Duration) -> Result<(), String> {
        let folder = tempfile::tempdir().unwrap();
        on_two_ranks(|engine, rank| {
            let options = SaveOptions { timeout, ..SaveOptions::new(folder.path().to_owned()) };
            let mut saver = Saver::new(options, rank);
            let status = Arc::new(Status::new(Arc::default()));
            let done = status.clone();
            let thread = thread::spawn(move || {
                thread::sleep(if rank == 0 { 4 * LIMIT } else { Duration::ZERO });
                done.set(Stage::Complete);
                Ok(Duration::ZERO)
            });
            saver.pending = Some(Pending { place: folder.path().join("fsdp_cpt1"), status, thread });
            saver.settle(engine).map(drop)
        })
    }

    #[test]
    fn disk_may_be_slower_than_the_ranks_timeout() {
        assert_eq!(save_slowly(Duration::MAX), Ok(()));
    }

    #[test]
    fn stalled_disk_is_given_up() {
        let error = save_slowly(Duration::from_millis(100)).unwrap_err();
        assert!(error.contains("nothing has been written to"), "{error}");
    }

    #[test]
    fn full_checkpoint_is_written_group_by_group() {
        let folder = tempfile::tempdir().unwrap();
        let saved = on_two_ranks(|engine, rank| {
            let options = SaveOptions { format: Format::Full, ..SaveOptions::new(folder.path().to_owned()) };
            let state = CheckpointState { step: 1, ..CheckpointState::new(model(), 8) };
            Saver::new(options, rank).begin(engine, SaveContext::new(state))
        });
        let checkpoint = Checkpoint::open(&saved.unwrap().unwrap()).unwrap();
        assert_eq!(verify(&checkpoint).problems.len(), 0);
        assert_eq!(checkpoint.manifest().groups.len(), 3);
    }
}
