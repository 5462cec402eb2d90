use std::collections::BTreeMap;
use std::path::PathBuf;

use kiln_collectives::Recorder;
use kiln_observe::trace::{RecordedRank, RecordedStep, Trace};
use kiln_shard::Engine;

use super::options::TraceOptions;
use crate::share::collect;
use kiln_config::device::{Recording, ResolvedDevice};
use kiln_train::error::{Result, TrainError};
use kiln_train::metrics::{StepMetrics, print_line};
use kiln_train::run::ObservedRank;
use kiln_train::run::Observer;

/// Collects a rank's events in the requested steps; rank 0 then writes the trace of all ranks. Tensors are not read, so
/// the steps are the same as without tracing.
pub struct Tracer {
    options: TraceOptions,
    path: PathBuf,
    rank: usize,
    device: ResolvedDevice,
    recorded: RecordedRank,
    gpu: Option<Recording>,
    now: Option<(u64, BTreeMap<String, u64>)>,
    is_done: bool,
}

impl Tracer {
    pub fn new(options: TraceOptions, of: &ObservedRank) -> Self {
        let (path, device) = (options.path(&of.out), of.device.clone());
        let recorded = RecordedRank { groups: BTreeMap::new(), steps: Vec::new(), gpu: Vec::new() };
        Tracer { options, path, rank: of.rank, device, recorded, gpu: None, now: None, is_done: false }
    }

    /// Starts recording the rank's GPU, if it has one. On failure, the trace has no GPU events.
    fn record_gpu(&self) -> Option<Recording> {
        self.device
            .record()
            .inspect_err(|why| tracing::warn!("the trace will have no GPU events: {why}"))
            .ok()
            .flatten()
    }

    fn end_step(&mut self, engine: &Engine) {
        let Some((step, before)) = self.now.take() else { return };
        let after = sums(engine.world().recorder());
        let since = |(name, sum): (String, u64)| {
            let before = before.get(&name).copied().unwrap_or(0);
            (sum > before).then(|| (name, sum - before))
        };
        let sums = after.into_iter().filter_map(since).collect();
        if let Some(mut timeline) = engine.world().view().timeline(Some(step)) {
            if engine.world().is_one_process() {
                // Ranks that are threads share a machine and need no node name.
                timeline.node = rustix::system::uname().nodename().to_string_lossy().into_owned();
            }
            self.recorded.steps.push(RecordedStep { timeline, sums });
        }
    }

    /// Writes the trace of all ranks on rank 0. Collective.
    fn finish(&mut self, engine: &Engine) -> Result<()> {
        let view = engine.world().view();
        let groups = view.flight(0).groups.into_iter().map(|group| (group.name, group.ranks));
        self.recorded.groups = groups.collect();
        let mine = serde_json::to_vec(&self.recorded);
        (self.recorded.steps, self.recorded.gpu) = (Vec::new(), Vec::new());
        // A rank that cannot serialize its steps still takes part in the collective.
        let all = collect(engine, mine.unwrap_or_default())?;
        if self.rank != 0 {
            return Ok(());
        }
        let ranks: Vec<RecordedRank> =
            all.iter().filter_map(|message| serde_json::from_slice(message).ok()).collect();
        match Trace::from_ranks(&ranks).save(&self.path) {
            Ok(path) => {
                let path = path.display();
                print_line(&format!(
                    "trace: {path}; open it at https://ui.perfetto.dev, or run: kiln trace summary {path}"
                ));
            }
            Err(error) => tracing::warn!("no trace: {error}"),
        }
        Ok(())
    }
}

impl Observer for Tracer {
    fn is_observing(&self, step: u64) -> bool {
        // Only the last traced step: the recorder then has the events of all traced steps.
        step == *self.options.steps.end()
    }

    fn is_observing_passes(&self, _step: u64) -> bool {
        false
    }

    fn on_step_begin(&mut self, engine: &Engine, step: u64) {
        let recorder = engine.world().recorder();
        self.end_step(engine);
        let is_new = self.recorded.steps.is_empty();
        if step > *self.options.steps.end() && is_new && !self.is_done {
            self.is_done = true;
            if self.rank == 0 {
                tracing::warn!("no trace: the run resumed at step {step}, after {}", self.options);
            }
        }
        if !self.options.steps.contains(&step) {
            return;
        }
        if is_new {
            recorder.keep_all(true);
            self.gpu = self.record_gpu();
            if step != *self.options.steps.start() && self.rank == 0 {
                tracing::warn!("--trace: the run resumed at step {step}, so the trace starts there");
            }
        }
        self.now = Some((step, sums(recorder)));
    }

    fn on_step_done(&mut self, engine: &Engine, _metrics: &StepMetrics) -> Result<()> {
        engine.set_activity("tracing");
        self.end_step(engine);
        engine.world().recorder().keep_all(false);
        self.is_done = true;
        if let Some(gpu) = self.gpu.take() {
            // Work submitted so far belongs to the steps of the trace.
            self.device
                .device()
                .sync()
                .map_err(|error| TrainError::Crash(format!("the GPU has failed: {error}")))?;
            self.recorded.gpu = gpu();
        }
        self.finish(engine)
    }
}

impl Drop for Tracer {
    fn drop(&mut self) {
        if !self.is_done && self.rank == 0 {
            tracing::warn!("no trace: the run has ended before step {}", self.options.steps.end());
        }
    }
}

/// Returns the recorder's sums by name. Times are in nanoseconds.
fn sums(recorder: &Recorder) -> BTreeMap<String, u64> {
    let mut sums = BTreeMap::new();
    let mut add = |name: String, sum: u64| *sums.entry(name).or_insert(0) += sum;
    for time in recorder.times() {
        let nanoseconds = |time: std::time::Duration| u64::try_from(time.as_nanos()).unwrap_or(u64::MAX);
        add(format!("busy_ns.{}", time.activity), nanoseconds(time.busy));
        add(format!("waited_ns.{}", time.activity), nanoseconds(time.waited));
    }
    for total in recorder.totals() {
        add(format!("calls.{}", total.operation), total.calls);
        add(format!("bytes_sent.{}", total.operation), total.bytes_sent);
    }
    sums
}
