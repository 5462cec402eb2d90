//! Saving while a run goes on.
//!
//! A save begins with a word between the ranks, takes a snapshot, and goes on behind the step: every
//! rank writes its part in a thread of its own and leaves word of it in the folder. When rank 0 finds
//! the word of all, it completes the checkpoint, also behind the step and without a collective. How
//! far the ranks are travels with the sum of the losses after each step, so that all of them learn of
//! a failure, and of the end, in the same step.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use kiln_collectives::Phase;
use kiln_shard::{Engine, Snapshot, UnitLayout, memory};
use nix::time::{ClockId, clock_gettime};

use super::manifest::Format;
use super::part::{self, Completion, Part};
use super::status::{Stage, Status};
use super::{
    Architecture, CheckpointError, CheckpointState, Keep, SavedOptimizer, disk, folder, full,
};

/// What goes into a checkpoint besides the engine's values.
#[derive(Clone, Debug)]
pub struct SaveContext {
    /// What computes with the weights. Whoever cannot build it refuses the checkpoint.
    pub architecture: Architecture,
    /// What the weights were trained with.
    pub optimizer: SavedOptimizer,
    /// Where the run stands.
    pub state: CheckpointState,
    /// The resolved configuration, as TOML.
    pub config: Option<String>,
    /// Files that are copied into it under their names, such as the tokenizer's.
    pub files: Vec<PathBuf>,
}

impl SaveContext {
    /// Of a run of the built-in decoder under the built-in AdamW, without a configuration and files.
    pub fn built_in(state: CheckpointState) -> Self {
        SaveContext {
            architecture: Architecture::decoder(),
            optimizer: SavedOptimizer::adamw(),
            state,
            config: None,
            files: Vec::new(),
        }
    }
}

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
}

/// How far a rank is with a save in the background, in numbers that add up over the ranks.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Progress {
    /// 1 when there is nothing left for it to do.
    pub done: f64,
    /// 1 when it could not do its part.
    pub failed: f64,
}

/// Writes the checkpoints of a run and removes old ones. All ranks call the same methods in the same
/// order.
pub struct Saver {
    options: SaveOptions,
    rank: usize,
    pending: Option<Pending>,
    cpu_time: Duration,
}

/// A save under way.
struct Pending {
    place: PathBuf,
    status: Arc<Status>,
    thread: JoinHandle<Result<Duration, CheckpointError>>,
}

impl Saver {
    /// A saver of `rank`.
    pub fn new(options: SaveOptions, rank: usize) -> Self {
        Saver { options, rank, pending: None, cpu_time: Duration::ZERO }
    }

    /// Begins to save the state as it is now; later steps do not change what is written. In the
    /// background it returns at once, else its folder when all is on the disk. A save that is still
    /// under way is waited for first. Collective.
    ///
    /// # Errors
    ///
    /// When this save or the one before cannot be written. Earlier checkpoints stay as they are.
    pub fn begin(
        &mut self,
        engine: &Engine,
        context: SaveContext,
    ) -> Result<Option<PathBuf>, CheckpointError> {
        self.settle(engine)?;
        let place = folder::place_of(&self.options.folder, context.state.step);
        let beside = folder::beside(&place);
        let begun = if self.rank == 0 { part::begin(&place).map(drop) } else { Ok(()) };
        self.agree(engine, begun)?;
        if self.options.format == Format::Full {
            let saved = full::save(engine, &context, &beside, &place);
            let finished = saved.and_then(|()| match self.rank {
                0 => finish(&self.options, context.state.step),
                _ => Ok(()),
            });
            let agreed = self.agree(engine, finished);
            self.clean_after(agreed, &place)?;
            return Ok(Some(place));
        }
        let status = Arc::new(Status::default());
        let writer = Writer {
            snapshot: engine.snapshot(),
            layout: engine.layout().units.clone(),
            piece: UnitLayout::own_piece(&engine.mesh(), self.rank),
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
        let thread = self.agree(engine, thread)?;
        self.pending = Some(Pending { place, status, thread });
        if self.options.background { Ok(None) } else { self.settle(engine) }
    }

    /// How far this rank is; to be summed over the ranks and given to [`Saver::advance`].
    pub fn progress(&self) -> Progress {
        let Some(pending) = &self.pending else { return Progress::default() };
        let stage = pending.status.stage();
        // Rank 0 completes the checkpoint when its own part is written.
        let done = stage == Stage::Complete || (stage == Stage::Written && self.rank != 0);
        let failed = stage == Stage::Failed;
        Progress { done: f64::from(u8::from(done)), failed: f64::from(u8::from(failed)) }
    }

    /// Ends a save in the background when it is complete or has failed. `all` is the sum of what all
    /// ranks reported, so all do so in the same step. Returns the folder of a checkpoint that is
    /// complete. Collective when there is something to end.
    pub fn advance(
        &mut self,
        engine: &Engine,
        all: Progress,
    ) -> Result<Option<PathBuf>, CheckpointError> {
        let ranks = engine.world().world_size() as f64;
        if all.failed > 0.0 || all.done == ranks { self.settle(engine) } else { Ok(None) }
    }

    /// Waits for the save that is under way, if there is one; returns its folder. Collective.
    pub fn settle(&mut self, engine: &Engine) -> Result<Option<PathBuf>, CheckpointError> {
        let Some(Pending { place, status, thread }) = self.pending.take() else { return Ok(None) };
        let written = status.wait_for_part();
        let failed = [f64::from(u8::from(!written))];
        if engine.sum_in(Phase::Checkpoint, "save", &failed)?[0] > 0.0 {
            // Rank 0 waits for parts that will not come.
            status.cancel();
        }
        let written = join(thread, &place).map(|cpu_time| self.cpu_time = cpu_time);
        let outcome = self.agree(engine, written);
        self.clean_after(outcome, &place)?;
        Ok(Some(place))
    }

    /// What this rank's thread has taken of the processors, in all, for the last sharded checkpoint
    /// that is complete.
    pub fn cpu_time(&self) -> Duration {
        self.cpu_time
    }

    /// Takes away what a failed save has left, so that its room is free.
    fn clean_after(
        &self,
        outcome: Result<(), CheckpointError>,
        place: &Path,
    ) -> Result<(), CheckpointError> {
        if outcome.is_err()
            && self.rank == 0
            && let Err(error) = disk::remove(&folder::beside(place))
        {
            tracing::warn!("{error}");
        }
        outcome
    }

    /// `mine` if no rank has an error; else each rank gets its own, or that another has one.
    fn agree<T>(
        &self,
        engine: &Engine,
        mine: Result<T, CheckpointError>,
    ) -> Result<T, CheckpointError> {
        let failed = [f64::from(u8::from(mine.is_err()))];
        let failed = engine.sum_in(Phase::Checkpoint, "save", &failed)?;
        let mine = mine?;
        if failed[0] > 0.0 { Err(CheckpointError::OtherRank) } else { Ok(mine) }
    }
}

impl Drop for Saver {
    fn drop(&mut self) {
        // The run has failed. What all ranks have written may still become a checkpoint; nothing is
        // to write into the run folder afterwards.
        if let Some(Pending { place, status, thread }) = self.pending.take() {
            // A panic is to be heard by the others before they give up on this rank.
            if std::thread::panicking() {
                status.cancel()
            } else {
                status.hurry()
            }
            if let Err(error) = join(thread, &place)
                && !error.is_consequence()
            {
                tracing::warn!("{error}");
            }
            if self.rank == 0 {
                let _ = disk::remove(&folder::beside(&place));
            }
        }
    }
}

fn join(
    thread: JoinHandle<Result<Duration, CheckpointError>>,
    place: &Path,
) -> Result<Duration, CheckpointError> {
    thread.join().unwrap_or_else(|_| {
        let source = std::io::Error::other("the thread that writes it panicked");
        Err(CheckpointError::io("write", place)(source))
    })
}

/// Writes the part of one rank, and on rank 0 what makes a checkpoint of all parts.
struct Writer {
    snapshot: Snapshot,
    layout: Vec<UnitLayout>,
    /// The piece of every unit that this rank writes.
    piece: usize,
    rank: usize,
    place: PathBuf,
    context: SaveContext,
    options: SaveOptions,
    status: Arc<Status>,
}

impl Writer {
    /// Returns what it has taken of the processors.
    fn run(mut self) -> Result<Duration, CheckpointError> {
        memory::bind_to_rank(self.rank);
        // Also if this panics.
        let failed = self.status.fail_on_drop();
        let beside = folder::beside(&self.place);
        let part = part::write_piece(&beside, &self.layout, self.piece, &mut self.snapshot)?;
        part.leave(&beside, self.piece)?;
        self.status.set(Stage::Written);
        if self.rank == 0 {
            self.complete(&beside)?;
        }
        self.status.set(Stage::Complete);
        failed.forget();
        // A clock that every thread has.
        Ok(clock_gettime(ClockId::CLOCK_THREAD_CPUTIME_ID).map_or(Duration::ZERO, Duration::from))
    }

    fn complete(&self, beside: &Path) -> Result<(), CheckpointError> {
        let (layout, context) = (&self.layout[..], &self.context);
        let ranks = layout.first().map_or(1, |unit| unit.pieces);
        while !Part::all_are_left(beside, ranks) {
            if !self.status.pause() {
                return Err(CheckpointError::OtherRank);
            }
        }
        let parts = Part::take_all(beside, ranks)?;
        let completion = Completion { format: Format::Sharded, ranks, layout, parts, context };
        completion.complete(beside, &self.place)?;
        finish(&self.options, context.state.step)
    }
}

/// After the checkpoint of `step` has come to its place.
fn finish(options: &SaveOptions, step: u64) -> Result<(), CheckpointError> {
    folder::point_to(&options.folder, step)?;
    folder::remove_old(&options.folder, options.keep, step);
    Ok(())
}
