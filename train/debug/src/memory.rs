//! `kiln train --memory-profile`: the memory of one step, by owner and over time.

use std::path::{Path, PathBuf};

use kiln_collectives::StepTimeline;
use kiln_observe::profile::{Change, Holder, Profile, Recorded, save};
use kiln_shard::Engine;
use kiln_shard::memory::{self, Profiler};

use crate::share::collect;
use kiln_train::error::Result;
use kiln_train::metrics::{StepMetrics, print_line};
use kiln_train::run::Observer;

/// Records a rank's allocations in one step; rank 0 then writes the profiles of all ranks.
pub struct MemoryProfiler {
    step: u64,
    folder: PathBuf,
    rank: usize,
    under_way: Option<Profiler>,
    profile: Option<Profile>,
    words: Option<String>,
    /// Set once the profiled step begins, or once a warning reports that the run has no such step.
    is_told: bool,
}

impl MemoryProfiler {
    pub fn new(step: u64, out: &Path, rank: usize) -> Self {
        MemoryProfiler {
            step,
            folder: out.join("memory"),
            rank,
            under_way: None,
            profile: None,
            words: None,
            is_told: false,
        }
    }

    fn recorded(&self, of: memory::Profile, timeline: Option<StepTimeline>) -> Recorded {
        let memory::Profile { holders, held, changes, held_at_end, missing } = of;
        let holder =
            |holder: memory::HeldFor| Holder { owner: holder.owner.name().to_owned(), module: holder.module };
        let change = |change: memory::Change| Change {
            after: change.after.as_secs_f64(),
            holder: change.holder,
            bytes: change.bytes,
        };
        let (seconds, doings) = timeline.map_or((0.0, Vec::new()), |timeline| {
            let doing =
                |span: kiln_collectives::Span| (span.start - timeline.start, span.activity, span.module);
            (timeline.end - timeline.start, timeline.spans.into_iter().map(doing).collect())
        });
        Recorded {
            rank: self.rank,
            step: self.step,
            seconds,
            holders: holders.into_iter().map(holder).collect(),
            held,
            changes: changes.into_iter().map(change).collect(),
            held_at_end,
            missing,
            doings,
        }
    }
}

impl Observer for MemoryProfiler {
    fn is_observing(&self, step: u64) -> bool {
        step == self.step
    }

    fn is_observing_passes(&self, _step: u64) -> bool {
        false
    }

    fn on_step_begin(&mut self, _engine: &Engine, step: u64) {
        if step > self.step && !self.is_told {
            self.is_told = true;
            if self.rank == 0 {
                tracing::warn!("no memory profile: the run resumed at step {step}, after step {}", self.step);
            }
        }
        if step == self.step {
            self.is_told = true;
            self.under_way = memory::begin_profile(self.rank);
        }
    }

    fn on_step_end(&mut self, engine: &Engine, step: u64) {
        // Stops before the step is logged, which allocates memory too.
        let Some(profiler) = self.under_way.take().filter(|_| step == self.step) else { return };
        let profile = profiler.end();
        engine.set_activity("memory profile");
        let timeline = engine.world().view().timeline(Some(step));
        self.profile = Some(Profile::of(self.recorded(profile, timeline)));
    }

    fn on_step_done(&mut self, engine: &Engine, _metrics: &StepMetrics) -> Result<()> {
        // A rank that cannot serialize its profile still takes part in the collective.
        let mine = serde_json::to_vec(&self.profile.take()).unwrap_or_default();
        let all = collect(engine, mine)?;
        if self.rank != 0 {
            return Ok(());
        }
        let profiles: Vec<Profile> =
            all.iter().filter_map(|message| serde_json::from_slice::<Option<_>>(message).ok()?).collect();
        let Some(largest) = profiles.iter().max_by_key(|profile| profile.peak.held.total()) else {
            tracing::warn!("no memory profile: no rank recorded its allocations");
            return Ok(());
        };
        let rank = largest.rank;
        self.words = Some(format!("memory of rank {rank} in step {}: {largest}", self.step));
        match save(&profiles, &self.folder) {
            Ok(text) => print_line(&format!("memory profile: {}", text.display())),
            // A failure here does not end the run.
            Err(error) => tracing::warn!("no memory profile in {}: {error}", self.folder.display()),
        }
        Ok(())
    }

    fn closing(&self) -> Option<String> {
        self.words.clone()
    }
}

impl Drop for MemoryProfiler {
    fn drop(&mut self) {
        if !self.is_told && self.rank == 0 {
            tracing::warn!("no memory profile: the run ended before step {}", self.step);
        }
    }
}
