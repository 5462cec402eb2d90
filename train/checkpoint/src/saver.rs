//! Saving while a run continues.
//!
//! A save begins with an agreement between the ranks, takes a snapshot, and continues behind the step: every
//! rank writes its part in a separate thread and leaves a description of it in the folder. When rank 0 finds
//! all descriptions, it completes the checkpoint, also behind the step and without a collective. The ranks'
//! progress is sent with the sum of the losses after each step, so that all of them learn of a failure, and
//! of the end, in the same step.
//!
//! A save without progress only fails: when all ranks have written their parts, rank 0 has
//! [`SaveOptions::timeout`] to find them, and a rank may spend at most that time without writing anything. A
//! rank that waits for the end of a save sends a message to the others every few seconds.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kiln_collectives::Phase;
use kiln_shard::{Engine, Mesh, ParamGroupLayout, Snapshot, memory};
use kiln_sys::Meter;
use nix::time::{ClockId, clock_gettime};

use super::manifest::Format;
use super::part::{self, Completion, Entry, Left, Values, WriterOutput};
use super::saved::Saved;
use super::status::{Next, Patience, Stage, Status};
use super::{CheckpointError, HeldFolder, Keep, Result, SaveContext, SavedOptimizer, disk, folder, full};

/// Settings of a run's saves.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Folder of all checkpoints of the run.
    pub folder: PathBuf,
    /// Sharded or full.
    pub format: Format,
    /// True if sharded checkpoints are written in the background during the following steps. Full ones never
    /// are: rank 0 would have to hold the whole model.
    pub background: bool,
    /// The checkpoints to keep.
    pub keep: Keep,
    /// Maximum time without progress: the parts of all ranks are written and not all of them are visible, or
    /// a rank writes nothing.
    pub timeout: Duration,
    /// The run folder that contains them, if it is locked: nothing is written or removed there once it
    /// belongs to another run.
    pub held: Option<HeldFolder>,
}

impl SaveOptions {
    /// Saves sharded checkpoints in `folder`, keeps all of them, and writes them before a save is settled.
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

    fn is_lost(&self) -> bool {
        self.held.as_ref().is_some_and(HeldFolder::is_lost)
    }
}

/// Pause between two polls for the other ranks' parts: the first pause, and the maximum.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(320)];

/// A rank's progress of a save in the background, in numbers that can be summed over the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// 1 when its part is on the disk.
    pub written: f64,
    /// 1 when it has no work left.
    pub done: f64,
    /// 1 when it could not write its part.
    pub failed: f64,
}

impl Progress {
    /// Returns numbers to be summed over the ranks.
    pub fn to_values(self) -> [f64; 3] {
        [self.written, self.done, self.failed]
    }

    /// Converts sums of [`Progress::to_values`].
    pub fn from_values([written, done, failed]: [f64; 3]) -> Self {
        Progress { written, done, failed }
    }
}

/// Writes the checkpoints of a run and removes old ones. All ranks must call the same methods in the same
/// order.
pub struct Saver {
    options: SaveOptions,
    rank: usize,
    pending: Option<Pending>,
    cpu_time: Duration,
    meter: Arc<Meter>,
}

/// A save in progress.
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

    /// Returns the meter of the bytes written of this rank's part, for the save that was begun last.
    pub fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// Returns whether a save is in progress in the background.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Begins to save the current state; later steps do not change the data that is written. In the
    /// background it returns at once, otherwise it returns the folder when everything is on the disk. Waits
    /// for an earlier save first. Collective.
    ///
    /// # Errors
    ///
    /// If this save or the previous one cannot be written. Earlier checkpoints are unchanged.
    pub fn begin(&mut self, engine: &Engine, context: SaveContext) -> Result<Option<PathBuf>> {
        self.settle(engine)?;
        let context = SaveContext { optimizer: SavedOptimizer::of(engine.optimizer()), ..context };
        let place = folder::place_of(&self.options.folder, context.state.step);
        let beside = folder::beside(&place);
        let begun = match self.rank {
            0 => self.options.check_held().and_then(|()| part::begin(&place).map(drop)),
            _ => Ok(()),
        };
        self.agree(engine, begun)?;
        if self.options.format == Format::Full {
            let (options, step, ranks) =
                (self.options.clone(), context.state.step, engine.world().world_size());
            let slots = context.optimizer.slots();
            let (to, from) = (place.clone(), beside.clone());
            let complete = move |layout: &[ParamGroupLayout], parts, status: &Status| {
                options.check_held()?;
                let (format, context) = (Format::Full, &context);
                Completion { format, ranks, layout, parts, context }.complete(&from, &to)?;
                // A disk that hung for long may return when the run has given up this save.
                status.get_on().then_some(()).ok_or(CheckpointError::OtherRank)?;
                finish(&options, step)
            };
            let patience = Patience::new(engine.policy().timeout, self.options.timeout);
            let saved = full::save(engine, slots, &beside, patience, self.meter.clone(), complete);
            let agreed = self.agree(engine, saved);
            self.clean_after(agreed, &place)?;
            return Ok(Some(place));
        }
        let status = Arc::new(Status::new(self.meter.clone()));
        let writer = Writer {
            snapshot: engine.snapshot(),
            layout: engine.layout().groups.clone(),
            mesh: engine.mesh(),
            rank: self.rank,
            place: place.clone(),
            context,
            options: self.options.clone(),
            status: status.clone(),
        };
        let thread = std::thread::Builder::new()
            .name(format!("rank{}-checkpoint", self.rank))
            .spawn(move || writer.run())
            .map_err(CheckpointError::io("start a thread to write", &place));
        let agreed = self.agree(engine, thread);
        if agreed.is_err() {
            // A thread that was started has no others to wait for.
            status.cancel();
        }
        self.pending = Some(Pending { place, status, thread: agreed? });
        if self.options.background { Ok(None) } else { self.settle(engine) }
    }

    /// Returns this rank's progress; it must be summed over the ranks and passed to [`Saver::advance`].
    pub fn progress(&self) -> Progress {
        let Some(Pending { status, .. }) = &self.pending else { return Progress::default() };
        let stage = status.stage();
        let failed = stage == Stage::Failed || status.is_stalled(self.options.timeout);
        let is = |true_now: bool| f64::from(u8::from(true_now));
        Progress {
            written: is(matches!(stage, Stage::Written | Stage::Complete)),
            // Rank 0 completes the checkpoint when its own part is written.
            done: is(stage == Stage::Complete),
            failed: is(failed),
        }
    }

    /// Ends a save in the background when it is complete or has failed. `all` is the sum of all ranks'
    /// progress, so all ranks do so in the same step. Returns the folder of a completed checkpoint.
    /// Collective if there is a save to end.
    pub fn advance(&mut self, engine: &Engine, all: Progress) -> Result<Option<PathBuf>> {
        let ranks = engine.world().world_size() as f64;
        self.heed(all, ranks);
        if all.failed > 0.0 || all.done == ranks { self.settle(engine) } else { Ok(None) }
    }

    /// Informs this rank's thread of the others' progress.
    fn heed(&self, all: Progress, ranks: f64) {
        let Some(Pending { status, .. }) = &self.pending else { return };
        if all.failed > 0.0 {
            status.cancel();
        } else if all.written == ranks {
            status.all_written(self.options.timeout);
        }
    }

    /// Waits for the save in progress, if there is one, and returns its folder. However long that takes, no
    /// rank waits long for a message from another. Collective.
    pub fn settle(&mut self, engine: &Engine) -> Result<Option<PathBuf>> {
        let beat = Patience::new(engine.policy().timeout, self.options.timeout).beat;
        let ranks = engine.world().world_size() as f64;
        while let Some(Pending { status, .. }) = &self.pending {
            status.wait(beat);
            let mine = self.progress().to_values();
            let sums = engine.all_reduce_f64(Phase::Checkpoint, "save", &mine)?;
            let all = Progress::from_values([sums[0], sums[1], sums[2]]);
            self.heed(all, ranks);
            if all.done + all.failed == ranks {
                break;
            }
        }
        let Some(pending) = self.pending.take() else { return Ok(None) };
        let place = pending.place.clone();
        self.meter.begin(0);
        let written = self.end(pending).map(|cpu_time| self.cpu_time = cpu_time);
        let outcome = self.agree(engine, written);
        self.clean_after(outcome, &place)?;
        Ok(Some(place))
    }

    /// Waits for the end of a thread, unless it hangs.
    fn end(&self, pending: Pending) -> Result<Duration> {
        let Pending { place, status, thread } = pending;
        let timeout = self.options.timeout;
        if status.is_stalled(timeout) {
            // It hangs in the system, where it cannot be interrupted. If it ever returns, it finds that its
            // work is no longer wanted.
            status.cancel();
            let (path, seconds) = (folder::beside(&place), timeout.as_secs_f64());
            return Err(CheckpointError::Stalled { path, seconds });
        }
        thread.join().unwrap_or_else(|_| {
            let source = std::io::Error::other("the thread that writes it panicked");
            Err(CheckpointError::io("write", &place)(source))
        })
    }

    /// Returns the processor time of this rank's thread for the last complete sharded checkpoint.
    pub fn cpu_time(&self) -> Duration {
        self.cpu_time
    }

    /// Removes the remains of a failed save, to free their space.
    fn clean_after(&self, outcome: Result<()>, place: &Path) -> Result<()> {
        if outcome.is_err()
            && self.rank == 0
            && !self.options.is_lost()
            && let Err(error) = disk::remove(&folder::beside(place))
        {
            tracing::warn!("{error}");
        }
        outcome
    }

    /// Returns `mine` if no rank has an error; otherwise each rank gets its own error, or that another has
    /// one.
    fn agree<T>(&self, engine: &Engine, mine: Result<T>) -> Result<T> {
        let failed = [f64::from(u8::from(mine.is_err()))];
        let failed = engine.all_reduce_f64(Phase::Checkpoint, "save", &failed)?;
        if failed[0] == 0.0 {
            return mine;
        }
        // A lost folder causes many kinds of errors, possibly on other ranks first.
        match self.options.check_held() {
            Err(lost @ CheckpointError::NotHeld { .. }) => Err(lost),
            _ => mine.and(Err(CheckpointError::OtherRank)),
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // The run has failed. If all ranks have written their parts, they may still become a checkpoint;
        // nothing may be written into the run folder afterwards.
        if let Some(pending) = self.pending.take() {
            let place = pending.place.clone();
            // The others must learn of a panic before they give up on this rank.
            if std::thread::panicking() {
                pending.status.cancel();
            } else {
                pending.status.hurry();
            }
            if let Err(error) = self.end(pending)
                && !error.is_consequence()
            {
                tracing::warn!("{error}");
            }
            if self.rank == 0 && !self.options.is_lost() {
                let _ = disk::remove(&folder::beside(&place));
            }
        }
    }
}

/// Writes the part of one rank, and on rank 0 completes the checkpoint from all parts.
struct Writer {
    snapshot: Snapshot,
    layout: Vec<ParamGroupLayout>,
    mesh: Mesh,
    rank: usize,
    place: PathBuf,
    context: SaveContext,
    options: SaveOptions,
    status: Arc<Status>,
}

impl Writer {
    /// Writes the part, and returns the processor time.
    fn run(mut self) -> Result<Duration> {
        memory::bind_to_rank(self.rank);
        // Reports a failure even if this panics.
        let failed = self.status.fail_on_drop();
        let beside = folder::beside(&self.place);
        // The chunk of every group that this rank writes.
        let chunk = ParamGroupLayout::own_chunk(&self.mesh, self.rank);
        let slots = self.context.optimizer.slots();
        let mut values = Watched { snapshot: &mut self.snapshot, status: &self.status };
        self.status.meter().begin(part::bytes_of_chunk(&self.layout, chunk, &slots, &values));
        let part = part::write_chunk(&beside, &self.layout, chunk, &slots, &mut values)?;
        part.leave(&beside, chunk)?;
        self.status.set(Stage::Written);
        if self.rank == 0 {
            self.complete(&beside)?;
        }
        self.status.set(Stage::Complete);
        failed.forget();
        // A clock that every thread has.
        Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from))
    }

    fn complete(&self, beside: &Path) -> Result<()> {
        let (layout, context) = (&self.layout[..], &self.context);
        let ranks = self.mesh.world_size();
        let parts = self.wait_for_parts(beside, ranks)?;
        part::forget_all(beside, ranks)?;
        self.go_on()?;
        self.options.check_held()?;
        let completion = Completion { format: Format::Sharded, ranks, layout, parts, context };
        completion.complete(beside, &self.place)?;
        self.go_on()?;
        finish(&self.options, context.state.step)
    }

    fn wait_for_parts(&self, beside: &Path, ranks: usize) -> Result<Vec<WriterOutput>> {
        let [mut pause, longest] = PAUSES;
        loop {
            let missing = match part::find_all(beside, ranks)? {
                Left::All(parts) => return Ok(parts),
                Left::Without(missing) => missing,
            };
            match self.status.pause(pause) {
                Next::Look => pause = longest.min(2 * pause),
                Next::GiveUp => return Err(CheckpointError::OtherRank),
                Next::Overdue => {
                    let of_chunk =
                        |rank: &usize| missing.contains(&ParamGroupLayout::own_chunk(&self.mesh, *rank));
                    return Err(CheckpointError::MissingParts {
                        folder: beside.to_owned(),
                        ranks: (0..ranks).filter(of_chunk).collect(),
                        seconds: self.options.timeout.as_secs_f64(),
                    });
                }
            }
        }
    }

    /// Fails if this checkpoint is no longer wanted.
    fn go_on(&self) -> Result<()> {
        if self.status.get_on() { Ok(()) } else { Err(CheckpointError::OtherRank) }
    }
}

/// A snapshot, with the status that records the progress of writing it.
struct Watched<'a> {
    snapshot: &'a mut Snapshot,
    status: &'a Status,
}

impl Values for Watched<'_> {
    fn has(&self, group: usize, saved: &Saved) -> bool {
        self.snapshot.has(group, saved.kind())
    }

    fn get(&self, layout: &[ParamGroupLayout], entry: &Entry) -> Result<Cow<'_, [f32]>> {
        if !self.status.get_on() {
            return Err(CheckpointError::OtherRank);
        }
        let values = self.snapshot.values(entry.group, entry.saved.kind())?.unwrap_or_default();
        let group = &layout[entry.group];
        let start = group.parameters[entry.slot].offset + entry.range.start;
        let within = start % group.chunk;
        self.status.meter().add((entry.range.len() * size_of::<f32>()) as u64);
        Ok(Cow::Borrowed(&values[within..within + entry.range.len()]))
    }

    fn done(&mut self, group: usize, saved: &Saved) {
        self.snapshot.release(group, saved.kind());
    }
}

/// Finishes after the checkpoint of `step` has been moved to its place.
fn finish(options: &SaveOptions, step: u64) -> Result<()> {
    options.check_held()?;
    folder::point_to(&options.folder, step)?;
    options.check_held()?;
    folder::remove_old(&options.folder, options.keep, step);
    Ok(())
}
