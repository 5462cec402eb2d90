//! Saving while a run goes on.
//!
//! A save begins with a word between the ranks, takes a snapshot, and goes on behind the step: every
//! rank writes its part in a thread of its own and leaves word of it in the folder. When rank 0 finds
//! the word of all, it completes the checkpoint, also behind the step and without a collective. How
//! far the ranks are travels with the sum of the losses after each step, so that all of them learn of
//! a failure, and of the end, in the same step.
//!
//! A save that does not get on has failed, and that is all: when all ranks have written their parts,
//! rank 0 has [`SaveOptions::timeout`] to find them, and a rank may go no longer than that without
//! writing anything. Who waits for the end of a save says so to the others every few seconds.

use std::borrow::Cow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kiln_collectives::Phase;
use kiln_process::Meter;
use kiln_shard::{Engine, Mesh, ParamGroupLayout, Snapshot, memory};
use nix::time::{ClockId, clock_gettime};

use super::manifest::Format;
use super::part::{self, Completion, Entry, Left, Values, WriterOutput};
use super::saved::Saved;
use super::status::{Next, Patience, Stage, Status};
use super::{CheckpointError, HeldFolder, Keep, Result, SaveContext, SavedOptimizer, disk, folder, full};

/// How a run saves.
#[derive(Clone, Debug)]
pub struct SaveOptions {
    /// Folder of all checkpoints of the run.
    pub folder: PathBuf,
    /// Sharded or full.
    pub format: Format,
    /// Whether sharded checkpoints are written behind the steps that follow. Full ones never are:
    /// rank 0 would have to hold the whole model.
    pub background: bool,
    /// Which checkpoints stay.
    pub keep: Keep,
    /// How long a save may go without getting on: the parts of all ranks are written and not all of
    /// them can be seen, or a rank does not get anything written.
    pub timeout: Duration,
    /// The run folder around them, if it is locked: nothing is written or removed there once it is another's.
    pub held: Option<HeldFolder>,
}

impl SaveOptions {
    /// Sharded checkpoints in `folder`, all of which stay, written by the time that a save is settled.
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

/// Between two looks at what the other ranks have written: at first, and at most.
const PAUSES: [Duration; 2] = [Duration::from_millis(10), Duration::from_millis(320)];

/// How far a rank is with a save in the background, in numbers that add up over the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// 1 when its part is on the disk.
    pub written: f64,
    /// 1 when there is nothing left for it to do.
    pub done: f64,
    /// 1 when it could not do its part.
    pub failed: f64,
}

impl Progress {
    /// As numbers to be summed over the ranks.
    pub fn to_values(self) -> [f64; 3] {
        [self.written, self.done, self.failed]
    }

    /// From sums of [`Progress::to_values`].
    pub fn from_values([written, done, failed]: [f64; 3]) -> Self {
        Progress { written, done, failed }
    }
}

/// Writes the checkpoints of a run and removes old ones. All ranks call the same methods in the same order.
pub struct Saver {
    options: SaveOptions,
    rank: usize,
    pending: Option<Pending>,
    cpu_time: Duration,
    meter: Arc<Meter>,
}

/// A save under way.
struct Pending {
    place: PathBuf,
    status: Arc<Status>,
    thread: JoinHandle<Result<Duration>>,
}

impl Saver {
    /// A saver of `rank`.
    pub fn new(options: SaveOptions, rank: usize) -> Self {
        Saver { options, rank, pending: None, cpu_time: Duration::ZERO, meter: Arc::default() }
    }

    /// Counts the bytes of this rank's part that are written, of the save that was begun last.
    pub fn meter(&self) -> &Arc<Meter> {
        &self.meter
    }

    /// Whether a save is under way in the background.
    pub fn is_pending(&self) -> bool {
        self.pending.is_some()
    }

    /// Begins to save the state as it is now; later steps do not change what is written. In the
    /// background it returns at once, else its folder when all is on the disk. A save that is still
    /// under way is waited for first. Collective.
    ///
    /// # Errors
    ///
    /// When this save or the one before cannot be written. Earlier checkpoints stay as they are.
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
                // A disk that hung for long returns to a run that has given this save up.
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
            // A thread that could be started has no others to wait for.
            status.cancel();
        }
        self.pending = Some(Pending { place, status, thread: agreed? });
        if self.options.background { Ok(None) } else { self.settle(engine) }
    }

    /// How far this rank is; to be summed over the ranks and given to [`Saver::advance`].
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

    /// Ends a save in the background when it is complete or has failed. `all` is the sum of what all
    /// ranks reported, so all do so in the same step. Returns the folder of a checkpoint that is
    /// complete. Collective when there is something to end.
    pub fn advance(&mut self, engine: &Engine, all: Progress) -> Result<Option<PathBuf>> {
        let ranks = engine.world().world_size() as f64;
        self.heed(all, ranks);
        if all.failed > 0.0 || all.done == ranks { self.settle(engine) } else { Ok(None) }
    }

    /// Tells this rank's thread what the others have come to.
    fn heed(&self, all: Progress, ranks: f64) {
        let Some(Pending { status, .. }) = &self.pending else { return };
        if all.failed > 0.0 {
            status.cancel();
        } else if all.written == ranks {
            status.all_written(self.options.timeout);
        }
    }

    /// Waits for the save that is under way, if there is one; returns its folder. However long that
    /// takes, no rank waits long for another's word. Collective.
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

    /// Waits for the end of a thread, unless nothing can be expected of it any more.
    fn end(&self, pending: Pending) -> Result<Duration> {
        let Pending { place, status, thread } = pending;
        let timeout = self.options.timeout;
        if status.is_stalled(timeout) {
            // It hangs in the system, where nobody can call it back. Should it ever return, it finds
            // that its work is not wanted any more.
            status.cancel();
            let (path, seconds) = (folder::beside(&place), timeout.as_secs_f64());
            return Err(CheckpointError::Stalled { path, seconds });
        }
        thread.join().unwrap_or_else(|_| {
            let source = std::io::Error::other("the thread that writes it panicked");
            Err(CheckpointError::io("write", &place)(source))
        })
    }

    /// Processor time that this rank's thread has taken for the last complete sharded checkpoint.
    pub fn cpu_time(&self) -> Duration {
        self.cpu_time
    }

    /// Takes away what a failed save has left, so that its room is free.
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

    /// `mine` if no rank has an error; else each rank gets its own, or that another has one.
    fn agree<T>(&self, engine: &Engine, mine: Result<T>) -> Result<T> {
        let failed = [f64::from(u8::from(mine.is_err()))];
        let failed = engine.all_reduce_f64(Phase::Checkpoint, "save", &failed)?;
        if failed[0] == 0.0 {
            return mine;
        }
        // That the folder is gone shows in many ways, and maybe to other ranks first.
        match self.options.check_held() {
            Err(lost @ CheckpointError::NotHeld { .. }) => Err(lost),
            _ => mine.and(Err(CheckpointError::OtherRank)),
        }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // The run has failed. What all ranks have written may still become a checkpoint; nothing is
        // to write into the run folder afterwards.
        if let Some(pending) = self.pending.take() {
            let place = pending.place.clone();
            // A panic is to be heard by the others before they give up on this rank.
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

/// Writes the part of one rank, and on rank 0 what makes a checkpoint of all parts.
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
    /// Returns what it has taken of the processors.
    fn run(mut self) -> Result<Duration> {
        memory::bind_to_rank(self.rank);
        // Also if this panics.
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

    /// Fails if nobody wants this checkpoint any more.
    fn go_on(&self) -> Result<()> {
        if self.status.get_on() { Ok(()) } else { Err(CheckpointError::OtherRank) }
    }
}

/// A snapshot, and whoever wants to know that what is in it gets written.
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

/// After the checkpoint of `step` has come to its place.
fn finish(options: &SaveOptions, step: u64) -> Result<()> {
    options.check_held()?;
    folder::point_to(&options.folder, step)?;
    options.check_held()?;
    folder::remove_old(&options.folder, options.keep, step);
    Ok(())
}
